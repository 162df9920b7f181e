"""The world of the retries benchmark: callers that storm, an engine that starts cold, and returns with a retry ticket.

What the product does not do stands here, as a variant of its parts: a ladder that tells everybody the same time. Retry
budgets, spread times, the waiting room and retry tickets are its own, switched by settings.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from statistics import fmean, pstdev
from typing import Any, Final

import msgspec

from benchmarks.control_cases import A100, AFTER_S, FACTOR, SPIKE_AT_S, SPIKE_S, capacity
from benchmarks.control_policies import config
from benchmarks.control_statistics import first_window, share_good
from benchmarks.control_world import ENGINES, MIXES, TPOT_MS, TTFT_MS, Stream, Tiring, drawn, simulate
from forebay.config.build import pipeline_config
from forebay.core.admission.forecast import Outlook
from forebay.core.admission.retry_after import RetryLadder
from forebay.core.dispatch.leases import Engine
from forebay.core.instant import SECOND, Instant
from forebay.core.model import Demand, Refusal, Request
from forebay.core.pipeline import Pipeline
from forebay.core.pool import Pool
from forebay.core.quota.path import Path, Prices
from forebay.report.records import NEVER, OutcomeName
from forebay.report.statistics import percentile
from forebay.sim.call import Call
from forebay.sim.figures import Judge
from forebay.sim.journal import Journal, Unobserved
from forebay.sim.records import COMPLETED, Columns
from forebay.sim.run import Parts, Simulation
from forebay.sim.scenario import ClientSpec, EngineSpec, FaultSpec, Scenario, WorkloadSpec
from forebay.sim.world import ARRIVAL

Figures = dict[str, float | None]

SDK_KEYS: Final = ("s1", "s2", "s3", "s4")
STORM_KEYS: Final = ("n1", "n2", "n3", "n4")
STEADY, BURST = "1.5x", "0.7x, and 7x more for 10 s"
STORMS: Final = {STEADY: (1.5, 0.0), BURST: (0.7, 7.0)}
"""Load, and what is added to it for ten seconds."""
STORM_S: Final = 100.0
COUNTED_FROM_S: Final = 20.0
SOON_S: Final = 10.0

COLD_S: Final = 25.0
COLD_RUN_S: Final = 120.0
COLD_VARIANTS: Final = ("at once", "spread", "room")
TICKET_VARIANTS: Final = ("calendar", "tickets", "half")
SMALL_VARIANTS: Final = ("calendar", "tickets")
SMALL_PLACES: Final = 4
SMALL_RUN_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulation to be done. `variant` and `load` mean what the case makes of them."""

    case: str
    variant: str
    load: str
    seed: int
    scale: float = 1.0
    """Of what comes after a spike or a cold start, and of a storm."""


def measure(trial: Trial) -> Figures:
    """Simulate, and read the figures."""
    return CASES[trial.case](trial)


# ---- budgets: who storms beside who has an SDK -----------------------------------------------------------------------


class Storming(Tiring):
    """Some keys come again after a pause of their own, whatever they are told; their attempts are numbered."""

    pause_s = 1.0
    most = 20  # retries

    def _end_or_retry(self, call: Call, outcome: OutcomeName, reason: str, status: int, told: dict[str, str]) -> None:
        if call.key not in STORM_KEYS:
            super()._end_or_retry(call, outcome, reason, status, told)
        elif outcome == "failed" or call.attempts > self.most:
            self._end(call, outcome, reason, status)
        else:
            call.front = None
            pause_ns = int(self.pause_s * SECOND * (0.5 + self._retries.random()))
            self._world.at(self._world.now + pause_ns, partial(self._send, call), ARRIVAL)


class StormingHarder(Storming):
    """Twice as often."""

    pause_s = 0.5
    most = 30


STORMS_OF: Final = {STEADY: Storming, BURST: StormingHarder}


def budgets(trial: Trial) -> Figures:
    """Four keys of each kind. `variant`: "fair" or "unfair", and "with" or "without" budgets."""
    sharing, switch = trial.variant.split()
    load, more = STORMS[trial.load]
    rate, seconds = capacity(A100, "chat"), STORM_S * trial.scale
    keys = SDK_KEYS + STORM_KEYS
    streams = [Stream("chat", load * rate, 0.0, seconds, keys)]
    if more:
        streams.append(Stream("chat", more * rate, 0.4 * seconds, 0.4 * seconds + SPIKE_S * trial.scale, keys))
    admission = f"retry_budget = {str(switch == 'with').lower()}"
    run = simulate(
        config('kind = "guarded"', fair=sharing == "fair", admission=admission),
        A100,
        drawn(streams, trial.seed),
        seconds=seconds,
        seed=trial.seed,
        retry="sdk",
        callers_of=STORMS_OF[trial.load],
    )
    columns, figures = run.callers.records, Figures()
    for name, kept in (("sdk", SDK_KEYS), ("storm", STORM_KEYS)):
        rows = [
            row
            for row in range(len(columns))
            if columns.keys[columns.key[row]] in kept
            and columns.intended_ns[row] >= COUNTED_FROM_S * trial.scale * SECOND
        ]
        figures[f"{name}_served"] = _served(columns, rows)
        figures[f"{name}_soon"] = fmean(
            columns.outcome[row] == COMPLETED and columns.done_ns[row] - columns.intended_ns[row] <= SOON_S * SECOND
            for row in rows
        )
        figures[f"{name}_attempts"] = fmean(columns.attempts[row] for row in rows)
    return figures


def _served(columns: Columns, rows: Sequence[int]) -> float | None:
    return fmean(columns.outcome[row] == COMPLETED for row in rows) if rows else None


# ---- a cold start ----------------------------------------------------------------------------------------------------

COLD_CONFIG: Final = """
[slo]
ttft_ms = {ttft:g}
tpot_ms = {tpot:g}
[admission]
mode = "hybrid"
fair_share = true
waiting_room = {room}
waiting_room_s = 60
[[engines]]
name = "engine"
kind = "simulated"
"""
ROOM: Final = 1000


class Together(RetryLadder):
    """While its pool warms up, everybody is told the expected time, a little later for some."""

    def __init__(self, pool: Pool, chance: Random) -> None:
        super().__init__(pool.config.retry, chance)
        self._pool = pool

    def next_ns(self, capacity: float, now: Instant, *, least_ns: int = 0, **told: Any) -> int:
        """As ever when an engine is up."""
        if self._pool.warming and not self._pool.up:
            return self.spread_ns(least_ns)
        return super().next_ns(capacity, now, least_ns=least_ns, **told)


def cold(trial: Trial) -> Figures:
    """One engine, cold at first; an even load; SDK retries. Who came while it was cold, and who came after."""
    rate = float(trial.load) * capacity(A100, "chat") / ENGINES
    prompt, output = MIXES["chat"]
    room = ROOM if trial.variant == "room" else 0
    seconds = COLD_S + (COLD_RUN_S - COLD_S) * trial.scale
    simulation = Simulation(
        Scenario(
            name="cold",
            policy=trial.variant,
            config=COLD_CONFIG.format(ttft=TTFT_MS, tpot=TPOT_MS, room=room),
            engines=EngineSpec(profile=A100, count=1, faults=(FaultSpec(kind="cold", from_s=0, to_s=COLD_S),)),
            workload=WorkloadSpec(rate=rate, duration_s=seconds, prompt_tokens=prompt, output_tokens=output),
            clients=ClientSpec(retry="sdk"),
            seed=trial.seed,
            ttft_ms=TTFT_MS,
            tpot_ms=TPOT_MS,
        )
    )
    if trial.variant == "at once":
        (pool,) = simulation.pipelines[0].pools
        pool.ladder = Together(pool, Random(f"{trial.seed}/together"))
    simulation.run()
    columns = simulation.records
    early = [row for row in range(len(columns)) if columns.intended_ns[row] < COLD_S * SECOND]
    late = range(len(early), len(columns))
    return {
        "early_served": _served(columns, early),
        "late_served": _served(columns, late),
        "late_at_once": fmean(columns.outcome[row] == COMPLETED and columns.attempts[row] == 1 for row in late),
        "early_attempts": fmean(columns.attempts[row] for row in early),
        **{f"early_{name}": wait for name, wait in _waits(columns, early).items()},
    }


def _waits(columns: Columns, rows: Sequence[int]) -> Figures:
    """Seconds from the first attempt to the first token, of those who were served."""
    waits = sorted(
        (columns.first_token_ns[row] - columns.intended_ns[row]) / SECOND
        for row in rows
        if columns.outcome[row] == COMPLETED and columns.first_token_ns[row] != NEVER
    )
    return {f"wait_p{share}_s": percentile(waits, share / 100) for share in (10, 50, 90)}


# ---- retry tickets ---------------------------------------------------------------------------------------------------


class Counting(Pipeline):
    """Counts returns, and how many are refused."""

    returns = 0
    turned_away = 0

    def _verdict(
        self, request: Request, demand: Demand, path: Path, prices: Prices, pool: Pool, now: Instant
    ) -> Refusal | Engine | Outlook:
        verdict = super()._verdict(request, demand, path, prices, pool, now)
        if request.retries:
            self.returns += 1
            self.turned_away += isinstance(verdict, Refusal)
        return verdict


class CountingParts(Parts):
    """Those of a scenario, with a pipeline that counts."""

    def pipeline(self, gateway: int, journal: Journal | None) -> Pipeline:
        """One of that kind."""
        settings = msgspec.structs.replace(self._config, engines=(self._entry(gateway),))
        chance = Random(f"{self.scenario.seed}/core/{gateway}")
        return Counting(pipeline_config(settings), chance, journal or Unobserved())


class Showing(Tiring):
    """Callers of whom all send retry tickets back, as far as their refusals bring any."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held_waits_ms: list[float] = []
        """Of holders that were served: the wait for their place."""

    def completed(self, call: Call) -> None:
        if call.ticket is not None and call.ticket.request.holds_place:
            self.held_waits_ms.append(call.ticket.queue_wait_ns / 1e6)
        super().completed(call)

    def shows(self, index: int) -> bool:  # noqa: ARG002
        """Does the caller of this request send them back?"""
        return True

    def _send(self, call: Call) -> None:
        if not self.shows(call.index):
            call.place = None
        super()._send(call)


class HalfShowing(Showing):
    """Every other one does."""

    def shows(self, index: int) -> bool:
        return index % 2 == 0


def tickets(trial: Trial) -> Figures:
    """A base load, and ten times as much for ten seconds. What became of the callers of the spike, and of others.

    `variant`: "calendar" without retry tickets; with them all callers send them back ("tickets"), or "half" of them.
    """
    base = float(trial.load) * capacity(A100, "chat")
    to_s = SPIKE_AT_S + SPIKE_S
    seconds = to_s + AFTER_S * trial.scale
    streams = [
        Stream("chat", base, 0.0, seconds),
        Stream("chat", base * (FACTOR - 1.0), SPIKE_AT_S, to_s, phase="spike"),
    ]
    run = simulate(
        config('kind = "guarded"', fair=True, admission=f"retry_tickets = {str(trial.variant != 'calendar').lower()}"),
        A100,
        drawn(streams, trial.seed),
        seconds=seconds,
        seed=trial.seed,
        retry="sdk-tickets",
        parts_of=CountingParts,
        callers_of=HalfShowing if trial.variant == "half" else Showing,
    )
    columns, judge = run.callers.records, Judge(run.scenario, run.callers.records)
    moments = list(columns.intended_ns)
    at_once = [columns.attempts[row] == 1 and judge.good(row) for row in range(len(columns))]
    from_ns, to_ns, end_ns = (int(at * SECOND) for at in (SPIKE_AT_S, to_s, seconds))
    recovered = first_window(moments, at_once, to_ns, window_ns=3 * SECOND, share=0.97, until_ns=end_ns)
    rows = [row for row in range(len(columns)) if from_ns <= moments[row] < to_ns]
    attempts = [columns.attempts[row] for row in rows]
    (pipeline,), callers = run.pipelines, run.callers
    assert isinstance(pipeline, Counting)
    assert isinstance(callers, Showing)
    return {
        "served": fmean(
            columns.outcome[row] == COMPLETED and columns.done_ns[row] - moments[row] <= AFTER_S * SECOND
            for row in rows
        ),
        "recovery_s": AFTER_S if recovered is None else recovered / SECOND,
        "after": share_good(moments, at_once, to_ns, end_ns),
        "returns_refused": pipeline.turned_away / pipeline.returns if pipeline.returns else None,
        "attempts": fmean(attempts),
        "attempts_spread": pstdev(attempts),
        "in_vain": _in_vain(columns, rows),
        "in_order": _in_order(columns, rows),
        "late": (callers.late + callers.displaced) / sum(columns.attempts),
        "held_wait_p99_ms": percentile(sorted(callers.held_waits_ms), 0.99),
        **_waits(columns, rows),
        **_halves(columns, rows),
    }


def _in_vain(columns: Columns, rows: Sequence[int]) -> float | None:
    """Of those who came back, the share that was never served."""
    served = _served(columns, [row for row in rows if columns.attempts[row] > 1])
    return None if served is None else 1.0 - served


def _halves(columns: Columns, rows: Sequence[int]) -> Figures:
    """Of each half of the callers, as `HalfShowing` tells them apart."""
    figures = Figures()
    for name, parity in (("showing", 0), ("silent", 1)):
        half = [row for row in rows if row % 2 == parity]
        figures |= {f"{name}_served": _served(columns, half), f"{name}_in_vain": _in_vain(columns, half)}
    return figures


# ---- retry tickets of a small pool -----------------------------------------------------------------------------------

SMALL_CONFIG: Final = """
[slo]
ttft_ms = {ttft:g}
tpot_ms = {tpot:g}
[admission]
mode = "{mode}"
retry_tickets = {tickets}
[[engines]]
name = "engine"
kind = "simulated"
concurrency = {{ kind = "fixed", limit = {places} }}
"""


def small(trial: Trial) -> Figures:
    """One engine that takes a few requests at once; an even load, for a long time. All callers."""
    seconds = SMALL_RUN_S * trial.scale
    rate = float(trial.load) * _small_capacity()
    columns = _on_small("hybrid", rate, seconds, trial.seed, tickets=trial.variant == "tickets")
    rows = [row for row in range(len(columns)) if columns.intended_ns[row] >= COUNTED_FROM_S * SECOND]
    return {
        "served": _served(columns, rows),
        "at_once": fmean(columns.outcome[row] == COMPLETED and columns.attempts[row] == 1 for row in rows),
        "attempts": fmean(columns.attempts[row] for row in rows),
        "in_vain": _in_vain(columns, rows),
        **_waits(columns, rows),
    }


@cache
def _small_capacity() -> float:
    """Requests per second that it serves while many wait."""
    columns = _on_small("backpressure", 10.0, 200.0, 1, tickets=False)
    done = [columns.done_ns[row] for row in range(len(columns)) if columns.outcome[row] == COMPLETED]
    return sum(50 * SECOND <= at < 200 * SECOND for at in done) / 150


def _on_small(mode: str, rate: float, seconds: float, seed: int, *, tickets: bool) -> Columns:
    prompt, output = MIXES["chat"]
    settings = SMALL_CONFIG.format(
        ttft=TTFT_MS, tpot=TPOT_MS, mode=mode, tickets=str(tickets).lower(), places=SMALL_PLACES
    )
    simulation = Simulation(
        Scenario(
            name="small",
            policy="tickets" if tickets else "calendar",
            config=settings,
            engines=EngineSpec(profile=A100, count=1),
            workload=WorkloadSpec(rate=rate, duration_s=seconds, prompt_tokens=prompt, output_tokens=output),
            clients=ClientSpec(retry="sdk-tickets"),
            seed=seed,
            ttft_ms=TTFT_MS,
            tpot_ms=TPOT_MS,
        )
    )
    simulation.run()
    return simulation.records


def _in_order(columns: Columns, rows: Sequence[int]) -> float | None:
    """Of all pairs of served callers, the share in which who came first had its first token first; 0.5 is chance."""
    firsts = [
        columns.first_token_ns[row]
        for row in rows
        if columns.outcome[row] == COMPLETED and columns.first_token_ns[row] != NEVER
    ]
    pairs = len(firsts) * (len(firsts) - 1) // 2
    seen: list[int] = []
    kept = 0
    for first in firsts:
        kept += bisect(seen, first)
        insort(seen, first)
    return kept / pairs if pairs else None


CASES: Final[dict[str, Callable[[Trial], Figures]]] = {
    "budgets": budgets, "cold": cold, "tickets": tickets, "small": small,
}  # fmt: skip
