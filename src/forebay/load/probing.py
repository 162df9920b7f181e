"""A short run of requests that shows how an engine's steps take their time: alone, together, long, and mixed.

Each round of probes begins with the engine idle and ends when all its requests have: what is measured of one cannot
leak into the next. Sizes are chosen to tell the parts of a step apart, and the number of repeats to fit the time given.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
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
ROUND_S = 30.0
CROWD_SHARE = 0.08
"""Part of a round's time that the prompts of each crowd may take."""
LEAST_MIXED_S = 1.5
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


def alone(bounds: Bounds) -> list[Probe]:
    """Single prompts of growing length, the longest last."""
    sizes = [size for size in (4, 16, 48, 96, 160, 256, 512, 1024, 2048, 4096) if size < bounds.long]
    return [_burst("alone", [(size, 6)]) for size in (*sizes, bounds.long)]


def together(bounds: Bounds, seed: int) -> list[Probe]:
    """Short prompts in growing batches. Every other round has the sizes between those of the last."""
    seqs = min(bounds.max_num_seqs, 256)
    sizes = (1, 2, 4, 8, 16, 32, 64, 128) if seed % 2 else (1, 3, 6, 12, 24, 48, 96, 192)
    return [_burst("together", [(4, ANSWER)] * batch) for batch in (*(size for size in sizes if size < seqs), seqs)]


def crowds(bounds: Bounds, seed: int, prompt_tokens: float) -> list[Probe]:
    """Long contexts beside each other, and a queue of all sizes; each probe has about so many prompt tokens."""
    rng = Random(f"{seed}/probes")
    longest, seqs = bounds.long, bounds.max_num_seqs
    few = max(1, min(seqs, int(prompt_tokens / longest)))
    more = max(1, min(seqs, int(2 * prompt_tokens / longest)))
    queue = max(4, min(3 * seqs, int(2 * prompt_tokens / longest)))
    return [
        _burst("long contexts", [(longest, ANSWER)] * few),
        _burst("long contexts", [(max(4, longest // 2), ANSWER)] * more),
        _burst("all sizes", [(rng.randint(4, longest), rng.randint(2, ANSWER)) for _ in range(queue)]),
    ]


def mixed(bounds: Bounds, seed: int, rate: float, seconds: float) -> Probe:
    """Arrivals at random, of many sizes, as they come in service."""
    rng = Random(f"{seed}/mixed")
    arrivals: list[Arrival] = []
    size, answer = Sizes(4, max(4, bounds.long // 2)), Sizes(2, 2 * ANSWER)
    at = rng.expovariate(rate)
    while at < seconds or not arrivals:
        arrivals.append(Arrival(int(at * NS_PER_S), "mixed", size.draw(rng), answer.draw(rng)))
        at += rng.expovariate(rate)
    return Probe("mixed", arrivals)


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
    """The records of each probe, times from its start. Takes about `seconds`, and one round of probes at the least.

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
        self._began = time.monotonic()
        # Several rounds rather than one long one: what the machine does for a while does not fall on one kind of probe.
        rounds = max(1, round(seconds / ROUND_S))
        for number in range(rounds):
            runs += await self._round(bounds, self._seed + number, seconds * (number + 1) / rounds)
        return runs

    async def _round(self, bounds: Bounds, seed: int, until_s: float) -> list[list[RequestRecord]]:
        left_s = until_s - (time.monotonic() - self._began)
        runs = [await self.send(probe) for probe in alone(bounds)]
        longest = runs[-1][0]
        prompt_rate = longest.prompt_tokens * NS_PER_S / max(1, longest.first_token_ns - longest.sent_ns)
        runs += [await self.send(probe) for probe in together(bounds, seed)]
        for probe in crowds(bounds, seed, CROWD_SHARE * left_s * prompt_rate):
            runs.append(await self.send(probe))
        rate = _capacity(runs[-1])
        for index, load in enumerate(MIXED_LOADS):
            left_s = (until_s - (time.monotonic() - self._began)) / (len(MIXED_LOADS) - index)
            runs.append(await self.send(mixed(bounds, seed, load * rate, max(LEAST_MIXED_S, left_s))))
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
