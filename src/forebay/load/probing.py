"""A short run of requests that shows how an engine's steps take their time: alone, together, long, and mixed.

Each round of probes begins with the engine idle and ends when all its requests have: what is measured of one cannot
leak into the next. Sizes are chosen to tell the parts of a step apart, and the number of repeats to fit the time given.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import uvloop

from forebay.errors import EngineError
from forebay.load.attack import record_of
from forebay.load.client import Call, Client
from forebay.load.target import Target
from forebay.load.workload import Magazine, Workload
from forebay.report.records import RequestRecord
from forebay.workload.arrival import NS_PER_S, Arrival
from forebay.workload.retry import NoRetry
from forebay.workload.sizes import Sizes

ANSWER = 24
"""Tokens of a probe's answer: enough for a mean step time, few enough for many probes."""
REST_S = 0.05
PATIENCE_S = 120.0
MIXED_LOADS = (0.5, 0.8)
"""Parts of the engine's apparent capacity at which the mixed probes arrive."""

OnProbe = Callable[[str, int, float], None]
"""Told before each probe: what it is, its number of requests, seconds since the start."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may be asked of the engine: sequences at once, longest prompt, tokens of prompt and answer together."""

    max_num_seqs: int
    max_model_len: int
    longest_prompt: int

    @property
    def long(self) -> int:
        """Words of the longest prompts sent. A word may be two tokens, and a chat's template adds some."""
        return max(4, min(self.longest_prompt, (self.max_model_len - ANSWER - 48) // 2))


@dataclass(frozen=True, slots=True)
class Probe:
    """Requests that are sent together, from an idle engine on: their offsets and sizes."""

    what: str
    arrivals: list[Arrival]


def probes(bounds: Bounds, seed: int) -> Iterator[Probe]:
    """One round: every kind of probe once."""
    rng = Random(f"{seed}/probes")
    longest = bounds.long
    sizes = [size for size in (4, 16, 48, 96, 160, 256, 512, 1024, 2048, 4096) if size < longest] + [longest]
    for size in sizes:
        yield _burst("alone", [(size, 6)])
    seqs = bounds.max_num_seqs
    batches = sorted({b for b in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if b < seqs} | {min(seqs, 256)})
    for batch in batches:
        yield _burst("together", [(4, ANSWER)] * batch)
    few = max(1, min(seqs // 2, 8))
    yield _burst("long contexts", [(longest, ANSWER)] * few)
    yield _burst("long contexts", [(longest // 2, ANSWER)] * min(seqs, 2 * few))
    # Prompts of many sizes while answers are under way, from light to crowded.
    yield _burst("sizes", [(rng.randint(4, longest), rng.randint(2, ANSWER)) for _ in range(min(2 * seqs, 48))])


def mixed(bounds: Bounds, seed: int, rate: float, seconds: float) -> Probe:
    """Arrivals at random, of many sizes, as they come in service."""
    rng = Random(f"{seed}/mixed")
    arrivals: list[Arrival] = []
    at = rng.expovariate(rate)
    while at < seconds or not arrivals:
        size, answer = _mixed_sizes(bounds)
        arrivals.append(Arrival(int(at * NS_PER_S), "mixed", size.draw(rng), answer.draw(rng)))
        at += rng.expovariate(rate)
    return Probe("mixed", arrivals)


def _mixed_sizes(bounds: Bounds) -> tuple[Sizes, Sizes]:
    return Sizes(4, max(4, bounds.long // 2)), Sizes(2, 2 * ANSWER)


def _burst(what: str, sizes: Sequence[tuple[int, int]]) -> Probe:
    return Probe(what, [Arrival(0, what, prompt, answer) for prompt, answer in sizes])


def probe_engine(
    target: Target,
    workload: Workload,
    bounds: Bounds,
    seconds: float,
    *,
    seed: int = 1,
    on_probe: OnProbe | None = None,
) -> list[list[RequestRecord]]:
    """The records of each probe, times from its start, for about `seconds` (one round of probes at the least).

    Raises EngineError when the engine refuses or fails a probe. Must not be called from an event loop.
    """
    return uvloop.run(_Prober(target, workload, seed, on_probe).run(bounds, seconds))


def send_probe(target: Target, workload: Workload, probe: Probe, *, seed: int = 1) -> list[RequestRecord]:
    """Sends one probe. Raises EngineError when a request of it fails. Must not be called from an event loop."""
    return uvloop.run(_Prober(target, workload, seed, None).send(probe))


class _Prober:
    def __init__(self, target: Target, workload: Workload, seed: int, on_probe: OnProbe | None) -> None:
        self._target = target
        # Exactly the tokens asked for, one event each: what is fitted are steps, not stop tokens.
        self._workload = replace(workload, stream=True, ignore_eos=True, prompt_tokens=Sizes(4, 4096))
        self._seed = seed
        self._on_probe = on_probe
        self._magazine = Magazine(self._workload, target.authority, target.prefix, seed)
        self._began = time.monotonic()

    async def run(self, bounds: Bounds, seconds: float) -> list[list[RequestRecord]]:
        await self.send(_burst("warm-up", [(16, 8)] * 2))
        runs: list[list[RequestRecord]] = []
        self._began = began = time.monotonic()
        for number in range(1000):
            before = time.monotonic()
            runs += [await self.send(probe) for probe in probes(bounds, self._seed + number)]
            rate = _capacity(runs[-1])
            for load in MIXED_LOADS:
                # As long as the rest of the round, both together: neither kind of evidence drowns the other.
                spent = (time.monotonic() - before) / (1 + len(MIXED_LOADS))
                runs.append(await self.send(mixed(bounds, self._seed + number, load * rate, max(2.0, spent))))
            round_s = time.monotonic() - before
            if time.monotonic() - began + round_s / 2 > seconds:
                break
        return runs

    async def send(self, probe: Probe) -> list[RequestRecord]:
        """Sends the probe and waits for all of it."""
        if self._on_probe is not None:
            self._on_probe(probe.what, len(probe.arrivals), time.monotonic() - self._began)
        loop = asyncio.get_running_loop()
        finished: list[Call] = []
        ended = asyncio.Event()

        def done(call: Call) -> None:
            finished.append(call)
            if len(finished) == len(probe.arrivals):
                ended.set()

        client = Client(self._target, NoRetry(), done, patience_s=PATIENCE_S, seed=self._seed)
        shots = [self._magazine.shot(arrival) for arrival in probe.arrivals]
        start_ns = time.monotonic_ns()
        start_s = loop.time()
        try:
            for index, (arrival, shot) in enumerate(zip(probe.arrivals, shots, strict=True)):
                call = Call(index, arrival, shot, start_ns + arrival.at_ns)
                if arrival.at_ns:
                    loop.call_at(start_s + arrival.at_ns / NS_PER_S, client.send, call)
                else:
                    client.send(call)
            await ended.wait()
        finally:
            await client.close()
        await asyncio.sleep(REST_S)
        for call in finished:
            if not call.complete or call.status >= 300:
                text = f"status {call.status}: {call.error}" if call.status else call.error or "no answer in time"
                raise EngineError(f"the engine at {self._target.url} failed a probe ({probe.what}): {text}")
        return [record_of(call, start_ns) for call in sorted(finished, key=lambda call: call.index)]


def _capacity(records: Sequence[RequestRecord]) -> float:
    """Requests per second at which a burst of them was served."""
    ended = max(record.done_ns for record in records) / NS_PER_S
    return len(records) / max(ended, 1e-3)
