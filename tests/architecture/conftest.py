"""The import contracts are checked in this process, and import-linter configures logging for a process of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def loggers_stay_enabled() -> Iterator[None]:
    """Setting logging up anew disables every logger that exists; tests that come later read what is logged."""
    loggers = [known for known in logging.root.manager.loggerDict.values() if isinstance(known, logging.Logger)]
    enabled = [logger for logger in loggers if not logger.disabled]
    yield
    for logger in enabled:
        logger.disabled = False
