"""Concurrency-limit algorithms: how much one engine may hold at once. One file each."""

from __future__ import annotations

from forebay.core.limits.fixed import Fixed, FixedConfig
from forebay.core.limits.limit import Limit

POLICIES = {"fixed": Fixed}


def build(config: FixedConfig) -> Limit:
    """The limit that a config asks for."""
    return Fixed(config)
