"""Records in, results out: the public JSON of `demo`, `bench` and `sim`, for the whole run and each phase.

Two views are combined, each where it is right:
- *who*: counts, latencies and shares belong to the requests whose intended time lies in it, whenever they ended;
- *when*: served, goodput and utilization are rates within the stretch's own time, whoever the requests belong to.
  What ends after the load has ended therefore counts as an outcome, but raises no rate.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from forebay.report.records import OUTCOMES, EngineSample, Objective, PhaseBounds, RequestRecord, RunRecords
from forebay.report.statistics import interpolate, jain_index, percentile

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
MAX_ERRORS = 5
MAX_ERROR_TEXT = 160
WARM_UP = "warm-up"
"""The phase of this name is left out of every figure."""


class Environment(msgspec.Struct):
    commit: str
    machine: str
    cpus: int
    at: str


class Counts(msgspec.Struct):
    """Outcomes of the offered requests. `offered` is the sum of the five others, always."""

    offered: int
    completed: int
    shed: int
    evicted: int
    cancelled: int
    failed: int


class Quantiles(msgspec.Struct):
    """Milliseconds; None when there was nothing to measure."""

    p50: float | None
    p99: float | None


class Utilization(msgspec.Struct):
    """How well the engine was used, as shares of 1; None where it does not tell.

    `busy`: time in which it computed; `batch`: places of its batch that were filled while it did; `step_ms`: mean time
    of one step, by which a machine that changed its own speed between runs is found out.
    """

    busy: float | None
    batch: float | None
    step_ms: float | None = None


class Figures(msgspec.Struct, kw_only=True):
    """A stretch of a run. Ratios are of 1; latencies are of completed requests, from the intended time."""

    duration_s: float
    counts: Counts
    latency_ms: Quantiles
    ttft_ms: Quantiles
    queue_wait_ms: Quantiles
    served_per_s: float
    goodput_per_s: float
    goodput_tokens_per_s: float
    utilization: Utilization
    shed_by_reason: dict[str, int]
    failed_by_error: dict[str, int]
    wasted_work_ratio: float
    late_evicted_ratio: float
    jain_index: float | None
    attempts_per_request: float


class PhaseResult(Figures, kw_only=True):
    name: str
    from_s: float
    to_s: float


class RunResult(Figures, kw_only=True):
    mode: str
    policy: str
    workload: str
    offered_load: float | None
    seed: int
    objective: Objective
    phases: list[PhaseResult]


class Results(msgspec.Struct):
    """The file that `--json` writes."""

    environment: Environment
    runs: list[RunResult]

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def within(record: RequestRecord, objective: Objective) -> bool:
    """True when a completed request met its objective."""
    if record.outcome != "completed":
        return False
    if objective.latency_ms is not None and latency_ms(record) > objective.latency_ms:
        return False
    if objective.ttft_ms is None:
        return True
    ttft = ttft_ms(record)
    # An answer that is no stream shows its first token when it shows the last.
    return (latency_ms(record) if ttft is None else ttft) <= objective.ttft_ms


def latency_ms(record: RequestRecord) -> float:
    return (record.done_ns - record.intended_ns) / NS_PER_MS


def ttft_ms(record: RequestRecord) -> float | None:
    return None if record.first_token_ns < 0 else (record.first_token_ns - record.intended_ns) / NS_PER_MS


def summarise(run: RunRecords) -> RunResult:
    """All figures of a run."""
    header = run.header
    measured = [phase for phase in header.phases if phase.name != WARM_UP]
    requests = [record for record in run.requests if record.phase != WARM_UP]
    figures = _figures(requests, requests, run.samples, measured, header.objective)
    phases = []
    for phase in measured:
        cohort = [record for record in requests if record.phase == phase.name]
        of_phase = _figures(cohort, requests, run.samples, [phase], header.objective)
        phases.append(PhaseResult(name=phase.name, from_s=phase.from_s, to_s=phase.to_s, **_fields(of_phase)))
    assert sum(phase.counts.offered for phase in phases) == figures.counts.offered, "a request belongs to no phase"
    return RunResult(
        mode=header.mode,
        policy=header.policy,
        workload=header.workload,
        offered_load=header.offered_load,
        seed=header.seed,
        objective=header.objective,
        phases=phases,
        **_fields(figures),
    )


def _fields(figures: Figures) -> dict[str, Any]:
    return {name: getattr(figures, name) for name in figures.__struct_fields__}


def count(requests: Sequence[RequestRecord]) -> Counts:
    """Outcomes of requests; the conservation of requests is asserted here, for every run and phase."""
    tally = Counter(record.outcome for record in requests)
    counts = Counts(len(requests), *(tally[outcome] for outcome in OUTCOMES))
    ended = counts.completed + counts.shed + counts.evicted + counts.cancelled + counts.failed
    assert counts.offered == ended, f"{counts.offered} requests were offered but {ended} ended"
    return counts


def _figures(
    cohort: Sequence[RequestRecord],
    everyone: Sequence[RequestRecord],
    samples: Sequence[EngineSample],
    windows: Sequence[PhaseBounds],
    objective: Objective,
) -> Figures:
    """Figures of the requests in `cohort`; rates are over the windows, between which nothing is counted."""
    counts = count(cohort)
    completed = [record for record in cohort if record.outcome == "completed"]
    spans_ns = [(window.from_s * NS_PER_S, window.to_s * NS_PER_S) for window in windows]
    duration_s = sum(window.to_s - window.from_s for window in windows)
    finished = [r for r in everyone if r.outcome == "completed" and _inside(r.done_ns, spans_ns)]
    good = [record for record in finished if within(record, objective)]
    admitted = counts.offered - counts.shed
    return Figures(
        duration_s=duration_s,
        counts=counts,
        latency_ms=_quantiles(latency_ms(record) for record in completed),
        ttft_ms=_quantiles(ttft_ms(record) for record in completed),
        queue_wait_ms=_quantiles(record.queue_wait_ms for record in completed),
        served_per_s=len(finished) / duration_s,
        goodput_per_s=len(good) / duration_s,
        goodput_tokens_per_s=sum(record.output_tokens or record.prompt_tokens for record in good) / duration_s,
        utilization=utilization(samples, spans_ns),
        shed_by_reason=dict(sorted(Counter(r.reason for r in cohort if r.outcome in {"shed", "evicted"}).items())),
        failed_by_error=_failures(cohort),
        wasted_work_ratio=wasted_work(cohort, objective),
        late_evicted_ratio=counts.evicted / admitted if admitted else 0.0,
        jain_index=_jain(cohort),
        attempts_per_request=sum(record.attempts for record in cohort) / len(cohort) if cohort else 0.0,
    )


def _failures(requests: Sequence[RequestRecord]) -> dict[str, int]:
    """The commonest errors and their counts."""
    errors = Counter(record.error[:MAX_ERROR_TEXT] or "unknown" for record in requests if record.outcome == "failed")
    return dict(errors.most_common(MAX_ERRORS))


def _quantiles(values: Iterable[float | None]) -> Quantiles:
    ordered = sorted(value for value in values if value is not None)
    return Quantiles(percentile(ordered, 0.5), percentile(ordered, 0.99))


def wasted_work(requests: Sequence[RequestRecord], objective: Objective) -> float:
    """Share of the tokens made, as clients saw them, that went to requests late or abandoned.

    Where answers carry no output tokens (embeddings) the prompt tokens of the completed requests are the work.
    """
    has_output = any(record.output_tokens for record in requests)
    spent = wasted = 0
    for record in requests:
        tokens = record.output_tokens
        if not has_output and record.outcome == "completed":
            tokens = record.prompt_tokens
        spent += tokens
        if not within(record, objective):
            wasted += tokens
    return wasted / spent if spent else 0.0


def _jain(requests: Sequence[RequestRecord]) -> float | None:
    served: dict[str, int] = {}
    for record in requests:
        tokens = (record.output_tokens or record.prompt_tokens) if record.outcome == "completed" else 0
        served[record.key] = served.get(record.key, 0) + tokens
    return jain_index(served.values())


Span = tuple[float, float]


def _inside(at_ns: float, spans_ns: Sequence[Span]) -> bool:
    return any(from_ns <= at_ns < to_ns for from_ns, to_ns in spans_ns)


def utilization(samples: Sequence[EngineSample], spans_ns: Sequence[Span]) -> Utilization:
    """Busy share, batch occupancy and step time within spans of time, from the engine's counters.

    Without the counters, `busy` is the share of samples that saw a running request and the rest is unknown.
    """
    busy_s = _growth(samples, spans_ns, lambda sample: sample.busy_s)
    steps = _growth(samples, spans_ns, lambda sample: sample.steps)
    seqs = _growth(samples, spans_ns, lambda sample: sample.batch_seqs)
    seats = next((sample.max_batch for sample in reversed(samples) if sample.max_batch), None)
    length_ns = sum(to_ns - from_ns for from_ns, to_ns in spans_ns)
    busy = batch = step_ms = None
    if busy_s is not None and length_ns > 0:
        busy = min(1.0, max(0.0, busy_s * NS_PER_S / length_ns))
    if steps and seqs is not None and seats:
        batch = seqs / steps / seats
    if steps and busy_s is not None:
        step_ms = 1000 * busy_s / steps
    if busy is None:
        seen = [s.running for s in samples if s.running is not None and _inside(s.at_ns, spans_ns)]
        busy = sum(1 for running in seen if running > 0) / len(seen) if seen else None
    return Utilization(busy, batch, step_ms)


def _growth(
    samples: Sequence[EngineSample], spans_ns: Sequence[Span], figure: Callable[[EngineSample], float | None]
) -> float | None:
    points = [(float(s.at_ns), value) for s in samples if (value := figure(s)) is not None]
    if len(points) < 2:
        return None
    edges = [(interpolate(points, from_ns), interpolate(points, to_ns)) for from_ns, to_ns in spans_ns]
    return sum(end - start for start, end in edges if start is not None and end is not None)


def environment() -> Environment:
    """Where the figures were measured: source commit (or release), machine, cores, time."""
    return Environment(_commit(), _machine(), os.cpu_count() or 1, datetime.now(UTC).isoformat(timespec="seconds"))


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        from importlib.metadata import version

        return f"release {version('forebay')}"
    return done.stdout.strip()


def _machine() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {platform.system()} {platform.machine()}"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()}, {platform.system()}"
