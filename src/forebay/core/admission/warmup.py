"""How long an engine takes to become ready, learned from the times it did."""

from __future__ import annotations

from forebay.core.instant import SECOND, Instant

WARMUP_DEFAULT_NS = 30 * SECOND
WARMUP_LEAST_NS = SECOND


class WarmupClock:
    """The expected time until the first engine of a pool is ready."""

    def __init__(self) -> None:
        self._learned_ns = WARMUP_DEFAULT_NS
        self._since: Instant | None = None

    def started(self, now: Instant) -> None:
        """An engine was first seen to be warming (repeats are ignored)."""
        if self._since is None:
            self._since = now

    def ended(self, now: Instant) -> None:
        """An engine became ready."""
        if self._since is not None:
            self._learned_ns = max(WARMUP_LEAST_NS, now - self._since)
            self._since = None

    def eta_ns(self, now: Instant) -> int:
        """Time until readiness, at least a second; overdue engines are promised in steps of a tenth of the time."""
        elapsed = 0 if self._since is None else now - self._since
        return max(WARMUP_LEAST_NS, self._learned_ns // 10, self._learned_ns - elapsed)
