"""The traffic that a plan is made for: a trace or a rate, its busiest window, and what each request needs at least."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from forebay.engines.simulated.profile import EncoderProfile, Profile
from forebay.errors import UsageError
from forebay.plan.objective import Objective
from forebay.report.statistics import percentile
from forebay.sim.bounds import Size, limits_of, sizes_of
from forebay.sim.scenario import EngineSpec, WorkloadSpec
from forebay.workload.arrival import NS_PER_S, Arrival

WINDOW_STEP_S = 10.0
WARM_UP_S = 60.0
"""Load before the measured window, so that it does not begin on empty engines."""

LONGER = 3
"""Windows of a steady rate that the longer check takes."""

RATE_MOST = 100_000.0
WINDOW_REQUESTS_MOST = 2_000_000
"""More than these would not fit the memory of a small machine."""

CHECK_S_MOST = 7200.0
CHECK_REQUESTS_MOST = 150_000
"""The longer check at the answer is cut to this much, so that it ends while somebody waits for it."""


class Window(msgspec.Struct, frozen=True):
    """A stretch of the traffic, in its own time before any speed-up; `why` says how it was chosen."""

    start_s: float
    duration_s: float
    warm_up_s: float
    why: str


class TrafficFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic in numbers: of the whole, and of the window that is simulated."""

    name: str
    requests: int
    duration_s: float
    requests_per_s: float
    prompt_tokens_mean: float
    prompt_tokens_p50: float
    prompt_tokens_p99: float
    output_tokens_mean: float
    output_tokens_p50: float
    output_tokens_p99: float
    window: Window
    window_requests_per_s: float
    content: str
    """Digest of the arrivals, so that a trace file that changed is another plan."""


class Alone(msgspec.Struct, frozen=True):
    """What requests need on an engine that does nothing else: nearest-rank percentiles in ms, and who can be served.

    `within` is the share of requests that would keep the objective; `fits` the share that fits the engine's KV cache.
    """

    ttft_p50: float
    ttft_attained: float
    tpot_attained: float
    latency_attained: float
    within: float
    fits: float


class Traffic:
    """One workload, seen whole and by its window."""

    def __init__(
        self, workload: WorkloadSpec, *, name: str, seed: int, window_s: float | None, cost: TokenCost
    ) -> None:
        """`window_s` None or 0 takes the whole; `cost` weighs tokens when the busiest stretch is looked for."""
        self.workload, self.seed = workload, seed
        self.arrivals = workload.draw(seed)
        if len(self.arrivals) < 2:
            raise UsageError(f"{name}: {len(self.arrivals)} requests are no traffic to plan for")
        self.duration_s = workload.duration_s or max(1.0, math.ceil(self.arrivals[-1].at_ns / NS_PER_S))
        if workload.rate is None:
            self.window = busiest(self.arrivals, self.duration_s, window_s, cost)
        else:
            length_s = min(window_s or self.duration_s, self.duration_s)
            warm_up_s = self.duration_s - length_s
            self.window = Window(warm_up_s, length_s, warm_up_s, "a steady rate is alike everywhere")
        self.sizes = sizes_of(self.windowed())
        self.figures = self._figures(name)

    def windowed(self) -> list[Arrival]:
        """Arrivals of the measured window."""
        return _between(self.arrivals, self.window.start_s, self.window.start_s + self.window.duration_s)

    def simulated(self, factor: float = 1.0) -> tuple[WorkloadSpec, float]:
        """The window as a workload, `factor` times as heavy, and the seconds of it that are warm-up.

        A trace is sped up, so that its bursts come closer together as well; a rate is raised.
        """
        window = self.window
        if self.workload.rate is not None:
            return self._at_rate(factor, window.warm_up_s + window.duration_s), window.warm_up_s
        return self._part(factor, window.start_s - window.warm_up_s, window.warm_up_s + window.duration_s), (
            window.warm_up_s / factor
        )

    def longer(self) -> tuple[WorkloadSpec, float, str] | None:
        """A check beyond the window: the whole traffic, or as much from its start as ends soon. None: it was whole."""
        if self.workload.rate is not None:
            longer_s, warm_up_s = LONGER * self.window.duration_s, self.window.warm_up_s
            return self._at_rate(1.0, warm_up_s + longer_s), warm_up_s, f"{longer_s / 60:.3g} minutes at that rate"
        if self.window.duration_s >= self.duration_s:
            return None
        length_s = min(self.duration_s, CHECK_S_MOST, CHECK_REQUESTS_MOST / self.figures.requests_per_s)
        if length_s >= self.duration_s:
            return self._part(1.0, 0.0, self.duration_s), 0.0, "the whole trace"
        middle_s = self.window.start_s + self.window.duration_s / 2
        start_s = min(max(0.0, middle_s - length_s / 2), self.duration_s - length_s)
        words = f"{length_s / 60:.0f} minutes of the trace around the window"
        return self._part(1.0, start_s, length_s), 0.0, words

    def _at_rate(self, factor: float, duration_s: float) -> WorkloadSpec:
        assert self.workload.rate is not None
        return msgspec.structs.replace(self.workload, rate=self.workload.rate * factor, duration_s=duration_s)

    def _part(self, factor: float, start_s: float, duration_s: float) -> WorkloadSpec:
        """A stretch given in the time of the traffic as planned, `factor` times as fast."""
        speed = self.workload.speed
        return msgspec.structs.replace(
            self.workload,
            speed=speed * factor,
            start_s=self.workload.start_s + start_s * speed,
            duration_s=duration_s / factor,
        )

    def _figures(self, name: str) -> TrafficFigures:
        prompts = sorted(float(a.prompt_tokens or 1) for a in self.arrivals)
        outputs = sorted(float(a.output_tokens or 1) for a in self.arrivals)
        count = len(self.arrivals)
        content = hashlib.sha256(msgspec.json.encode([tuple(a) for a in self.arrivals])).hexdigest()[:16]
        return TrafficFigures(
            name=name,
            requests=count,
            duration_s=self.duration_s,
            requests_per_s=count / self.duration_s,
            prompt_tokens_mean=sum(prompts) / count,
            prompt_tokens_p50=percentile(prompts, 0.5) or 0.0,
            prompt_tokens_p99=percentile(prompts, 0.99) or 0.0,
            output_tokens_mean=sum(outputs) / count,
            output_tokens_p50=percentile(outputs, 0.5) or 0.0,
            output_tokens_p99=percentile(outputs, 0.99) or 0.0,
            window=self.window,
            window_requests_per_s=len(self.sizes) / self.window.duration_s,
            content=content,
        )


class TokenCost(msgspec.Struct, frozen=True):
    """Engine time of one prompt and of one output token, in ms, on the engine called `on`."""

    prompt_ms: float
    output_ms: float
    on: str


def token_cost(profile: Profile) -> TokenCost:
    """Rough cost of tokens in a well-filled batch: for finding the busiest stretch, not for sizing."""
    if isinstance(profile, EncoderProfile):
        return TokenCost(0.0, profile.c, profile.name)
    batch, context = 64, 64 * 1024
    prompt = profile.step_ms(2048, 1, 0, 2048 * 1024) / 2048
    return TokenCost(prompt, profile.step_ms(batch, batch, context, 0.0) / batch, profile.name)


def busiest(arrivals: Sequence[Arrival], duration_s: float, window_s: float | None, cost: TokenCost) -> Window:
    """The stretch of `window_s` in which requests need most engine time; the whole when it is no longer than that."""
    if not window_s or window_s >= duration_s:
        return Window(0.0, duration_s, 0.0, "the whole of it")
    slots = math.ceil(duration_s / WINDOW_STEP_S)
    work = [0.0] * slots
    for arrival in arrivals:
        slot = min(slots - 1, int(arrival.at_ns / NS_PER_S / WINDOW_STEP_S))
        work[slot] += cost.prompt_ms * (arrival.prompt_tokens or 1) + cost.output_ms * (arrival.output_tokens or 1)
    width = min(slots, max(1, round(window_s / WINDOW_STEP_S)))
    sums = [0.0, *accumulate(work)]
    loads = [sums[first + width] - sums[first] for first in range(slots - width + 1)]
    first = max(range(len(loads)), key=loads.__getitem__)
    mean = sums[-1] / slots * width
    start_s = first * WINDOW_STEP_S
    why = (
        f"the busiest {window_s / 60:g} minutes: {loads[first] / mean:.2f} times the mean demand of engine time "
        f"(tokens weighed by their cost on {cost.on})"
    )
    return Window(start_s, min(window_s, duration_s - start_s), min(WARM_UP_S, start_s), why)


def alone(profile: Profile, sizes: Sequence[Size], objective: Objective) -> Alone:
    """What the requests need when each has an engine to itself. No fleet, however large, is faster."""
    if isinstance(profile, EncoderProfile):
        one = profile.batch_ms(1)
        bound = min(bound for bound in (objective.latency_ms, objective.ttft_ms, math.inf) if bound is not None)
        return Alone(one, one, one, one, float(one <= bound), 1.0)
    limits = limits_of(profile, EngineSpec(profile=profile.name))
    ttfts, tpots, latencies = [], [], []
    good = fits = 0
    for prompt, output, _ in sizes:
        if prompt + output > limits.kv_tokens:
            continue
        fits += 1
        ttft = done = 0.0
        while done < prompt:
            chunk = min(limits.max_num_batched_tokens, prompt - done)
            ttft += profile.step_ms(int(chunk), 1, 0, chunk * (done + chunk / 2))
            done += chunk
        tpot = profile.step_ms(1, 1, prompt + output // 2, 0.0)
        latency = ttft + (output - 1) * tpot
        ttfts.append(ttft)
        if output > 1:
            tpots.append(tpot)
        latencies.append(latency)
        good += (
            (objective.ttft_ms is None or ttft <= objective.ttft_ms)
            and (objective.tpot_ms is None or output < 2 or tpot <= objective.tpot_ms)
            and (objective.latency_ms is None or latency <= objective.latency_ms)
        )
    return Alone(
        percentile(sorted(ttfts), 0.5) or math.inf,
        _attained(ttfts, len(sizes), objective),
        _attained(tpots or [0.0], len(tpots) or 1, objective),
        _attained(latencies, len(sizes), objective),
        good / len(sizes),
        fits / len(sizes),
    )


def _attained(values: Sequence[float], requests: int, objective: Objective) -> float:
    """The value that the asked share keeps when as many as may be are refused, the slowest of all first."""
    kept = math.ceil(objective.attainment * (1 - objective.max_shed) * requests - 1e-9)
    return sorted(values)[kept - 1] if 0 < kept <= len(values) else math.inf


def _between(arrivals: Sequence[Arrival], from_s: float, to_s: float) -> list[Arrival]:
    return [arrival for arrival in arrivals if from_s * NS_PER_S <= arrival.at_ns < to_s * NS_PER_S]


def workload_of(
    *,
    trace: str | None,
    rate: float | None,
    speed: float,
    prompt_tokens: str | None,
    output_tokens: str | None,
    arrivals: str | None,
    cv: float | None,
    window_s: float,
) -> tuple[WorkloadSpec, str]:
    """The workload from flags, and its name. Raises UsageError for flags that contradict each other or are absurd."""
    if (trace is None) == (rate is None):
        raise UsageError("give the traffic either as --trace or as --rate with --prompt-tokens and --output-tokens")
    if not (math.isfinite(speed) and 0 < speed <= 1000):
        raise UsageError(f"--speed {speed:g}: a factor above 0 and up to 1000 is asked")
    if trace is not None:
        with_rate = {
            "--prompt-tokens": prompt_tokens, "--output-tokens": output_tokens, "--arrivals": arrivals, "--cv": cv
        }  # fmt: skip
        for flag, value in with_rate.items():
            if value is not None:
                raise UsageError(f"{flag} goes with --rate: a trace has times and sizes of its own")
        name = Path(trace).name if Path(trace).exists() else trace
        return WorkloadSpec(trace=trace, speed=speed), name if speed == 1 else f"{name} at {speed:g} x"
    assert rate is not None
    if speed != 1:
        raise UsageError("--speed goes with --trace; raise --rate instead")
    if not (math.isfinite(rate) and 0 < rate <= RATE_MOST):
        raise UsageError(f"--rate {rate:g}: requests per second above 0 and up to {RATE_MOST:.0f} are asked")
    if prompt_tokens is None or output_tokens is None:
        raise UsageError("--rate needs --prompt-tokens and --output-tokens (for example 512 and ~200/1.2)")
    requests = rate * window_s
    if requests > WINDOW_REQUESTS_MOST:
        raise UsageError(
            f"--rate {rate:g} for {window_s / 60:g} minutes are {requests:,.0f} requests, more than the "
            f"{WINDOW_REQUESTS_MOST:,} that are simulated at once: shorten --window-min"
        )
    arrivals = arrivals or "poisson"
    if cv is not None and arrivals != "gamma":
        raise UsageError("--cv goes with --arrivals gamma")
    if cv is not None and not (math.isfinite(cv) and 0.01 <= cv <= 100):
        raise UsageError(f"--cv {cv:g}: a coefficient of variation within 0.01 and 100 is asked")
    workload = WorkloadSpec(
        rate=rate,
        duration_s=window_s + min(WARM_UP_S, window_s),
        arrivals=arrivals,
        cv=3.0 if cv is None else cv,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )
    return workload, f"{rate:g} requests/s ({arrivals}), {prompt_tokens} prompt and {output_tokens} output tokens"
