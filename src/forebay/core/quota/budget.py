"""A key's limits and what is left of them.

All limits are checked before any is charged (rule 3), so a refusal by one has cost nothing in another. Tokens are
reserved from the estimate at admission and settled to the real usage at the end; usage beyond the reservation
becomes a debt, of at most one burst, that refills before the next request fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.core.instant import FOREVER, MINUTE, SECOND, Instant
from forebay.core.model import Demand, Refusal
from forebay.core.outcome import ShedReason
from forebay.core.quota.bucket import Bucket


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; None means unlimited, 0 means nothing is allowed."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # input and output together
    tokens_per_second: int | None = None  # the key's envelope
    burst_s: float = 2.0  # seconds of envelope that may be spent at once
    concurrency: int | None = None  # requests queued or in flight


class KeyBudget:
    """The state of one key: a bucket per limit and the count of its open requests."""

    __slots__ = ("_burst", "_requests", "_tokens", "concurrency", "limited", "open", "refusing")

    def __init__(self, limits: KeyLimits) -> None:
        self.open = 0
        self.refusing = False  # did the last check refuse?
        self._requests: Bucket | None = None
        self._tokens: list[Bucket] = []
        self.relimit(limits, 0)

    def relimit(self, limits: KeyLimits, now: Instant) -> None:
        """Take other limits. What is open stays open, and what was spent of a limit that stays is still spent."""
        before = {bucket.window_ns: bucket for bucket in self._tokens}
        rpm, tpm, tps = limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_second
        self.concurrency = limits.concurrency
        self._requests = None if rpm is None else _relimited(self._requests, rpm, MINUTE, None, now)
        self._tokens = []
        if tpm is not None:
            self._tokens.append(_relimited(before.get(MINUTE), tpm, MINUTE, None, now))
        if tps is not None:
            self._tokens.append(_relimited(before.get(SECOND), tps, SECOND, int(tps * limits.burst_s), now))
        self._burst = min((bucket.burst for bucket in self._tokens), default=0)
        self.limited = self._requests is not None or bool(self._tokens) or self.concurrency is not None

    def check(self, demand: Demand, service_ns: int, now: Instant) -> Refusal | None:
        """The first limit that refuses, or None. Nothing is charged. `service_ns`: how long a request usually takes."""
        refusal = self._first_refusal(demand, service_ns, now)
        self.refusing = refusal is not None
        return refusal

    def _first_refusal(self, demand: Demand, service_ns: int, now: Instant) -> Refusal | None:
        if self.concurrency is not None and self.open >= self.concurrency:
            # One of the open ones ends after its share of the usual time.
            retry = max(SECOND, service_ns // self.open) if self.concurrency else None
            return Refusal(ShedReason.KEY_CONCURRENCY, retry, self.concurrency, self.open, "open requests")
        requests = self._requests
        if requests is not None and (wait := requests.wait_ns(1, now)):
            retry = None if wait >= FOREVER else wait
            return Refusal(ShedReason.KEY_REQUESTS, retry, requests.limit, requests.remaining(now), "requests/min")
        if self._tokens:
            price = self._price(demand)
            for bucket in self._tokens:
                if wait := bucket.wait_ns(price, now):
                    return self._token_refusal(bucket, demand, wait, now)
        return None

    def _price(self, demand: Demand) -> int:
        """Tokens to reserve. A guessed output takes no more than one burst can pay, else it would never fit."""
        price = demand.input_tokens + demand.output_reserved
        if price > self._burst and demand.output_guessed:
            return max(demand.input_tokens, self._burst)
        return price

    @staticmethod
    def _token_refusal(bucket: Bucket, demand: Demand, wait: int, now: Instant) -> Refusal:
        if wait >= FOREVER and bucket.limit:
            return Refusal(ShedReason.NEVER_FITS, None, bucket.burst, demand.reserved, "tokens in one burst of the key")
        unit = "tokens/min" if bucket.window_ns == MINUTE else "tokens/s"
        retry = None if wait >= FOREVER else wait
        return Refusal(ShedReason.KEY_TOKENS, retry, bucket.limit, bucket.remaining(now), unit)

    def charge(self, demand: Demand, now: Instant) -> None:
        """Take one request, the reserved tokens and a place among the open ones."""
        self.open += 1
        if self._requests is not None:
            self._requests.charge(1, now)
        tokens = self._tokens
        if tokens:
            price = self._price(demand)
            for bucket in tokens:
                bucket.charge(price, now)

    def settle(self, demand: Demand, used_tokens: int, now: Instant) -> None:
        """End one request: give the place back and move the reservation to what was really used."""
        self.open -= 1
        assert self.open >= 0, "quota: a request was settled twice"
        if self._tokens:
            # Usage is an engine's word: a negative one would mint tokens.
            difference = (used_tokens if used_tokens > 0 else 0) - self._price(demand)
            for bucket in self._tokens:
                bucket.settle(difference, now)

    def headers(self, now: Instant) -> list[tuple[str, int, int, int]]:
        """(name, limit, remaining, reset_ns) of the request limit and of the tightest token limit."""
        rows = []
        bucket = self._requests
        if bucket is not None:
            rows.append(("requests", bucket.limit, *bucket.figures(now)))
        tightest = None
        for bucket in self._tokens:
            remaining, reset_ns = bucket.figures(now)
            if tightest is None or remaining < tightest[2]:
                tightest = ("tokens", bucket.limit, remaining, reset_ns)
        if tightest is not None:
            rows.append(tightest)
        return rows


def _relimited(bucket: Bucket | None, limit: int, window_ns: int, burst: int | None, now: Instant) -> Bucket:
    if bucket is None:
        return Bucket(limit, window_ns, burst)
    bucket.relimit(limit, burst, now)
    return bucket
