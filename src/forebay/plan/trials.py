"""Simulations, each run once: kept in memory and in a folder, so that an interrupted plan goes on where it was."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from forebay.errors import ForebayError
from forebay.plan.objective import Objective
from forebay.sim.run import Outcome
from forebay.sim.scenario import Scenario
from forebay.sim.sweep import sweep


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What one simulation showed. Times are ms of completed requests; refused are shed and evicted together."""

    offered: int
    refused: int
    failed: int
    good: int
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    latency_p50: float | None
    latency_p99: float | None
    busy: float | None

    @property
    def attainment(self) -> float:
        """Share of good requests among those that were not refused."""
        admitted = self.offered - self.refused
        return self.good / admitted if admitted else 0.0

    @property
    def shed(self) -> float:
        """Share of all requests that was refused."""
        return self.refused / self.offered if self.offered else 0.0

    def meets(self, objective: Objective) -> bool:
        """Did it keep the objective?"""
        return self.attainment >= objective.attainment and self.shed <= objective.max_shed

    def margin(self, objective: Objective) -> float:
        """How far from the objective: 0 or more keeps it, and larger is better; for choosing between two that miss."""
        spare = (self.attainment - objective.attainment) / (1 - objective.attainment)
        return min(spare, (objective.max_shed - self.shed) / max(objective.max_shed, 0.01))


def trial_of(outcome: Outcome) -> Trial:
    """What a plan needs of a simulation."""
    result, extras = outcome.result, outcome.extras
    counts = result.counts
    return Trial(
        offered=counts.offered,
        refused=counts.shed + counts.evicted,
        failed=counts.failed,
        good=round((extras.slo_share or 0.0) * counts.offered),
        ttft_p50=result.ttft_ms.p50,
        ttft_p99=result.ttft_ms.p99,
        tpot_p50=extras.tpot_ms.p50,
        tpot_p99=extras.tpot_ms.p99,
        latency_p50=result.latency_ms.p50,
        latency_p99=result.latency_ms.p99,
        busy=result.utilization.busy,
    )


class PlanInterruptedError(ForebayError):
    """Stopped by the user; what was finished is kept, where there is a store."""

    exit_code = 130


WORTH_PROCESSES_S = 3.0
"""A batch of simulations shorter than this is done before processes for it have started."""

Simulate = Callable[[Sequence[Scenario], Callable[[Scenario], None]], Sequence[Trial]]
"""Runs scenarios; tells of each that was computed and not found in a store."""


class Simulator:
    """Simulations, finished ones kept in `store`; in parallel processes where they take longer than starting those."""

    def __init__(self, processes: int | None, store: Path | None) -> None:
        self._processes, self._store = processes, store
        self._seconds = 0.0  # of one simulation, as last seen in this process

    def __call__(self, scenarios: Sequence[Scenario], done: Callable[[Scenario], None]) -> Sequence[Trial]:
        """The trials, in order; `done` is told of each that was computed and not found in the store."""
        computed = 0

        def progress(_finished: int, _total: int, scenario: Scenario) -> None:
            nonlocal computed
            computed += 1
            done(scenario)

        alone = len(scenarios) == 1 or self._seconds * len(scenarios) < WORTH_PROCESSES_S
        began = time.monotonic()
        outcomes = sweep(
            scenarios, processes=1 if alone else self._processes, resume_dir=self._store, progress=progress
        )
        if alone and computed:
            self._seconds = (time.monotonic() - began) / computed
        return [trial_of(outcome) for outcome in outcomes]


class Trials:
    """Answers scenarios from memory, and has the rest run. `progress` is told of every answer."""

    def __init__(self, simulate: Simulate, progress: Callable[[Scenario, Trial], None] | None = None) -> None:
        self._simulate, self._progress = simulate, progress
        self._known: dict[str, Trial] = {}
        self.ran = 0
        """Simulations that were computed here; the others were found finished."""

    @property
    def reused(self) -> int:
        """Simulations that an earlier, interrupted or equal, plan had finished."""
        return len(self._known) - self.ran

    def __call__(self, scenarios: Sequence[Scenario]) -> list[Trial]:
        """The trials of the scenarios, in order."""
        digests = [scenario.digest() for scenario in scenarios]
        todo = {digest: one for digest, one in zip(digests, scenarios, strict=True) if digest not in self._known}
        if todo:
            for (digest, scenario), trial in zip(
                todo.items(), self._simulate(list(todo.values()), self._count), strict=True
            ):
                self._known[digest] = trial
                if self._progress is not None:
                    self._progress(scenario, trial)
        return [self._known[digest] for digest in digests]

    def _count(self, _scenario: Scenario) -> None:
        self.ran += 1


def store_folder(folder: Path | None, parts: Sequence[str]) -> Path:
    """Where the finished simulations of a plan are kept: in `folder`, or in the user's cache."""
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG rules: a relative or empty value counts as unset.
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "forebay" / "plans"
    return folder / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
