"""Many streams at once, and many clients that leave: the scenarios, for tests of seconds and for soaks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.profile import StepProfile
from forebay.load.client import Call
from forebay.load.target import Target
from forebay.load.workload import Workload
from forebay.workload.arrival import Arrival
from forebay.workload.sizes import Sizes
from tests.faults.rig.gateway import GatewayProcess, config_for, serving
from tests.faults.rig.waiting import eventually

from .processes import SimulatedEngine, open_loop, simulated

MODEL = "llama-3.1-8b"
PROFILE = "h100-80g/llama-3.1-70b/bf16/tp8"  # the one whose steps grow least with the context
MIB = 1 << 20


@dataclass
class Streams:
    """What was seen of one run."""

    calls: list[Call]
    tokens_each: int
    engine_tokens: float  # made by the engine, by its own count
    chunks_per_s: float  # over all streams, while all of them ran
    rss: list[tuple[float, int]]  # (seconds, bytes) of the gateway
    cpu_us_per_chunk: float  # of the gateway

    def growth_bytes(self) -> float:
        """By how much memory grows from the first to the last sample, by a straight line through those in the middle.

        The first fifth is left out, when buffers and tables reach their size, and the last, when streams end.
        """
        first, last = self.rss[0][0], self.rss[-1][0]
        span = last - first
        points = [(t, rss) for t, rss in self.rss if first + 0.2 * span <= t <= last - 0.1 * span]
        mean_t = sum(t for t, _ in points) / len(points)
        mean_rss = sum(rss for _, rss in points) / len(points)
        spread = sum((t - mean_t) ** 2 for t, _ in points)
        return span * sum((t - mean_t) * (rss - mean_rss) for t, rss in points) / spread


def stream(folder: Path, streams: int, tokens_each: int, step_s: float) -> Streams:
    """`streams` at once, one chunk for each every `step_s`, through the gateway to the end."""
    flags = (
        "--profile", PROFILE, "--model-name", MODEL, "--max-num-seqs", str(streams),
        # Room for all of them at their full length: a preempted stream would pause for its own reasons.
        "--kv-tokens", str(2 * streams * (tokens_each + 100)),
        "--time-scale", f"{_step_s(streams, tokens_each) / step_s:.4f}",
    )  # fmt: skip
    with simulated(folder, *flags) as engine:
        config = config_for(engine.url, slots=streams)
        with serving(config, folder / "gateway") as gateway:
            workload = Workload(model=MODEL, prompt_tokens=Sizes(8, 8), output_tokens=Sizes(tokens_each, tokens_each))
            arrivals = [Arrival(number * 2_000_000, "all") for number in range(streams)]
            rss: list[tuple[float, int]] = []

            def look() -> None:
                rss.append((time.monotonic(), gateway.rss_bytes()))

            cpu_s = gateway.cpu_s()
            calls = open_loop(Target.parse(gateway.url), workload, arrivals, watch=look, watch_every_s=0.1)
            cpu_s = gateway.cpu_s() - cpu_s
            gateway.settles()
            made = engine.metric("vllm:generation_tokens_total")
    last = calls[-1]  # all others run while it does
    rate = streams * (last.output_tokens - 1) / ((last.done_ns - last.first_token_ns) / 1e9)
    return Streams(calls, tokens_each, made, rate, rss, cpu_s / (streams * tokens_each) * 1e6)


def _step_s(streams: int, tokens_each: int) -> float:
    """Seconds of a decode step at half the answers' length."""
    profile = profile_named(PROFILE)
    assert isinstance(profile, StepProfile)
    return profile.step_ms(streams, streams, streams * tokens_each // 2, 0.0) / 1e3


def check_streams(seen: Streams, growth_most: float) -> None:
    for call in seen.calls:
        assert call.status == 200, call.error
        assert call.complete, call.error
        assert call.stream is not None
        assert call.stream.events == call.output_tokens == seen.tokens_each, (
            "a chunk for every token, as the engine says"
        )
    assert seen.engine_tokens == len(seen.calls) * seen.tokens_each
    assert seen.growth_bytes() < growth_most, f"memory grew by {seen.growth_bytes() / MIB:.1f} MiB"


# ---- clients that leave ------------------------------------------------------------------------------------------

SLOTS = 64


def leaving(folder: Path, clients: int, rounds: int) -> None:
    """Clients cancel at random instants, queued, at their first byte or amid their stream; then all is free again."""
    flags = ("--max-num-seqs", str(SLOTS), "--time-scale", "0.5")
    with simulated(folder, *flags) as engine:
        config = config_for(engine.url, slots=SLOTS, mode="backpressure")
        with serving(config, folder / "gateway") as gateway:
            for number in range(rounds):
                _leave(gateway, clients, Random(f"{number}/leaving"))
                gateway.settles(within=1.0)
                eventually(lambda: _idle(engine), within=1.0, what="the engine was told of every one that left")
                _full_capacity(gateway)
            snapshot = gateway.snapshot()
    # One that leaves before its request is here was never offered.
    left = snapshot["offered"] - SLOTS * rounds
    assert 0.8 * clients * rounds <= left <= clients * rounds
    ended = {"shed": 0, "evicted": 0, "failed": 0, "completed": SLOTS * rounds, "cancelled": left}
    assert snapshot["outcomes"] == ended


def _leave(gateway: GatewayProcess, clients: int, chance: Random) -> None:
    workload = Workload(model=MODEL, output_tokens=Sizes(2_000, 2_000))
    arrivals = [Arrival(chance.randrange(300_000_000), "leave") for _ in range(clients)]
    stays = [chance.uniform(0.0, 1.2) for _ in arrivals]
    calls = open_loop(Target.parse(gateway.url), workload, sorted(arrivals), leave_after_s=stays.__getitem__)
    assert all(call.left for call in calls)


def _idle(engine: SimulatedEngine) -> bool:
    return engine.metric("vllm:num_requests_running") == engine.metric("vllm:num_requests_waiting") == 0


def _full_capacity(gateway: GatewayProcess) -> None:
    """Every place can be taken, and nobody needs to wait for one."""
    workload = Workload(model=MODEL, output_tokens=Sizes(20, 20))
    calls = open_loop(Target.parse(gateway.url), workload, [Arrival(0, "after")] * SLOTS)
    assert all(call.complete for call in calls)
    assert {call.headers["server-timing"] for call in calls} == {"queue;dur=0.000"}
