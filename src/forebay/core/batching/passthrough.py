"""No batching: for engines that batch continuously by themselves, each request leaves alone and at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.core.instant import Instant


@dataclass(frozen=True, slots=True)
class PassThroughConfig:
    """Nothing to set."""

    kind: Literal["passthrough"] = "passthrough"


class PassThrough:
    """Every request is a batch of one."""

    max_size = 1
    max_tokens = 1 << 62
    linger_ns = 0

    def __init__(self, config: PassThroughConfig) -> None:
        del config

    def ready_at(self, waiting: int, waiting_tokens: int, oldest: Instant, now: Instant) -> Instant:  # noqa: ARG002
        return now
