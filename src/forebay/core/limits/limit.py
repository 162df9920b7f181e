"""The question that a concurrency limit answers, and what it is told.

A limit is a small policy: it sees every answer that ended well, every failure that speaks of the engine, and, as often
as it asks to, a view of what the engine holds. It never sees a clock, a queue or another engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from forebay.core.instant import Instant
from forebay.core.model import EngineSignal

UNBOUNDED = 1 << 62

Signal = Literal["latency", "ttft", "per_token"]
"""What a latency-driven limit takes for the response time: dispatch to the end, dispatch to the first token (the end,
where nothing was streamed), or dispatch to the end divided by the output tokens."""


class Answer(NamedTuple):
    """One request that was answered as it should."""

    held_ns: int  # dispatch to the end
    first_ns: int  # dispatch to the first token; 0 when it was not streamed
    output_tokens: int  # 0 when the engine did not say
    in_flight: int  # leases open on the engine, this one included, when it ended

    def response_ns(self, signal: Signal) -> int:
        """The response time that the signal means."""
        if signal == "ttft":
            return self.first_ns or self.held_ns
        if signal == "per_token":
            return self.held_ns // max(1, self.output_tokens)
        return self.held_ns


class View(NamedTuple):
    """What one engine holds, and what it did since the last view."""

    elapsed_ns: int  # since the last view
    in_flight: int  # leases open now
    in_flight_most: int  # since the last view
    waiting: bool  # did a request wait for room on this engine's pool?
    decoding_ns: int  # sum over the leases of the time that they were streaming tokens
    generated: int  # tokens that they streamed in that time
    prefilled: int  # prompt tokens whose first token came
    prefilling_ns: int  # time in which any prompt's first token was still to come
    prefilling: int  # prompt tokens whose first token is still to come
    expected_tokens: int  # prompts and expected outputs of the leases, summed
    peak_tokens: int  # most of these that are in the engine's memory at one time, as expected
    restrained: bool = False  # may it hold less than the limit for another reason?
    kept_out: bool = False  # did a request wait because the streams could not spare the time of its prompt?

    def then(self, later: View) -> View:
        """Both as one view: what was summed is added up, what holds now is the later one's."""
        return View(
            elapsed_ns=self.elapsed_ns + later.elapsed_ns,
            in_flight=later.in_flight,
            in_flight_most=max(self.in_flight_most, later.in_flight_most),
            waiting=self.waiting or later.waiting,
            decoding_ns=self.decoding_ns + later.decoding_ns,
            generated=self.generated + later.generated,
            prefilled=self.prefilled + later.prefilled,
            prefilling_ns=self.prefilling_ns + later.prefilling_ns,
            prefilling=later.prefilling,
            expected_tokens=later.expected_tokens,
            peak_tokens=later.peak_tokens,
            restrained=self.restrained or later.restrained,
            kept_out=self.kept_out or later.kept_out,
        )


@dataclass(frozen=True, slots=True)
class SlackConfig:
    """What the streams of an engine must be able to spare before a prompt is let in (dispatch/slack.py)."""

    objective_ns: int  # mean time between two tokens of a stream
    poor_share: float  # of the streams may have less than a prompt takes
    prompt_share: float  # of the time that reading a prompt takes is lost to the streams: they go on meanwhile
    least: int = 2  # requests that are let in whatever the streams say
    pressed: float = 0.7  # of the objective is the streams' mean gap before they are asked: below, they will make it up


class Limit(Protocol):
    """How much may be in flight on one engine?"""

    requests: int
    tokens: int  # expected tokens in and out of the leases
    prefill_tokens: int  # prompt tokens of streams that have not begun
    prefill_rate: float  # prompt tokens per ns that the engine has shown; 0.0: not known
    learns: bool  # False: it need not be told anything
    gap_ns: float  # time between two tokens of a stream as it last saw it; 0: it does not look at that
    interval_ns: int  # how often it wants a view; 0: never
    slack: SlackConfig | None  # what streams must be able to spare; None: it does not look at that

    def answered(self, answer: Answer, now: Instant) -> None:
        """A lease ended with a proper answer."""
        ...

    def failed(self, now: Instant) -> None:
        """A lease ended with a failure of the engine."""
        ...

    def viewed(self, view: View, now: Instant) -> None:
        """What the engine holds, `interval_ns` after the last time."""
        ...

    def restarted(self, now: Instant) -> None:
        """The engine is there again after it was away: what was learned of the old process may not hold."""
        ...

    def signalled(self, signal: EngineSignal, in_flight: int, now: Instant) -> None:
        """What the engine says of itself, while so many leases of ours are open on it."""
        ...
