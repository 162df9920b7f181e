"""The simulated engine's thin shell around time: steps of a pure model on an event loop, real or scaled."""

from __future__ import annotations

import asyncio
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import Protocol

from forebay.engines.serving import Job, Sink
from forebay.engines.simulated.faults import FaultInjector, Faults, faults_endpoint

MAX_LAG_S = 0.05  # behind by more than this the machine is too slow for the pace, and lateness is accepted
MAX_STEPS_PER_TURN = 64  # lets the loop serve connections at very high time scales
CRASH_STATUS = 70


class Steps(Protocol):
    """The engine that is paced. Times are simulated nanoseconds."""

    def begin_step(self, start: int) -> int | None:
        """Compute the next step; its duration, or None when there is nothing to do."""

    def end_step(self, end: int) -> None:
        """The step's time is over: hand out what it made."""


class Pacer:
    """Runs steps back to back while there is work. Simulated time is wall time since the start, times `scale`."""

    def __init__(self, steps: Steps, scale: float, stalled_until: Callable[[float], float | None]) -> None:
        self._steps, self._scale, self._stalled_until = steps, scale, stalled_until
        self._loop = asyncio.get_running_loop()
        self._epoch = self._loop.time()
        self._active = False
        self._in_step = False
        self._end = 0
        self._timer: asyncio.Handle | None = None

    def now(self) -> int:
        """Simulated ns since the start."""
        return int((self._loop.time() - self._epoch) * self._scale * 1e9)

    def wall_s(self, simulated_ns: int) -> float:
        """A simulated span in wall-clock seconds."""
        return simulated_ns / 1e9 / self._scale

    def wake(self) -> None:
        """There is work; begins a step unless one is under way."""
        if not self._active:
            self._active = True
            # At the end of the turn, so that requests that came together share the first step.
            self._end = self.now()
            self._timer = self._loop.call_soon(self._turn)

    def stop(self) -> None:
        """No step ends after this."""
        if self._timer is not None:
            self._timer.cancel()

    def _turn(self) -> None:
        now = self.now()
        for _ in range(MAX_STEPS_PER_TURN):
            if self._in_step:
                self._in_step = False
                self._steps.end_step(self._end)
            wall = self._loop.time()
            resume = self._stalled_until(wall)
            if resume is not None:
                self._end = now
                self._timer = self._loop.call_at(resume, self._turn)
                return
            # From the planned end of the last step, not from the late timer: lateness must not add up.
            start = self._end if self.wall_s(now - self._end) <= MAX_LAG_S else now
            duration = self._steps.begin_step(start)
            if duration is None:
                self._active = False
                return
            self._in_step = True
            self._end = start + duration
            if self._end > now:
                break
        self._timer = self._loop.call_at(self._epoch + self.wall_s(self._end), self._turn)


class FaultyEngine(ABC):
    """Base of the simulated engines: readiness, faults and pace, the same for all kinds of model."""

    def __init__(self, model_id: str, max_model_len: int, *, time_scale: float, faults: Faults, seed: int) -> None:
        if time_scale <= 0:
            raise ValueError(f"time_scale must be positive, got {time_scale}")
        self.model_id, self.max_model_len = model_id, max_model_len
        self.injector: FaultInjector | None = None
        self._time_scale, self._initial_faults = time_scale, faults
        self._fault_rng = Random(f"{seed}/faults")
        self._pacer: Pacer
        self._last_request = ""
        self._last_passed = False

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.injector = FaultInjector(self._initial_faults, self._fault_rng, loop.time())
        self._pacer = Pacer(self._as_steps(), self._time_scale, self.injector.stalled_until)

    async def stop(self) -> None:
        if self.injector is not None:
            self._pacer.stop()

    def ready(self) -> bool:
        return self.injector is not None and self.injector.ready(asyncio.get_running_loop().time())

    def control(self, method: str, body: bytes) -> tuple[int, bytes]:
        """The /faults endpoint."""
        answer = faults_endpoint(self._faults(), method, body, asyncio.get_running_loop().time())
        self._on_faults(self._faults().faults)
        return answer

    @abstractmethod
    def _as_steps(self) -> Steps:
        """What the pacer is to run."""

    @abstractmethod
    def _on_faults(self, faults: Faults) -> None:
        """The settings have changed."""

    def _faults(self) -> FaultInjector:
        assert self.injector is not None, "the engine has not been started"
        return self.injector

    def _passes(self, job: Job, sink: Sink) -> bool:
        """Whether a job is to be served; the faults decide once for all jobs of a request."""
        injector = self._faults()
        if job.request_id and job.request_id == self._last_request:
            return self._last_passed
        verdict = injector.verdict(asyncio.get_running_loop().time())
        self._last_request, self._last_passed = job.request_id, verdict == "serve"
        if verdict == "error":
            status = injector.faults.error_status
            sink.error(status, f"Injected fault: status {status}", "InternalServerError")
        return self._last_passed

    def _is_full(self, load: int, sink: Sink, *, stream: bool) -> bool:
        """Refuses, as vLLM does, when `load` sequences are as many as may be here."""
        faults = self._faults().faults
        if faults.max_num_queued_reqs is None or load < faults.max_num_queued_reqs:
            return False
        if stream and faults.refuse_inside_stream:
            sink.begin()
        message = f"The engine is currently busy: {load} requests are running or waiting. Please retry later."
        sink.error(503, message, "Service Unavailable")
        return True

    def _crash_if_due(self) -> None:
        if self._faults().crash_due:
            print("injected fault: the engine crashes now", file=sys.stderr, flush=True)
            os._exit(CRASH_STATUS)
