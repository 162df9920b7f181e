"""Dispatch now, or wait for more? One policy per engine kind."""

from __future__ import annotations

from forebay.core.batching.dynamic import Dynamic, DynamicConfig
from forebay.core.batching.former import Batcher
from forebay.core.batching.passthrough import PassThrough, PassThroughConfig

BatchingConfig = PassThroughConfig | DynamicConfig

POLICIES: dict[str, type[PassThrough | Dynamic]] = {"passthrough": PassThrough, "dynamic": Dynamic}


def build(config: BatchingConfig) -> Batcher:
    """The batcher that a config asks for."""
    return Dynamic(config) if isinstance(config, DynamicConfig) else PassThrough(config)
