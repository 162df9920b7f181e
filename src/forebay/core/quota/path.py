"""All limits that a key's requests for a model meet, level by level, flattened into one short walk.

Every limit is checked before any is charged (rule 3), so a refusal by one has cost nothing in another. Tokens are
reserved from the estimate at admission and settled to the real usage at the end, in exactly the meters that were
charged: a path never changes, other limits make another path. Usage beyond the reservation becomes a debt that is paid
before the next request fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

from forebay.core.instant import FOREVER, MINUTE, SECOND, Instant
from forebay.core.model import Demand, Refusal, Usage
from forebay.core.outcome import ShedReason
from forebay.core.quota.bucket import Bucket
from forebay.core.quota.calendar import CalendarQuota
from forebay.core.quota.credits import CreditLine
from forebay.core.quota.level import Level, Meter
from forebay.core.quota.terms import DAY, MONTH, OUTPUT, REQUESTS, TOKENS, WEIGHTED, OverBudget

UNMETERED = FOREVER
"""Output tokens that are paid for when nothing counts tokens."""

FRAME_EVENTS = 8
"""Events of a stream that are no token (role, end, usage): so many beyond what is paid for are no debt."""

SLOWEST_NS = MINUTE
"""A stream that would have to be held for longer than this, for a new day or month, is ended."""

TOP_UP_NS = SECOND // 20
"""How long a stream waits for more credit before it asks again."""

Prices = tuple[int, int, int, int, int]
"""One request, and its tokens: all, of the input, of the output, weighted."""

FREE: Prices = (1, 0, 0, 0, 0)

_UNBOUNDED = (FOREVER,) * 5
_NOUNS = ("requests", "tokens", "input tokens", "output tokens", "weighted tokens")
_SPANS = {MINUTE: "min", DAY: "day", MONTH: "month"}


Left: TypeAlias = tuple[list[tuple[Level, int | None, int]], list[tuple[Meter, int, int]], tuple[int, int]]
"""Of limits: those of open requests with how many are, those of meters with what is left, and prepaid tokens."""


class Path:
    """The meters and places of one key's requests for one model. Immutable in what it holds.

    Its buckets are walked inline, with their arithmetic (see Bucket) spelt out: every request walks them four times,
    and a call for each would cost more than what it does. What is rare asks the bucket.
    """

    __slots__ = (
        "_buckets", "_bursts", "_meters", "_places", "_quotas", "_rates", "_requests", "_tokens", "credit", "levels",
        "limited", "metered", "model", "refusing",
    )  # fmt: skip

    def __init__(self, levels: tuple[Level, ...], credit: CreditLine | None, model: str = "") -> None:
        self.levels = levels  # the key's own first
        self.model = model  # whose days are counted apart; "": no model's
        self.credit = credit
        places = tuple(level for level in levels if level.concurrency is not None)
        self._places = levels if len(places) == len(levels) else places  # one tuple less to fetch
        meters = [meter for level in levels for meter in level.meters]
        buckets = [meter for meter in meters if isinstance(meter, Bucket)]
        self._requests = tuple(bucket for bucket in buckets if bucket.counts == REQUESTS)
        self._rates = tuple(bucket for bucket in buckets if bucket.counts != REQUESTS)
        self._quotas = tuple(meter for meter in meters if isinstance(meter, CalendarQuota))
        self._buckets = self._requests + self._rates
        self._meters: tuple[Meter, ...] = self._buckets + self._quotas
        self._tokens: tuple[Meter, ...] = self._rates + self._quotas
        self._bursts = _smallest_bursts(tuple((meter.counts, meter.burst) for meter in self._tokens))
        self.metered = bool(self._tokens) or credit is not None
        self.limited = bool(self._meters or self._places) or credit is not None
        self.refusing = False  # did the last check refuse?

    # ---- the verdict -----------------------------------------------------------------------------------------

    def prices(self, demand: Demand) -> Prices:
        """What a request takes of each kind of limit. A guess at its output takes no more than the smallest burst can
        pay, else it would never fit."""
        output, tokens_in = demand.output_reserved, demand.input_tokens
        if demand.output_guessed and output:
            bursts, credit = self._bursts, self.credit
            room = min(bursts[TOKENS] - tokens_in, bursts[OUTPUT], (bursts[WEIGHTED] - tokens_in) // 2)
            if credit is not None and credit.left - tokens_in < room:
                room = credit.left - tokens_in
            if output > room:
                output = max(room, 0)
        return 1, tokens_in + output, tokens_in, output, tokens_in + 2 * output

    def check(self, prices: Prices, service_ns: int, now: Instant) -> Refusal | None:
        """The limit that refuses, the one with the longest wait of several; or None. Nothing is charged.

        `service_ns`: how long a request usually takes.
        """
        fits = self._fits(prices, now)
        self.refusing = not fits
        return None if fits else self._refusal(prices, service_ns, now)

    def _fits(self, prices: Prices, now: Instant) -> bool:
        """Does no limit refuse? Then every bucket knows what it is when this is charged."""
        credit = self.credit
        if credit is not None and prices[TOKENS] > credit.left:
            return False
        for level in self._places:
            if level.concurrency is not None and level.open >= level.concurrency:
                return False
        for quota in self._quotas:
            if quota.wait_ns(prices[TOKENS], now):
                return False
        for bucket in self._buckets:
            at, tat = now * bucket.limit, bucket.tat
            due = (tat if tat > at else at) + prices[bucket.counts] * bucket.window_ns
            if due - at > bucket.span:
                return False
            bucket.due = due
        return True

    def _refusal(self, prices: Prices, service_ns: int, now: Instant) -> Refusal | None:
        credit = self.credit
        if credit is not None and prices[TOKENS] > credit.left:
            retry = None if credit.last else SECOND
            unit = "prepaid tokens that are left"
            return Refusal(ShedReason.KEY_CREDITS, retry, credit.left, prices[TOKENS], unit)
        for level in self._places:
            limit = level.concurrency
            if limit is not None and level.open >= limit:
                # One of the open ones ends after its share of the usual time.
                retry = max(SECOND, service_ns // level.open) if limit else None
                return Refusal(
                    ShedReason.KEY_CONCURRENCY, retry, limit, level.open + 1, "open requests", level=level.name
                )
        longest, which = 0, None
        for meter in self._meters:
            if (wait := meter.wait_ns(prices[meter.counts], now)) > longest:
                longest, which = wait, meter
        return None if which is None else _refused(which, prices[which.counts], longest, now)

    # ---- the changes -----------------------------------------------------------------------------------------

    def charge(self, prices: Prices, now: Instant) -> int:
        """Take what `check` has just let pass: one request, a place among the open ones and the reserved tokens, at
        every level.

        Returns the output tokens that are paid for by this; UNMETERED when nothing counts tokens.
        """
        for level in self.levels:
            level.open += 1
        if not self.limited:
            return UNMETERED
        for bucket in self._buckets:
            bucket.tat = bucket.due
        for quota in self._quotas:
            quota.charge(prices[TOKENS], now)
        if self.credit is not None:
            self.credit.hold(prices[TOKENS])
        return prices[OUTPUT] if self.metered else UNMETERED

    def meter(self, tokens_out: int, charged: Instant, over_budget: OverBudget, now: Instant) -> int:
        """Debit output beyond what was paid for, of a request that was charged then.

        Returns for how long its stream must be held, in ns: 0 for not at all, FOREVER when it has to end.
        """
        prices = 0, tokens_out, 0, tokens_out, 2 * tokens_out
        for bucket in self._rates:
            bucket.settle(prices[bucket.counts], now)
        for quota in self._quotas:
            quota.settle(tokens_out, charged, now)
        hold_ns = 0
        credit = self.credit
        if credit is not None:
            credit.hold(tokens_out)
            if credit.held + credit.spent > credit.leased:
                hold_ns = FOREVER if credit.last else TOP_UP_NS
        if over_budget is OverBudget.DEBT:
            return hold_ns
        for meter in self._tokens:
            if (wait := meter.wait_ns(0, now)) > hold_ns:
                hold_ns = wait
        return FOREVER if hold_ns and (over_budget is OverBudget.STOP or hold_ns > SLOWEST_NS) else hold_ns

    def settle(
        self, tokens_in: int, tokens_out: int, usage: Usage | None, charged: Instant, now: Instant, ran: bool = True
    ) -> None:
        """End a request that was charged then for these tokens: give its place back, and move the charge to what was
        really used. `usage` None: nothing. `ran` False: it never reached an engine, and does not count as a request.
        """
        for level in self.levels:
            level.open -= 1
            assert level.open >= 0, "quota: a request was settled twice"
        if not ran:
            for bucket in self._requests:
                bucket.charge(-1, now)
        if self.metered:
            used_in = used_out = 0
            if usage is not None:
                used_in, used_out = usage.charged_input, usage.output_tokens
                if used_out < 0:  # an engine's word, which would mint tokens
                    used_out = 0
            more_in, more_out = used_in - tokens_in, used_out - tokens_out
            prices = 0, more_in + more_out, more_in, more_out, more_in + 2 * more_out
            for bucket in self._rates:
                at, tat = now * bucket.limit, bucket.tat
                if tat < at:
                    tat = at
                tat += prices[bucket.counts] * bucket.window_ns
                bucket.tat = tat if tat - at < bucket.most_owed else at + bucket.most_owed
            for quota in self._quotas:
                quota.settle(prices[TOKENS], charged, now)
            if self.credit is not None:
                self.credit.capture(tokens_in + tokens_out, used_in + used_out)

    # ---- what is left ----------------------------------------------------------------------------------------

    def left(self, now: Instant) -> Left:
        """What is left of every limit that requests on this path meet; `described` puts it into words."""
        return (
            [(level, level.concurrency, level.open) for level in self._places],
            [(meter, meter.burst, meter.remaining(now)) for meter in self._meters],
            (0, 0) if self.credit is None else (self.credit.leased, self.credit.left),
        )

    def headers(self, now: Instant) -> list[tuple[str, int, int, int]]:
        """(name, limit, remaining, reset_ns) of the tightest limit of requests and of the tightest of tokens."""
        rows = []
        if self._requests:
            rows.append(("requests", *_tightest(self._requests, now)))
        if self._rates or self._quotas:
            limit, remaining, reset_ns = _tightest(self._rates, now)
            for quota in self._quotas:
                if (left := quota.remaining(now)) < remaining:
                    limit, remaining, reset_ns = quota.limit, left, quota.reset_ns(now)
            rows.append(("tokens", limit, remaining, reset_ns))
        return rows


def described(left: Left) -> Iterator[tuple[str, str, int, int]]:
    """(level, what is counted, most, left) of each limit."""
    levels, meters, (leased, credit) = left
    for level, most, open_ in levels:
        if most is not None:
            yield level.name, "open requests", most, most - open_
    for meter, most, remaining in meters:
        yield meter.level, _unit(meter), most, remaining
    if leased:
        yield "", "prepaid tokens", leased, credit


def _tightest(buckets: tuple[Bucket, ...], now: Instant) -> tuple[int, int, int]:
    """(limit, remaining, reset_ns) of the bucket with the least left; FOREVER of none."""
    limit, least, most_ahead = 1, FOREVER, 0
    for bucket in buckets:
        ahead = bucket.tat - now * bucket.limit
        left = (bucket.span - ahead) // bucket.window_ns if ahead > 0 else bucket.burst
        if left < least:
            limit, least, most_ahead = bucket.limit, left, ahead
    return limit, least if least > 0 else 0, -(-most_ahead // limit) if most_ahead > 0 and limit else 0


@lru_cache(maxsize=1024)
def _smallest_bursts(metered: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """By what is counted, of pairs of that and a burst. Keys with the same limits share it: one thing less of each that
    is in no cache."""
    bursts = list(_UNBOUNDED)
    for counts, burst in metered:
        bursts[counts] = min(bursts[counts], burst)
    return tuple(bursts)


def _refused(meter: Meter, price: int, wait_ns: int, now: Instant) -> Refusal:
    """The refusal by a meter: what would be spent of what there is."""
    unit = _unit(meter)
    burst, spent = meter.burst, meter.burst - meter.remaining(now)
    if meter.counts == REQUESTS:
        reason = ShedReason.KEY_REQUESTS
    elif wait_ns >= FOREVER and meter.limit:
        return Refusal(ShedReason.NEVER_FITS, None, burst, price, unit, level=meter.level)
    else:
        reason = ShedReason.KEY_TOKENS
    retry = None if wait_ns >= FOREVER else wait_ns
    return Refusal(reason, retry, burst, spent + price, unit, level=meter.level)


def _unit(meter: Meter) -> str:
    noun = _NOUNS[meter.counts]
    if meter.window_ns == SECOND:
        return f"{noun} at once, at {meter.limit} {noun}/s,"
    return f"{noun}/{_SPANS[meter.window_ns]}"
