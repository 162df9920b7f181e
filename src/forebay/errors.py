"""Errors that reach a person. Each says what is wrong, where, and what to do; `exit_code` is the command's status."""

from __future__ import annotations


class ForebayError(Exception):
    """Base of all errors that Forebay raises on purpose."""

    exit_code = 1


class ConfigError(ForebayError):
    """The configuration cannot be used: file, line, field and reason are in the message."""

    exit_code = 2


class EngineError(ForebayError):
    """An engine cannot be started, reached or understood."""


class UsageError(ForebayError):
    """A command was asked for something it cannot do."""

    exit_code = 2
