"""The core alone: nanoseconds of CPU that one decision costs, ``offer`` and ``report`` together, no I/O.

``python -m benchmarks.core`` (or ``make bench NAME=core``) drives the production pipeline on a manual clock, writes
``benchmarks/results/core-DATE.json`` and the generated section of ``docs/benchmarks.md``.
"""

from __future__ import annotations

import gc
import json
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import click

from benchmarks import environment, tables
from benchmarks.peers import ROOT
from forebay.core.effects import Dispatch, Effect, Queued, Refuse
from forebay.core.events import EngineUp, Finished
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Lease, Mode, Refusal, Request, Ticket, Usage
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.quota.terms import KeyLimits, KeyTerms

if TYPE_CHECKING:
    from collections.abc import Sequence

Step = Callable[[int], None]
"""One measured decision, at the given instant."""

_INTERVAL_NS: Final = MILLISECOND
_USAGE: Final = Usage(input_tokens=231, output_tokens=16)
_AMPLE: Final = KeyLimits(
    requests_per_minute=100_000_000,
    tokens_per_minute=10_000_000_000,
    tokens_per_second=1_000_000_000,
    concurrency=4096,
)


class _Unobserved:
    """The observer's own cost belongs to telemetry, not to the decision."""

    def closed(self, ticket: Ticket) -> None:
        pass

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        pass


def _pipeline(keys: dict[str, KeyLimits], *, limit: int = 4096, mode: Mode = Mode.HYBRID) -> Pipeline:
    pool = PoolConfig("bench", ("engine",), mode=mode, hold_ns=3600 * SECOND, limit=FixedConfig(limit=limit))
    terms = {key: KeyTerms(limits) for key, limits in keys.items()}
    pipeline = Pipeline(PipelineConfig((pool,), terms), Random(1), _Unobserved())
    pipeline.report(EngineUp("engine"), 0)
    return pipeline


def _request(key: str) -> Request:
    return Request(key=key, model="bench", body_bytes=1024, text_bytes=860, max_output_tokens=128)


def _lease(effects: Sequence[Effect]) -> Lease:
    (effect,) = effects
    assert isinstance(effect, Dispatch)
    return effect.leases[0]


def _admitted(limits: KeyLimits, keys: int = 1) -> Step:
    """The engine has room: offered, dispatched, finished."""
    names = [f"key-{n}" for n in range(keys)]
    pipeline = _pipeline(dict.fromkeys(names, limits))
    turn = 0

    def step(now: int) -> None:
        nonlocal turn
        turn = (turn + 1) % keys
        lease = _lease(pipeline.offer(_request(names[turn]), now))
        pipeline.report(Finished(lease, _USAGE), now)

    return step


def _queued(depth: int, keys: int) -> Step:
    """The engine is full and ``depth`` wait: one joins the queue, the oldest lease ends, the next in turn leaves."""
    names = [f"key-{n}" for n in range(keys)]
    pipeline = _pipeline(dict.fromkeys(names, _AMPLE), limit=64, mode=Mode.BACKPRESSURE)
    open_leases = deque(_lease(pipeline.offer(_request(names[n % keys]), 0)) for n in range(64))
    for n in range(depth):
        pipeline.offer(_request(names[n % keys]), 0)
    turn = 0

    def step(now: int) -> None:
        nonlocal turn
        turn = (turn + 1) % keys
        (effect,) = pipeline.offer(_request(names[turn]), now)
        assert isinstance(effect, Queued)
        open_leases.append(_lease(pipeline.report(Finished(open_leases.popleft(), _USAGE), now)))

    return step


def _refused(pipeline: Pipeline) -> Step:
    def step(now: int) -> None:
        (effect,) = pipeline.offer(_request("key"), now)
        assert isinstance(effect, Refuse)

    return step


def _over_key_limit() -> Step:
    # Nothing refills within the run: a limit of one request per minute would admit one every 60,000 steps.
    return _refused(_pipeline({"key": KeyLimits(requests_per_minute=0)}))


def _no_waiting_room() -> Step:
    pipeline = _pipeline({"key": _AMPLE}, limit=1, mode=Mode.ADMISSION)
    pipeline.offer(_request("key"), 0)
    return _refused(pipeline)


CASES: Final[dict[str, Callable[[], Step]]] = {
    "admitted at once, key without limits": lambda: _admitted(KeyLimits()),
    "admitted at once, all limits": lambda: _admitted(_AMPLE),
    "admitted at once, all limits, 10,000 keys in turn": lambda: _admitted(_AMPLE, keys=10_000),
    "queued behind 100, 10 keys": lambda: _queued(100, 10),
    "queued behind 5,000, 500 keys": lambda: _queued(5_000, 500),
    "refused, key over its limit": _over_key_limit,
    "refused, engine full and no waiting room": _no_waiting_room,
}


@dataclass(frozen=True, slots=True)
class _Clock:
    steps: int
    now: int


def _time(step: Step, clock: _Clock) -> tuple[float, _Clock]:
    """Nanoseconds of CPU per step, collections included as in the gateway, and the clock after them."""
    now = clock.now
    before = time.process_time_ns()
    for _ in range(clock.steps):
        now += _INTERVAL_NS
        step(now)
    return (time.process_time_ns() - before) / clock.steps, _Clock(clock.steps, now)


def measure(rounds: int, steps: int) -> dict[str, tables.Spread]:
    """The spread of every case over the rounds, the cases taken in turn within each."""
    prepared = {name: make() for name, make in CASES.items()}
    clocks = dict.fromkeys(prepared, _Clock(steps, SECOND))
    figures: dict[str, list[float]] = {name: [] for name in prepared}
    gc.freeze()
    for number in range(rounds + 1):
        for name, step in prepared.items():
            ns, clocks[name] = _time(step, clocks[name])
            if number:  # the first round warms
                figures[name].append(ns)
        click.echo(f"round {number}/{rounds}" if number else "warm", err=True)
    return {name: spread for name, values in figures.items() if (spread := tables.Spread.of(values)) is not None}


def markdown(result: dict[str, Any]) -> str:
    """The generated section of ``docs/benchmarks.md``."""
    lines = [*tables.provenance(result), ""]
    lines += tables.table(
        ["decision", "CPU ns"], [[name, tables.cell(spread, 0)] for name, spread in result["ns_per_decision"].items()]
    )
    return "\n".join(lines) + "\n"


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(1, 100), default=9, show_default=True)
@click.option("--steps", type=click.IntRange(1000), default=20_000, show_default=True, help="Decisions per round.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--dry", is_flag=True, help="Print only: no results file, documentation left as it is.")
def main(rounds: int, steps: int, json_path: Path | None, dry: bool) -> None:
    load_before = environment.load_average()
    spreads = measure(rounds, steps)
    result: dict[str, Any] = {
        "environment": environment.describe(load_before),
        "command": shlex.join(["python", "-m", "benchmarks.core", *sys.argv[1:]]),
        "rounds_run": rounds,
        "steps": steps,
        "ns_per_decision": {name: asdict(spread) for name, spread in spreads.items()},
    }
    click.echo(markdown(result))
    if dry:
        return
    path = json_path or ROOT / "benchmarks" / "results" / f"core-{datetime.now(UTC):%Y-%m-%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    tables.write_section("core", markdown(result))


if __name__ == "__main__":
    main()
