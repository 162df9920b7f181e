"""From columns to the public results: the figures of `report.results`, by the same definitions, without its objects."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from forebay.report.records import NEVER, OUTCOMES, Objective
from forebay.report.results import Counts, Figures, PhaseResult, Quantiles, RunResult, Utilization
from forebay.report.statistics import jain_index, percentile
from forebay.sim.engines import Work
from forebay.sim.records import COMPLETED, EVICTED, NS_PER_MS, REASONS, SHED, Columns
from forebay.sim.scenario import Scenario

NS_PER_S = 1_000_000_000
SIZE_BOUNDS = (256, 1024, 4096, 16384)
"""Bounds of the size classes, in prompt and output tokens together."""


class SizeClass(msgspec.Struct, frozen=True):
    """Requests of `from_tokens` up to, not including, `to_tokens` (None: no bound), by their real size."""

    from_tokens: int
    to_tokens: int | None
    offered: int
    completed: int
    shed: int
    """Shed or evicted."""
    shed_share: float | None
    ttft_ms: Quantiles
    latency_ms: Quantiles


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation knows beyond the public results. Shares are of 1.

    `tokens_share`: output tokens made, over what the engine makes at its best batch; None where that is not known.
    `kv_share`: KV tokens in use, over time. `tpot_ms`: time per output token after the first, of completed requests;
    `slo_share`: offered requests that were served within the whole objective, TPOT included.
    """

    tokens_share: float | None
    kv_share: float | None
    tpot_ms: Quantiles
    tpot_objective_ms: float | None
    slo_share: float | None
    output_tokens: int
    prompt_tokens: int
    preemptions: int
    ended_at_s: float
    """When the last request ended."""


class Window(msgspec.Struct, frozen=True):
    """The measured stretch of a run, in ns, and what all engines together did in it."""

    from_ns: int
    to_ns: int
    engines: int
    work: Work
    seats: int
    """Places of one engine's batch."""
    kv_tokens: int
    best_tokens_per_s: float | None
    preemptions: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.to_ns - self.from_ns) / NS_PER_S


class Judge:
    """Whether rows met the objective."""

    def __init__(self, scenario: Scenario, columns: Columns) -> None:
        self._columns = columns
        self._ttft_ns = _ns(scenario.ttft_ms)
        self._latency_ns = _ns(scenario.latency_ms)
        self._tpot_ns = _ns(scenario.tpot_ms)

    def good(self, row: int) -> bool:
        """It was completed, and in time."""
        columns = self._columns
        if columns.outcome[row] != COMPLETED:
            return False
        latency = columns.done_ns[row] - columns.intended_ns[row]
        if latency > self._latency_ns:
            return False
        first = columns.first_token_ns[row]
        # An answer that is no stream shows its first token when it shows the last.
        if (latency if first == NEVER else first - columns.intended_ns[row]) > self._ttft_ns:
            return False
        tpot = tpot_ns(columns, row)
        return tpot is None or tpot <= self._tpot_ns


def _ns(bound_ms: float | None) -> float:
    return float("inf") if bound_ms is None else bound_ms * NS_PER_MS


def tpot_ns(columns: Columns, row: int) -> float | None:
    """Time per output token after the first, of a completed stream; None for one token and for others."""
    tokens, first = columns.asked_tokens[row], columns.first_token_ns[row]
    if first == NEVER or tokens < 2 or columns.outcome[row] != COMPLETED:
        return None
    return (columns.done_ns[row] - first) / (tokens - 1)


def run_result(scenario: Scenario, mode: str, columns: Columns, window: Window) -> RunResult:
    """The results of a run; requests of the warm-up are left out."""
    rows = _measured(columns, window.from_ns)
    figures = _figures(scenario, columns, rows, window)
    fields = {name: getattr(figures, name) for name in Figures.__struct_fields__}
    phase = PhaseResult(name="load", from_s=window.from_ns / NS_PER_S, to_s=window.to_ns / NS_PER_S, **fields)
    return RunResult(
        mode=mode,
        policy=scenario.policy,
        workload=scenario.name,
        offered_load=None,
        seed=scenario.seed,
        objective=Objective(scenario.ttft_ms, scenario.latency_ms),
        phases=[phase],
        **fields,
    )


def _measured(columns: Columns, from_ns: int) -> range:
    """Rows are in the order of arrival: those from the first after the warm-up."""
    intended = columns.intended_ns
    low, high = 0, len(intended)
    while low < high:
        middle = (low + high) // 2
        if intended[middle] < from_ns:
            low = middle + 1
        else:
            high = middle
    return range(low, len(intended))


def _figures(scenario: Scenario, columns: Columns, rows: range, window: Window) -> Figures:
    outcome, done, intended = columns.outcome, columns.done_ns, columns.intended_ns
    tally = Counter(outcome[rows.start :])
    counts = Counts(len(rows), *(tally[code] for code in range(len(OUTCOMES))))
    assert counts.offered == sum(tally[code] for code in range(len(OUTCOMES))), "a request has no outcome"
    completed = array("q", (row for row in rows if outcome[row] == COMPLETED))  # of millions, lists take too much
    judge, start, end, seconds = Judge(scenario, columns), window.from_ns, window.to_ns, window.seconds
    finished = array("q", (row for row in completed if start <= done[row] < end))
    good = array("q", (row for row in finished if judge.good(row)))
    tokens = _tokens_served(columns)
    first = columns.first_token_ns
    waits = (wait for row in completed if (wait := columns.queue_wait_ns[row]) != NEVER)
    reasons = Counter(columns.reason[row] for row in rows if outcome[row] in {SHED, EVICTED})
    failures = Counter(REASONS[columns.reason[row]] for row in rows if OUTCOMES[outcome[row]] == "failed")
    admitted = counts.offered - counts.shed
    return Figures(
        duration_s=seconds,
        counts=counts,
        latency_ms=_quantiles(done[row] - intended[row] for row in completed),
        ttft_ms=_quantiles(first[row] - intended[row] for row in completed if first[row] != NEVER),
        queue_wait_ms=_quantiles(waits),
        served_per_s=len(finished) / seconds,
        goodput_per_s=len(good) / seconds,
        goodput_tokens_per_s=sum(tokens(row) for row in good) / seconds,
        utilization=_utilization(window),
        shed_by_reason=dict(sorted((REASONS[code], number) for code, number in reasons.items())),
        failed_by_error=dict(failures.most_common()),
        wasted_work_ratio=_wasted(columns, rows, judge),
        late_evicted_ratio=counts.evicted / admitted if admitted else 0.0,
        jain_index=_jain(columns, rows),
        attempts_per_request=sum(columns.attempts[rows.start :]) / len(rows) if rows else 0.0,
    )


def _quantiles(values_ns: Iterable[float]) -> Quantiles:
    ordered = sorted(values_ns)
    p50, p99 = percentile(ordered, 0.5), percentile(ordered, 0.99)
    return Quantiles(None if p50 is None else p50 / NS_PER_MS, None if p99 is None else p99 / NS_PER_MS)


class _Tokens:
    """The tokens that a row's answer is worth: its output, or its prompt where answers carry no tokens."""

    def __init__(self, columns: Columns) -> None:
        self._output, self._prompt = columns.output_tokens, columns.prompt_tokens

    def __call__(self, row: int) -> int:
        return self._output[row] or self._prompt[row]


def _tokens_served(columns: Columns) -> _Tokens:
    return _Tokens(columns)


def _wasted(columns: Columns, rows: range, judge: Judge) -> float:
    """Share of the tokens made that went to requests late or abandoned."""
    output, has_output = columns.output_tokens, any(columns.output_tokens[rows.start :])
    spent = wasted = 0
    for row in rows:
        tokens = output[row]
        if not has_output and columns.outcome[row] == COMPLETED:
            tokens = columns.prompt_tokens[row]
        if tokens:
            spent += tokens
            if not judge.good(row):
                wasted += tokens
    return wasted / spent if spent else 0.0


def _jain(columns: Columns, rows: range) -> float | None:
    served = dict.fromkeys(columns.key[rows.start :], 0)
    tokens = _tokens_served(columns)
    for row in rows:
        if columns.outcome[row] == COMPLETED:
            served[columns.key[row]] += tokens(row)
    return jain_index(served.values())


def _utilization(window: Window) -> Utilization:
    work, length_ns = window.work, (window.to_ns - window.from_ns) * window.engines
    steps = work.steps
    return Utilization(
        busy=min(1.0, work.busy_ns / length_ns) if length_ns else None,
        batch=work.batch_seqs / steps / window.seats if steps else None,
        step_ms=work.busy_ns / steps / NS_PER_MS if steps else None,
    )


def extras(scenario: Scenario, columns: Columns, window: Window) -> Extras:
    """What the public results do not show."""
    rows = _measured(columns, window.from_ns)
    work, seconds = window.work, window.seconds * window.engines
    best = window.best_tokens_per_s
    judge = Judge(scenario, columns)
    return Extras(
        tokens_share=work.output_tokens / (best * seconds) if best and seconds else None,
        kv_share=work.kv_token_ns / (window.kv_tokens * seconds * NS_PER_S) if window.kv_tokens and seconds else None,
        tpot_ms=_quantiles(tpot for row in rows if (tpot := tpot_ns(columns, row)) is not None),
        tpot_objective_ms=scenario.tpot_ms,
        slo_share=sum(1 for row in rows if judge.good(row)) / len(rows) if rows else None,
        output_tokens=work.output_tokens,
        prompt_tokens=work.prompt_tokens,
        preemptions=window.preemptions,
        ended_at_s=max(columns.done_ns, default=0) / NS_PER_S,
    )


def size_classes(columns: Columns, from_ns: int, bounds: Sequence[int] = SIZE_BOUNDS) -> list[SizeClass]:
    """Every class that has requests, the small ones first."""
    members = [array("q") for _ in range(len(bounds) + 1)]
    for row in _measured(columns, from_ns):
        size = columns.prompt_tokens[row] + columns.asked_tokens[row]
        members[sum(1 for bound in bounds if size >= bound)].append(row)
    lower = (0, *bounds)
    upper: tuple[int | None, ...] = (*bounds, None)
    return [_size_class(columns, lower[n], upper[n], rows) for n, rows in enumerate(members) if rows]


def _size_class(columns: Columns, from_tokens: int, to_tokens: int | None, rows: Sequence[int]) -> SizeClass:
    completed = [row for row in rows if columns.outcome[row] == COMPLETED]
    shed = sum(1 for row in rows if columns.outcome[row] in {SHED, EVICTED})
    first, done, intended = columns.first_token_ns, columns.done_ns, columns.intended_ns
    return SizeClass(
        from_tokens,
        to_tokens,
        len(rows),
        len(completed),
        shed,
        shed / len(rows) if rows else None,
        _quantiles(first[row] - intended[row] for row in completed if first[row] != NEVER),
        _quantiles(done[row] - intended[row] for row in completed),
    )
