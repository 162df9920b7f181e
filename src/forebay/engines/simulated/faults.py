"""Faults on demand: what a real engine does on its bad days, so that the gateway's answer to it can be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from random import Random

Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]

Verdict = Literal["serve", "error", "hang"]


class Faults(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Settings of the fault injection; the defaults are a healthy engine. Counts start when they are set."""

    cold_start_s: Seconds = 0.0
    """503 everywhere for so long, counted from the start or from the moment it is set."""
    error_rate: Share = 0.0
    """Share of requests answered with `error_status` at once."""
    error_status: Annotated[int, Meta(ge=400, le=599)] = 500
    error_after_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Fail every answer after so many tokens, inside its stream."""
    max_num_queued_reqs: Annotated[int, Meta(ge=1)] | None = None
    """Refuse with 503, without Retry-After, while so many sequences wait or run (as vLLM's option of that name)."""
    refuse_inside_stream: bool = False
    """Streams that are refused get a 200 and an error event, which vLLM also does."""
    stall_s: Seconds = 0.0
    """Make no token for so long, then go on."""
    stall_after: Annotated[int, Meta(ge=0)] = 0
    """Begin the stall with this many requests; 0 begins it at once."""
    crash_after: Annotated[int, Meta(ge=1)] | None = None
    """Kill the process in the step after so many requests have come."""
    slow_factor: Annotated[float, Meta(ge=0.01, le=1000)] = 1.0
    """Every step takes so many times longer."""
    usage_factor: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """Report so many times the real token counts."""
    omit_usage: bool = False
    """Leave `usage` out even where the client asked for it."""
    hang_rate: Share = 0.0
    """Share of requests that are taken and never answered, not even with a status."""


class FaultInjector:
    """The faults that are set now, and what they do to the next request. Times are in wall-clock seconds."""

    def __init__(self, faults: Faults, rng: Random, now: float) -> None:
        self._rng = rng
        self._requests = 0
        self._stall_until = self._ready_at = now
        self.faults = faults
        self._arm(now, fresh=frozenset(("cold_start_s", "stall_s")))

    def apply(self, patch: dict[str, Any], now: float) -> None:
        """Change the named settings. Raises `msgspec.ValidationError` for what no setting can be."""
        merged = msgspec.to_builtins(self.faults) | patch
        self.faults = msgspec.convert(merged, Faults)
        self._arm(now, frozenset(patch))

    def reset(self, now: float) -> None:
        """Healthy again at once."""
        self.faults = Faults()
        self._stall_until = self._ready_at = now
        self._requests = 0

    def ready(self, now: float) -> bool:
        """False during a cold start."""
        return now >= self._ready_at

    def stalled_until(self, now: float) -> float | None:
        """The end of the stall under way, None when there is none."""
        return self._stall_until if self._stall_until > now else None

    def verdict(self, now: float) -> Verdict:
        """What becomes of the request that has just come. Counts it."""
        faults = self.faults
        self._requests += 1
        if faults.stall_s and faults.stall_after and self._requests == faults.stall_after:
            self._stall_until = now + faults.stall_s
        if faults.hang_rate and self._rng.random() < faults.hang_rate:
            return "hang"
        if faults.error_rate and self._rng.random() < faults.error_rate:
            return "error"
        return "serve"

    @property
    def crash_due(self) -> bool:
        """Whether the process has served its last request."""
        return self.faults.crash_after is not None and self._requests >= self.faults.crash_after

    def reported(self, prompt_tokens: int, completion_tokens: int) -> tuple[int, int]:
        """The usage that the engine admits to; -1 stands for none."""
        if self.faults.omit_usage:
            return -1, 0
        factor = self.faults.usage_factor
        return round(prompt_tokens * factor), round(completion_tokens * factor)

    def _arm(self, now: float, fresh: frozenset[str]) -> None:
        if "cold_start_s" in fresh:
            self._ready_at = now + self.faults.cold_start_s
        if fresh & {"stall_s", "stall_after"} and not self.faults.stall_after:
            self._stall_until = now + self.faults.stall_s
        if fresh & {"stall_after", "crash_after"}:
            self._requests = 0


def faults_endpoint(injector: FaultInjector, method: str, body: bytes, now: float) -> tuple[int, bytes]:
    """GET shows the settings, POST changes those named in a JSON object, DELETE heals. Returns status and body."""
    if method == "POST":
        try:
            injector.apply(msgspec.json.decode(body, type=dict[str, Any]), now)
        except msgspec.DecodeError as error:
            return 400, msgspec.json.encode({"error": {"message": str(error), "type": "BadRequestError"}})
    elif method == "DELETE":
        injector.reset(now)
    elif method != "GET":
        return 405, b'{"error":{"message":"Use GET, POST or DELETE here","type":"MethodNotAllowed"}}'
    return 200, msgspec.json.encode(injector.faults)
