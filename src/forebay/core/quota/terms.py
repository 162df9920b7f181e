"""What a key may do: its limits, the groups whose limits it shares, and whether it pays in advance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from forebay.core.instant import MINUTE, SECOND

REQUESTS, TOKENS, INPUT, OUTPUT, WEIGHTED = range(5)
"""What a limit counts: places in the tuple of prices of a request."""

DAY, MONTH = 86_400 * SECOND, 30 * 86_400 * SECOND
"""Names of the calendar's windows; a month is as long as the calendar says."""


class OverBudget(StrEnum):
    """What happens to a stream that generates more than its key can pay."""

    DEBT = "debt"  # it goes on, and the key pays before its next request
    STOP = "stop"  # it ends with an error event
    SLOW = "slow"  # it goes on as fast as the budget refills


_NO_MODELS: Mapping[str, KeyLimits] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one level: a key, a team, a class or all. None means unlimited, 0 means that nothing is allowed."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # input and output together
    tokens_per_second: int | None = None  # the envelope, of input and output together
    burst_s: float = 2.0  # seconds of envelope that may be spent at once
    concurrency: int | None = None  # requests queued or in flight
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    weighted_tokens_per_minute: int | None = None  # input + 2 x output
    tokens_per_day: int | None = None  # input and output, a day of UTC
    tokens_per_month: int | None = None  # input and output, a month of UTC
    models: Mapping[str, KeyLimits] = field(default_factory=lambda: _NO_MODELS)  # further limits of one model each

    @property
    def counts_days(self) -> bool:
        """Is there a quota of a day or a month, of any model or of one?"""
        own = self.tokens_per_day is not None or self.tokens_per_month is not None
        return own or any(of_model.counts_days for of_model in self.models.values())

    @property
    def limited(self) -> bool:
        """Does it limit anything?"""
        return self.concurrency is not None or bool(self.models) or any(True for _ in windows(self))


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """One key: its own limits, the groups (`team:x`, `class:y`, `all`) that it shares theirs with, and its credit."""

    limits: KeyLimits = KeyLimits()
    groups: tuple[str, ...] = ()
    prepaid: bool = False  # it spends credit that was leased to this gateway


def windows(limits: KeyLimits) -> Iterator[tuple[int, int, int, int]]:
    """(what is counted, window in ns, limit, burst) of every limit that is set, requests first."""
    if limits.requests_per_minute is not None:
        yield REQUESTS, MINUTE, limits.requests_per_minute, limits.requests_per_minute
    for counted, limit in (
        (TOKENS, limits.tokens_per_minute),
        (INPUT, limits.input_tokens_per_minute),
        (OUTPUT, limits.output_tokens_per_minute),
        (WEIGHTED, limits.weighted_tokens_per_minute),
    ):
        if limit is not None:
            yield counted, MINUTE, limit, limit
    if (envelope := limits.tokens_per_second) is not None:
        yield TOKENS, SECOND, envelope, int(envelope * limits.burst_s)
    if limits.tokens_per_day is not None:
        yield TOKENS, DAY, limits.tokens_per_day, limits.tokens_per_day
    if limits.tokens_per_month is not None:
        yield TOKENS, MONTH, limits.tokens_per_month, limits.tokens_per_month
