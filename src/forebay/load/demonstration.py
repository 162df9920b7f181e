"""The comparison that `forebay demo` shows: one engine, the same seeded arrivals, the three modes in turn."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self

import msgspec

from forebay.errors import EngineError
from forebay.load.attack import OnProgress, Plan, attack
from forebay.load.child import Child, get, post_json
from forebay.load.closed import Capacity, measure_capacity
from forebay.load.target import Target
from forebay.load.workload import Workload
from forebay.report.engine_metrics import engine_sample
from forebay.report.records import Objective, PhaseBounds, RunHeader, RunRecords, stitch
from forebay.report.results import RunResult, within
from forebay.report.series import last_event_s
from forebay.report.table import milliseconds, percent
from forebay.workload.pacer import Clumps, Phase, Poisson, phase_bounds_s, schedule
from forebay.workload.sizes import Sizes

EngineKind = Literal["embedded", "simulated"]
MODES = ("backpressure", "admission", "hybrid")

SEATS = 16
"""Largest batch of the engine, and the concurrency limit of every mode: all three may fill the same engine."""

LOADS = {"below": 0.5, "bursts": 0.9, "overload": 2.75}
"""Mean offered load of each phase, in multiples of the measured capacity."""

CLUMP = SEATS // 4
"""Requests that arrive at one moment in the bursts: a quarter of the batch, so that bursts collide by chance."""

WAIT_BUDGET_SHARE = 0.2
"""Wait budget of the hybrid as a share of the service time: a fifth keeps p99 near that of not waiting at all."""

OBJECTIVE_SHARE = 1.5
"""Latency objective as a multiple of the service time at full batch: half of it for waiting and unlucky batches."""

DEADLINE_SHARE = 5.0
"""How long backpressure holds a request, in service times: enough to show what waiting does, and to end soon."""

STEADY = 1.15
"""Engine steps under overload may differ by this factor between modes before a comparison deserves a caution."""

IDLE_TIMEOUT_S = 60.0

WORKLOADS: dict[EngineKind, Workload] = {
    "embedded": Workload("completions", prompt_tokens=Sizes(8, 8), output_tokens=Sizes(12, 20)),
    "simulated": Workload("completions", prompt_tokens=Sizes(200, 200), output_tokens=Sizes(48, 80)),
}

QUESTIONS = (
    "What is the capital of France?",
    "What is 2 + 2?",
    "How many days are in a week?",
)


@dataclass(frozen=True, slots=True)
class Scene:
    """What was derived from the measured engine before the modes were compared. Times in milliseconds."""

    engine: Target
    workload: Workload
    capacity: Capacity
    objective_ms: float
    wait_budget_ms: float
    deadline_s: float
    seconds_per_phase: float
    seed: int

    def phases(self) -> list[Phase]:
        rate, length = self.capacity.requests_per_s, self.seconds_per_phase
        return [
            Phase("below", Poisson(LOADS["below"] * rate, length)),
            Phase("bursts", Clumps(LOADS["bursts"] * rate, CLUMP, length)),
            Phase("overload", Poisson(LOADS["overload"] * rate, length)),
        ]

    def config(self, mode: str) -> str:
        """The gateway's configuration for a mode: the modes differ in that one word."""
        return f"""\
[server]
port = 0
[admin]
port = 0
[slo]
ttft_ms = {self.objective_ms:.0f}
[admission]
mode = "{mode}"
wait_budget_ms = {self.wait_budget_ms:.0f}
[queue]
deadline_s = {self.deadline_s:.2f}
[[engines]]
name = "demo"
kind = "openai"
urls = [{json.dumps(self.engine.url)}]
concurrency = {{ kind = "fixed", limit = {SEATS} }}
"""

    def policy(self, mode: str) -> str:
        shared = f"at most {SEATS} in flight"
        if mode == "backpressure":
            return f"{shared}, held up to {self.deadline_s:.1f} s"
        return shared if mode == "admission" else f"{shared}, wait budget {self.wait_budget_ms:.0f} ms"


def start_engine(kind: EngineKind) -> Child:
    """The engine of the demo as a process, not yet awaited."""
    size = ["--slots", str(SEATS)] if kind == "embedded" else ["--max-num-seqs", str(SEATS)]
    return Child(f"{kind} engine", ["engine", kind, "--port", "0", *size])


def model_name(engine: Target) -> str:
    """The engine's model."""
    status, body = get(engine, "/v1/models")
    if status != 200:
        raise EngineError(f"{engine.url}/v1/models answers {status}")
    return str(json.loads(body)["data"][0]["id"])


def ask(engine: Target, model: str, question: str) -> str:
    """The model's own answer to a question."""
    messages = [{"role": "user", "content": question}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 48, "temperature": 0}).encode()
    status, answer = post_json(engine, "/v1/chat/completions", body)
    if status != 200:
        raise EngineError(f"the engine answered {status} to a question: {answer[:200].decode(errors='replace')}")
    return str(json.loads(answer)["choices"][0]["message"]["content"]).strip()


def set_scene(engine: Target, kind: EngineKind, model: str, seconds_per_phase: float, seed: int) -> Scene:
    """Measures the engine at its full batch (about 10 s) and derives objective, wait budget and deadline from it."""
    workload = replace(WORKLOADS[kind], model=model)
    # A demo cut short for a quick look measures more quickly too.
    measured_s = min(7.0, 3 * seconds_per_phase)
    capacity = measure_capacity(engine, workload, SEATS, measured_s, warm_up_s=measured_s / 4, seed=seed)
    service_ms = capacity.latency_p50_ms
    return Scene(
        engine=engine,
        workload=workload,
        capacity=capacity,
        objective_ms=OBJECTIVE_SHARE * service_ms,
        wait_budget_ms=max(1.0, WAIT_BUDGET_SHARE * service_ms),
        deadline_s=max(0.1, DEADLINE_SHARE * service_ms / 1000),
        seconds_per_phase=seconds_per_phase,
        seed=seed,
    )


class Turn(NamedTuple):
    """One mode under one phase of the load, the `number`-th of them."""

    number: int
    phase: Phase
    mode: str


class Comparison:
    """The modes against one another, phase by phase; a context manager that holds one gateway per mode.

    Within a phase the modes take turns, each on an idle engine under the same arrivals, and the order rotates from
    phase to phase: a machine that grows slower or faster by the minute does so for all modes alike.
    """

    def __init__(self, scene: Scene, folder: Path) -> None:
        self._scene = scene
        self._folder = folder
        self._stack = ExitStack()
        self._gateways: dict[str, Target] = {}
        self._parts: dict[str, list[RunRecords]] = {mode: [] for mode in MODES}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for mode in MODES:
                self._gateways[mode] = stack.enter_context(_gateway(self._scene, mode, self._folder))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def turns(self) -> Iterator[Turn]:
        """Every phase under every mode, in the order to run them."""
        for index, phase in enumerate(self._scene.phases()):
            for step in range(len(MODES)):
                yield Turn(index, phase, MODES[(index + step) % len(MODES)])

    def run(self, turn: Turn, on_progress: OnProgress) -> RunRecords:
        """Runs one turn to its last answer."""
        scene = self._scene
        wait_idle(scene.engine)
        seed = 1000 * scene.seed + turn.number
        plan = Plan(
            target=self._gateways[turn.mode],
            header=RunHeader(
                mode=turn.mode,
                policy=scene.policy(turn.mode),
                workload=str(scene.workload),
                seed=seed,
                phases=[PhaseBounds(*bounds) for bounds in phase_bounds_s([turn.phase])],
                objective=Objective(latency_ms=scene.objective_ms),
            ),
            arrivals=schedule([turn.phase], seed),
            workload=scene.workload,
            drain_s=scene.deadline_s + 10 * scene.capacity.latency_p99_ms / 1000 + 5,
            engine_metrics=scene.engine,
        )
        part = attack(plan, self._folder / f"{turn.mode}-{turn.number}.jsonl", on_progress)
        self._parts[turn.mode].append(part)
        return part

    def records(self) -> list[RunRecords]:
        """One run per mode, on a common axis: a phase begins when the slowest mode has answered the one before."""
        lengths = [max(last_event_s(part) for part in parts) for parts in zip(*self._parts.values(), strict=True)]
        starts = [0.0, *accumulate(math.ceil(length) for length in lengths)][: len(lengths)]
        mean_load = round(sum(LOADS.values()) / len(LOADS), 3)
        runs = [stitch(self._parts[mode], starts) for mode in MODES]
        for run in runs:
            run.header = msgspec.structs.replace(run.header, seed=self._scene.seed, offered_load=mean_load)
        return runs


@contextmanager
def _gateway(scene: Scene, mode: str, folder: Path) -> Iterator[Target]:
    config = folder / f"{mode}.toml"
    config.write_text(scene.config(mode), encoding="utf-8")
    with Child("gateway", ["serve", "--config", str(config), "--port", "0", "--admin-port", "0"]) as gateway:
        gateway.wait_listening()
        gateway.wait_answer("/readyz")
        yield gateway.target


def wait_idle(engine: Target) -> None:
    """Waits until the engine runs and queues nothing, so that no mode inherits the work of the one before."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while time.monotonic() < deadline:
        status, body = get(engine, "/metrics")
        sample = engine_sample(body.decode(errors="replace"), 0)
        if status == 200 and not sample.running and not sample.waiting:
            return
        time.sleep(0.1)
    raise EngineError(f"the engine still works {IDLE_TIMEOUT_S:.0f} s after its last request")


def reading(results: Sequence[RunResult], records: Sequence[RunRecords]) -> list[str]:
    """Two lines that say what the figures say, made from the figures, and a caution when they deserve one."""
    by_mode = {run.mode: run for run in results}
    held, strict, hybrid = (by_mode[mode] for mode in MODES)
    throughput = (
        f"The hybrid served {_ratio(hybrid.served_per_s, held.served_per_s)} of what backpressure alone served "
        f"({hybrid.served_per_s:.2f} against {held.served_per_s:.2f} per second), at a p99 of "
        f"{milliseconds(hybrid.latency_ms.p99)}: {_times(hybrid.latency_ms.p99, strict.latency_ms.p99)} that of "
        f"admission alone ({milliseconds(strict.latency_ms.p99)}); backpressure's is "
        f"{milliseconds(held.latency_ms.p99)}."
    )
    bursts = {run.mode: phase.utilization.batch for run in results for phase in run.phases if phase.name == "bursts"}
    good = {run.header.mode: _good_share(run, "overload") for run in records}
    promises = (
        f"In the bursts the engine's batch was filled to {percent(bursts['admission'])} by admission, "
        f"{percent(bursts['hybrid'])} by the hybrid, {percent(bursts['backpressure'])} by backpressure; under overload "
        f"{percent(good['backpressure'])} of backpressure's answers met the objective, {percent(good['admission'])} "
        f"of admission's, {percent(good['hybrid'])} of the hybrid's."
    )
    return [throughput, promises, *_disturbance(results)]


def _disturbance(results: Sequence[RunResult]) -> list[str]:
    """A caution when the machine itself changed speed between the modes: full batches take equal steps otherwise."""
    steps = {run.mode: phase.utilization.step_ms for run in results for phase in run.phases if phase.name == "overload"}
    known = [step for step in steps.values() if step]
    if len(known) < len(steps) or max(known) <= STEADY * min(known):
        return []
    shown = ", ".join(f"{mode} {milliseconds(step)}" for mode, step in steps.items())
    caution = (
        f"Caution: this machine's own speed changed between the modes (engine step under overload: {shown}); "
        "something else was using it. Repeat on a quiet machine before comparing."
    )
    return [caution]


def _good_share(run: RunRecords, phase: str) -> float | None:
    completed = [r for r in run.requests if r.phase == phase and r.outcome == "completed"]
    return sum(within(r, run.header.objective) for r in completed) / len(completed) if completed else None


def _ratio(part: float, whole: float) -> str:
    return percent(part / whole) if whole else "–"


def _times(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f} times" if value is not None and base else "–"
