"""What a client does after a refusal: the official SDK's rules, an impatient loop, or nothing.

A policy is a pure function of the attempt and the answer; the generator for jitter is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import mktime_tz, parsedate_tz
from random import Random
from typing import Protocol

from forebay.errors import UsageError

CONNECTION_ERROR = 0
"""The `status` of an attempt that got no answer."""


class RetryPolicy(Protocol):
    """Decides whether and when a failed attempt is sent again."""

    def delay_s(
        self, retries_done: int, status: int, headers: Mapping[str, str], rng: Random, wall_s: float
    ) -> float | None:
        """Seconds to wait before the next attempt, or None to give up.

        `headers` has lower-case names; `wall_s` is the time of day, for dates in `retry-after`.
        """
        ...

    def request_headers(self, retries_done: int) -> bytes:
        """Header lines that this client adds, each ended by CR LF."""
        ...


@dataclass(frozen=True, slots=True)
class SdkRetry:
    """The retry rules of the `openai` package: obeys `x-should-retry`, `retry-after-ms`, then `retry-after`.

    Since 2026 it honours delays up to 120 s and gives up beyond; releases before honoured up to 60 s and fell back to
    their own back-off beyond (`honoured_up_to_s=60, gives_up_beyond=False`).
    """

    max_retries: int = 2
    honoured_up_to_s: float = 120.0
    gives_up_beyond: bool = True
    initial_delay_s: float = 0.5
    max_delay_s: float = 8.0
    read_timeout_s: float = 600.0
    shows_tickets: bool = False
    """Does it send the retry ticket of a refusal back with its next attempt, as `forebay.client` lets it?"""

    def delay_s(
        self, retries_done: int, status: int, headers: Mapping[str, str], rng: Random, wall_s: float
    ) -> float | None:
        if retries_done >= self.max_retries:
            return None
        asked = retry_after_s(headers, wall_s)
        if status != CONNECTION_ERROR and not self._retryable(status, headers, asked):
            return None
        if asked is not None and 0 < asked <= self.honoured_up_to_s:
            return asked
        backoff = min(self.initial_delay_s * 2.0**retries_done, self.max_delay_s)
        return float(backoff * (1.0 - 0.25 * rng.random()))

    def _retryable(self, status: int, headers: Mapping[str, str], asked: float | None) -> bool:
        if self.gives_up_beyond and asked is not None and asked > self.honoured_up_to_s:
            return False
        verdict = headers.get("x-should-retry")
        if verdict in {"true", "false"}:
            return verdict == "true"
        return status in {408, 409, 429} or status >= 500

    def request_headers(self, retries_done: int) -> bytes:
        timeout = f"{self.read_timeout_s:g}"
        return f"x-stainless-retry-count: {retries_done}\r\nx-stainless-read-timeout: {timeout}\r\n".encode()


@dataclass(frozen=True, slots=True)
class NaiveRetry:
    """Sends again at once, whatever the answer asks; `max_retries` bounds the harm."""

    max_retries: int = 5

    def delay_s(
        self,
        retries_done: int,
        status: int,
        headers: Mapping[str, str],  # noqa: ARG002
        rng: Random,  # noqa: ARG002
        wall_s: float,  # noqa: ARG002
    ) -> float | None:
        if retries_done >= self.max_retries:
            return None
        return 0.0 if status == CONNECTION_ERROR or status == 429 or status >= 500 else None

    def request_headers(self, retries_done: int) -> bytes:  # noqa: ARG002
        return b""


@dataclass(frozen=True, slots=True)
class NoRetry:
    """Takes the first answer as the last."""

    def delay_s(
        self,
        retries_done: int,  # noqa: ARG002
        status: int,  # noqa: ARG002
        headers: Mapping[str, str],  # noqa: ARG002
        rng: Random,  # noqa: ARG002
        wall_s: float,  # noqa: ARG002
    ) -> float | None:
        return None

    def request_headers(self, retries_done: int) -> bytes:  # noqa: ARG002
        return b""


CLIENTS = ("sdk", "sdk-tickets", "sdk-2025", "naive", "none")


def client_model(name: str, patience_s: float | None = None) -> RetryPolicy:
    """The policy of a client model by name; the patience is what an SDK would send as its read time-out."""
    timeout = 600.0 if patience_s is None else patience_s
    if name == "sdk":
        return SdkRetry(read_timeout_s=timeout)
    if name == "sdk-tickets":
        return SdkRetry(read_timeout_s=timeout, shows_tickets=True)
    if name == "sdk-2025":
        return SdkRetry(honoured_up_to_s=60.0, gives_up_beyond=False, read_timeout_s=timeout)
    if name == "naive":
        return NaiveRetry()
    if name == "none":
        return NoRetry()
    raise UsageError(f"unknown client model {name!r}: choose one of {', '.join(CLIENTS)}")


def retry_after_s(headers: Mapping[str, str], wall_s: float) -> float | None:
    """The delay that an answer asks for, in seconds: milliseconds first, then seconds, then a date; None if none."""
    for name, divisor in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            delay = float(headers[name])
        except (KeyError, ValueError):
            continue
        if math.isfinite(delay):
            return delay / divisor
        # A number too large for a float is an excessive delay; a literal `inf` or `nan` asks for nothing.
        return math.inf if delay > 0 and "n" not in headers[name].lower() else None
    try:
        parsed = parsedate_tz(headers.get("retry-after"))
        return None if parsed is None else mktime_tz(parsed) - wall_s
    except (TypeError, ValueError, OverflowError, OSError):
        return None
