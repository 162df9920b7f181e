"""A closed loop: so many callers, each sending its next request when its last one ended. Measures capacity."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import uvloop

from forebay.errors import EngineError
from forebay.load.client import Call, Client
from forebay.load.target import Target
from forebay.load.workload import Magazine, Workload
from forebay.report.statistics import percentile
from forebay.workload.arrival import Arrival
from forebay.workload.retry import NoRetry


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a target did with `callers` callers: completions per second, and their latency in milliseconds."""

    callers: int
    completed: int
    requests_per_s: float
    output_tokens_per_s: float
    latency_p50_ms: float
    latency_p99_ms: float


def measure_capacity(
    target: Target, workload: Workload, callers: int, duration_s: float, *, warm_up_s: float = 1.0, seed: int = 1
) -> Capacity:
    """Drives the target with `callers` callers for `warm_up_s + duration_s`; only the latter part is counted.

    Raises EngineError when requests fail or none completes. Must not be called from an event loop.
    """
    return uvloop.run(_measure(target, workload, callers, duration_s, warm_up_s, seed))


async def _measure(
    target: Target, workload: Workload, callers: int, duration_s: float, warm_up_s: float, seed: int
) -> Capacity:
    magazine = Magazine(workload, target.authority, target.prefix, seed)
    arrival = Arrival(0, "capacity")
    finished: list[Call] = []
    sent = 0
    failure: list[str] = []
    stop = asyncio.Event()

    def send() -> None:
        nonlocal sent
        client.send(Call(sent, arrival, magazine.shot(arrival), time.monotonic_ns()))
        sent += 1

    def done(call: Call) -> None:
        if stop.is_set():
            return
        if not call.complete or call.status >= 300:
            failure.append(f"status {call.status}: {call.error}" if call.status else call.error)
            stop.set()
            return
        finished.append(call)
        send()

    client = Client(target, NoRetry(), done, seed=seed)
    began_ns = time.monotonic_ns()
    for _ in range(callers):
        send()
    try:
        async with asyncio.timeout(warm_up_s + duration_s):
            await stop.wait()
    except TimeoutError:
        stop.set()
    ended_ns = time.monotonic_ns()
    await client.close()
    if failure:
        raise EngineError(f"the engine at {target.url} refused a request while its capacity was measured: {failure[0]}")
    return _capacity(finished, callers, began_ns + int(warm_up_s * 1e9), ended_ns, target)


def _capacity(finished: list[Call], callers: int, from_ns: int, to_ns: int, target: Target) -> Capacity:
    counted = [call for call in finished if call.done_ns >= from_ns]
    latencies = sorted((call.done_ns - call.intended_ns) / 1e6 for call in counted)
    p50, p99 = percentile(latencies, 0.5), percentile(latencies, 0.99)
    if p50 is None or p99 is None:
        raise EngineError(f"the engine at {target.url} completed no request in {(to_ns - from_ns) / 1e9:.0f} s")
    # Work in progress at both ends is shared out: a request counts for the part of its life inside the window.
    inside = sum((c.done_ns - max(from_ns, c.intended_ns)) / max(1, c.done_ns - c.intended_ns) for c in counted)
    seconds = (counted[-1].done_ns - from_ns) / 1e9
    tokens = sum(call.output_tokens for call in counted) / len(counted)
    return Capacity(
        callers=callers,
        completed=len(counted),
        requests_per_s=inside / seconds,
        output_tokens_per_s=inside / seconds * tokens,
        latency_p50_ms=p50,
        latency_p99_ms=p99,
    )
