"""What is measured on one running proxy. Every function returns metrics by name; units stand last in the names."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self

from benchmarks import traffic
from benchmarks.traffic import TrafficError

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.process import Process
    from benchmarks.proxies import Running

Metrics = dict[str, float]

_SETTLE_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class Load:
    """How hard one proxy is driven. ``chunks`` is per stream; the upstream sets their rate."""

    connections: int
    burst_s: float
    streams: int
    chunks: int
    paced_per_s: float
    paced_s: float
    idle_connections: int
    queued_requests: int

    def for_slow(self) -> Load:
        """The load for a proxy that spends milliseconds of CPU on a request, and would fall behind the full one."""
        return Load(
            connections=4,
            burst_s=self.burst_s,
            streams=4,
            chunks=self.chunks,
            paced_per_s=20,
            paced_s=self.paced_s,
            idle_connections=0,
            queued_requests=0,
        )


FULL: Final = Load(
    connections=32,
    burst_s=3,
    streams=100,
    chunks=200,
    paced_per_s=400,
    paced_s=3,
    idle_connections=2000,
    queued_requests=500,
)
QUICK: Final = replace(FULL, burst_s=1, chunks=50, paced_s=1, idle_connections=500, queued_requests=200)


class CpuMeter:
    """CPU time of the proxy and, apart from it, of the upstream between entering and leaving."""

    def __init__(self, proxy: Process, upstream: Process) -> None:
        self._processes = (proxy, upstream)
        self.proxy_us = 0
        self.upstream_us = 0

    def __enter__(self) -> Self:
        self._before = [process.cpu_us() for process in self._processes]
        return self

    def __exit__(self, *_exc: object) -> None:
        time.sleep(_SETTLE_S)  # what the last request left to do belongs to it
        spent = [process.cpu_us() - before for process, before in zip(self._processes, self._before, strict=True)]
        self.proxy_us, self.upstream_us = spent


def requests(running: Running, upstream: Process, load: Load, folder: Path) -> Metrics:
    """CPU per proxied request under a closed loop.

    Raises:
        TrafficError: the proxy refused a request or broke a connection, so that the figure would flatter it.
    """
    with CpuMeter(running.process, upstream) as cpu:
        burst = traffic.closed_loop(running.port, connections=load.connections, duration_s=load.burst_s, folder=folder)
    if burst.refused or burst.broken or not burst.answers:
        raise TrafficError(f"{burst.answers} answers, {burst.refused} refused, {burst.broken} broken connections")
    metrics = {
        "request_upstream_cpu_us": cpu.upstream_us / burst.answers,
        "requests_per_s": burst.answers / burst.duration_s,
    }
    if running.process is not upstream:
        metrics["request_cpu_us"] = cpu.proxy_us / burst.answers
    return metrics


def chunks(running: Running, upstream: Process, load: Load) -> Metrics:
    """CPU per SSE chunk relayed on many concurrent streams, none of them held up.

    Raises:
        TrafficError: a stream did not finish or lost a chunk.
    """
    with CpuMeter(running.process, upstream) as cpu:
        relayed = traffic.streams(running.port, count=load.streams, chunks=load.chunks, limit_s=60)
    expected = load.streams * load.chunks
    if relayed.finished != load.streams or relayed.events < expected:
        raise TrafficError(
            f"{relayed.finished} of {load.streams} streams finished, {relayed.events} of {expected} chunks arrived"
        )
    metrics = {"chunk_upstream_cpu_us": cpu.upstream_us / expected, "streams_s": relayed.duration_s}
    if running.process is not upstream:
        metrics["chunk_cpu_us"] = cpu.proxy_us / expected
    return metrics


def latency(running: Running, direct: Running, load: Load) -> Metrics:
    """Latency percentiles at a fixed rate far below capacity, and what they are above those without the proxy.

    The two take turns by the second, so that what else the machine does falls on both.
    """
    samples: dict[int, list[int]] = {running.port: [], direct.port: []}
    for _ in range(max(1, round(load.paced_s))):
        for port, sample in samples.items():
            sample += traffic.paced(port, rate_per_s=load.paced_per_s, duration_s=1)
    metrics = {}
    for share in (50, 99):
        alone, through = (_percentile_us(samples[end.port], share) for end in (direct, running))
        metrics[f"latency_p{share}_us"] = through
        if running is not direct:
            metrics[f"added_p{share}_us"] = through - alone
    return metrics


def _percentile_us(sample_ns: list[int], share: int) -> float:
    return sorted(sample_ns)[len(sample_ns) * share // 100] / 1e3


def refusals(running: Running, upstream: Process, load: Load, folder: Path) -> Metrics:
    """CPU per refusal of requests that are over a limit; nothing for a proxy without one.

    Raises:
        TrafficError: more than a few requests were let through, or connections broke.
    """
    if running.refusal_port is None:
        return {}
    with CpuMeter(running.process, upstream) as cpu:
        burst = traffic.closed_loop(
            running.refusal_port,
            connections=load.connections,
            duration_s=load.burst_s,
            folder=folder,
            key=traffic.LIMITED_KEY,
        )
    if burst.answers - burst.refused > 5 or burst.broken or not burst.answers:
        raise TrafficError(f"{burst.refused} of {burst.answers} refused, {burst.broken} broken connections")
    return {"refusal_cpu_us": cpu.proxy_us / burst.answers, "refusals_per_s": burst.answers / burst.duration_s}


def idle_memory(fresh: Running, load: Load) -> Metrics:
    """Resident memory per idle keep-alive connection that has had one answer, on a freshly started proxy."""
    for conn in traffic.open_idle(fresh.port, 200):  # pools and caches exist before the count begins
        conn.close()
    time.sleep(_SETTLE_S)
    before = fresh.process.rss_bytes()
    idle = traffic.open_idle(fresh.port, load.idle_connections)
    time.sleep(_SETTLE_S)
    grown = fresh.process.rss_bytes() - before
    for conn in idle:
        conn.close()
    return {"idle_connection_bytes": grown / load.idle_connections}


def queue_memory(fresh: Running, load: Load) -> Metrics:
    """Resident memory per queued 1 KB request, its connection included, behind one that the engine never answers.

    Raises:
        TrafficError: a request was answered although it should wait.
    """
    for conn in traffic.open_idle(fresh.port, 200):
        conn.close()
    holder = traffic.open_waiting(fresh.port, 1)
    time.sleep(_SETTLE_S)
    before = fresh.process.rss_bytes()
    waiting = traffic.open_waiting(fresh.port, load.queued_requests)
    time.sleep(3 * _SETTLE_S)
    grown = fresh.process.rss_bytes() - before
    answered = traffic.answered(waiting)
    for conn in holder + waiting:
        conn.close()
    if answered:
        raise TrafficError(f"{answered} of {load.queued_requests} requests were answered instead of queued")
    return {"queued_request_bytes": grown / load.queued_requests}
