"""The better of two engines that were drawn by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forebay.core.dispatch.leases import Engine
from forebay.core.instant import Chance, Instant
from forebay.core.model import Request


@dataclass(frozen=True, slots=True)
class P2cConfig:
    """Nothing to set."""

    kind: Literal["p2c"] = "p2c"


class P2c:
    """Power of two choices: gateways that do not know of each other do not all send to the same one."""

    prefix_bytes = 0

    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    def choose(
        self, engines: Sequence[Engine], request: Request, tokens: int, now: Instant, prompt: int | None = None
    ) -> Engine | None:
        """Of two with room, drawn at random, the one with less work before it."""
        able = [engine for engine in engines if engine.has_room(tokens, now, prompt, request.priority)]
        if len(able) < 2:
            return able[0] if able else None
        first = int(self._chance.random() * len(able))
        second = int(self._chance.random() * (len(able) - 1))
        one, other = able[first], able[second + (second >= first)]
        return other if (other.load(now), other.in_flight) < (one.load(now), one.in_flight) else one
