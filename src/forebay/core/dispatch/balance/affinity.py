"""The engine that has the beginning of this prompt in its cache, as long as it is not much busier than the best.

The hash of a body's first kilobyte is ranked against every engine's name (rendezvous hashing), so that the same
beginning meets the same engine on every gateway, and an engine that goes takes only its own beginnings along. Two
bounds keep one popular beginning from making a hot engine: none is chosen for it that holds a quarter more requests
than the average, and none that has a fifth more work before this request's end than the best, which would have to read
the prompt first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from forebay.core.dispatch.balance.least import Least
from forebay.core.dispatch.leases import PROMPT_FIRST, Engine
from forebay.core.instant import Instant
from forebay.core.model import Request

MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class AffinityConfig:
    """How far it goes for a cache."""

    kind: Literal["affinity"] = "affinity"
    prefix_bytes: int = 1024  # of the body; a shorter one has no beginning worth keeping
    bound: float = 1.25  # times the average of requests in flight
    detour: float = 1.2  # times the predicted wait of the best engine


class Affinity:
    """Least outstanding work, with a detour for a warm cache."""

    def __init__(self, config: AffinityConfig) -> None:
        self.prefix_bytes = config.prefix_bytes
        self._config = config
        self._least = Least()
        self._seeds: dict[str, int] = {}

    def choose(
        self, engines: Sequence[Engine], request: Request, tokens: int, now: Instant, prompt: int | None = None
    ) -> Engine | None:
        """The first in the rank of its prefix that keeps both bounds, else the least loaded."""
        best = self._least.choose(engines, request, tokens, now, prompt)
        prefix = request.prefix
        if best is None or not prefix:
            return best
        config = self._config
        most = config.bound * (1 + sum(engine.in_flight for engine in engines)) / len(engines)
        latest = config.detour * (best.load(now) + (1 + PROMPT_FIRST) * tokens)  # there it would have to be read
        chosen, highest = best, -1
        for engine in engines:
            if (
                engine.in_flight < most
                and engine.load(now) + tokens <= latest
                and engine.has_room(tokens, now, prompt, request.priority)
            ):
                rank = _mixed(prefix ^ self._seed(engine.name))
                if rank > highest:
                    chosen, highest = engine, rank
        return chosen

    def _seed(self, name: str) -> int:
        seed = self._seeds.get(name)
        if seed is None:
            seed = self._seeds[name] = _mixed(crc32(name.encode()) + 1)
        return seed


def _mixed(number: int) -> int:
    """Every bit of the result depends on every bit of the number (the finalizer of MurmurHash3)."""
    number = (number ^ number >> 33) * 0xFF51AFD7ED558CCD & MASK
    number = (number ^ number >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return number ^ number >> 33
