"""Any engine with room, by chance. A baseline: what knowing nothing costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forebay.core.dispatch.leases import Engine
from forebay.core.instant import Chance, Instant
from forebay.core.model import Request


@dataclass(frozen=True, slots=True)
class RandomConfig:
    """Nothing to set."""

    kind: Literal["random"] = "random"


class Random:
    """Looks at nothing but room."""

    prefix_bytes = 0

    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    def choose(
        self, engines: Sequence[Engine], request: Request, tokens: int, now: Instant, prompt: int | None = None
    ) -> Engine | None:
        """One with room, each as likely as the others."""
        able = [engine for engine in engines if engine.has_room(tokens, now, prompt, request.priority)]
        return able[int(self._chance.random() * len(able))] if able else None
