"""Runs a plan of arrivals against a target, open loop, and streams one record per request to a file."""

from __future__ import annotations

import asyncio
import gc
import math
import multiprocessing
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from forebay.errors import ForebayError, UsageError
from forebay.load.client import DEFAULT_MAX_CONNECTIONS, Call, Client
from forebay.load.observe import Observer
from forebay.load.target import Target
from forebay.load.workload import Magazine, Workload
from forebay.report.records import (
    NEVER,
    OUTCOMES,
    RecordWriter,
    RequestRecord,
    RunHeader,
    RunRecords,
    classify,
    read_lines,
    read_run,
)
from forebay.workload.arrival import Arrival
from forebay.workload.retry import client_model

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import SynchronizedArray

PROGRESS_S = 0.25
START_MARGIN_NS = 50_000_000
CHILD_START_MARGIN_NS = 1_500_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a run, fixed before it. `drain_s`: how long after the last arrival answers are awaited."""

    target: Target
    header: RunHeader
    arrivals: list[Arrival]
    workload: Workload
    client: str = "none"
    patience_s: float | None = None
    drain_s: float = 30.0
    engine_metrics: Target | None = None
    processes: int = 1
    max_connections: int = DEFAULT_MAX_CONNECTIONS


@dataclass(slots=True)
class Progress:
    """A moment of a run in progress: seconds since its start, requests by state, and the client's own limits."""

    elapsed_s: float
    total: int
    sent: int
    outcomes: dict[str, int]
    waited_for_connection: int
    most_late_ms: float

    @property
    def in_flight(self) -> int:
        return self.sent - sum(self.outcomes.values())


OnProgress = Callable[[Progress], None]


def attack(plan: Plan, records_path: Path, on_progress: OnProgress) -> RunRecords:
    """Runs the plan and returns its records, which `records_path` holds too. Must not be called from an event loop."""
    if not plan.arrivals:
        raise UsageError("the load holds no request: raise the rate or the duration")
    writer = RecordWriter(records_path)
    try:
        writer.write(plan.header)
        if plan.processes == 1:
            uvloop.run(_alone(plan, writer, on_progress))
        else:
            _together(plan, writer, records_path, on_progress)
    finally:
        writer.close()
    return read_run(records_path)


async def _alone(plan: Plan, writer: RecordWriter, on_progress: OnProgress) -> None:
    start_ns = time.monotonic_ns() + START_MARGIN_NS
    generator = Generator(plan, plan.arrivals, start_ns, writer, share=0)
    async with _observed(plan, start_ns, writer):
        await generator.run(on_progress)


class _observed:  # noqa: N801 - reads as a statement: `async with _observed(...)`
    """Samples the engine, when the plan names one, for as long as the block lasts, with a last sample at its end."""

    def __init__(self, plan: Plan, start_ns: int, writer: RecordWriter) -> None:
        self._observer = Observer(plan.engine_metrics, start_ns, writer.write) if plan.engine_metrics else None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if self._observer is not None:
            self._task = asyncio.create_task(self._observer.run())

    async def __aexit__(self, *_: object) -> None:
        if self._observer is not None and self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._observer.sample()


class Generator:
    """Sends its arrivals at their intended times and writes a record for each: the open loop itself."""

    def __init__(self, plan: Plan, arrivals: list[Arrival], start_ns: int, writer: RecordWriter, share: int) -> None:
        self._plan = plan
        self._arrivals = arrivals
        self._start_ns = start_ns
        self._writer = writer
        self._share = share
        seed = plan.header.seed if plan.processes == 1 else plan.header.seed * 1009 + share
        self._seed = seed
        self._magazine = Magazine(plan.workload, plan.target.authority, plan.target.prefix, seed)
        self._next = 0
        self.outcomes: dict[str, int] = dict.fromkeys(OUTCOMES, 0)

    async def run(self, on_progress: OnProgress) -> None:
        """Returns when every request has its outcome."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._ended = asyncio.Event()
        self._client = Client(
            self._plan.target,
            client_model(self._plan.client, self._plan.patience_s),
            self._done,
            patience_s=self._plan.patience_s,
            seed=self._seed,
            max_connections=self._plan.max_connections,
        )
        # Collections inside a run would show as latency of the server.
        gc.collect()
        gc.freeze()
        reporter = loop.create_task(self._report(on_progress))
        self._failure: BaseException | None = None
        self._fire()
        try:
            await self._ended.wait()
        finally:
            reporter.cancel()
            await self._client.close()
            gc.unfreeze()
        if self._failure is not None:
            raise self._failure
        on_progress(self.progress())

    def progress(self) -> Progress:
        """Where the run stands."""
        tally = self._client.tally
        return Progress(
            elapsed_s=(time.monotonic_ns() - self._start_ns) / 1e9,
            total=len(self._arrivals),
            sent=tally.sent,
            outcomes=self.outcomes,
            waited_for_connection=tally.waited_for_connection,
            most_late_ms=tally.most_late_ns / 1e6,
        )

    async def _report(self, on_progress: OnProgress) -> None:
        while True:
            on_progress(self.progress())
            await asyncio.sleep(PROGRESS_S)

    def _fire(self) -> None:
        """Sends all that is due and arms one timer for the next."""
        try:
            self._send_due()
        except Exception as error:
            self._failure = error
            self._ended.set()

    def _send_due(self) -> None:
        arrivals = self._arrivals
        last = len(arrivals)
        while self._next < last:
            arrival = arrivals[self._next]
            intended_ns = self._start_ns + arrival.at_ns
            wait_ns = intended_ns - time.monotonic_ns()
            if wait_ns > 0:
                # The loop's timers count whole milliseconds; rounding up spends no time on waking early.
                self._loop.call_later(math.ceil(wait_ns / 1e6) / 1e3, self._fire)
                return
            index = self._share + self._next * self._plan.processes
            self._next += 1
            self._client.send(Call(index, arrival, self._magazine.shot(arrival), intended_ns))
        self._loop.call_later(self._plan.drain_s, self._client.leave_all)
        self._end_when_idle()

    def _end_when_idle(self) -> None:
        if self._next == len(self._arrivals) and self._client.in_flight == 0:
            self._ended.set()

    def _done(self, call: Call) -> None:
        record = record_of(call, self._start_ns)
        self.outcomes[record.outcome] += 1
        self._writer.write(record)
        self._end_when_idle()


def record_of(call: Call, start_ns: int) -> RequestRecord:
    """The flat record of a finished call, times from the start of the run."""
    reason = call.headers.get("x-forebay-reason", "")
    outcome = classify(call.status, reason, complete=call.complete, left=call.left)
    return RequestRecord(
        index=call.index,
        phase=call.arrival.phase,
        key=call.shot.key,
        outcome=outcome,
        intended_ns=call.arrival.at_ns,
        sent_ns=_since(call.sent_ns, start_ns),
        first_token_ns=_since(call.first_token_ns, start_ns),
        done_ns=call.done_ns - start_ns,
        status=call.status,
        attempts=call.attempts,
        reason=reason,
        error=_failure_text(call) if outcome == "failed" else "",
        prompt_tokens=call.prompt_tokens,
        output_tokens=call.output_tokens,
        queue_wait_ms=queue_wait_ms(call.headers.get("server-timing", "")),
    )


def _since(at_ns: int, start_ns: int) -> int:
    return NEVER if at_ns < 0 else at_ns - start_ns


def _failure_text(call: Call) -> str:
    return f"status {call.status}: {call.error}" if call.status >= 400 else call.error


def queue_wait_ms(server_timing: str) -> float | None:
    """The duration of the `queue` metric of a `server-timing` header; None when there is none."""
    for metric in server_timing.split(","):
        name, *parameters = metric.split(";")
        if name.strip().lower() != "queue":
            continue
        for parameter in parameters:
            label, _, value = parameter.partition("=")
            if label.strip().lower() == "dur":
                try:
                    return float(value.strip().strip('"'))
                except ValueError:
                    return None
    return None


# More processes: each generates every n-th arrival on the shared monotonic clock and writes a part file.

_SLOTS = ("sent", "waited", "late_us", *OUTCOMES)


def _together(plan: Plan, writer: RecordWriter, records_path: Path, on_progress: OnProgress) -> None:
    context = multiprocessing.get_context("spawn")
    board = context.Array("q", len(_SLOTS) * plan.processes)
    start_ns = time.monotonic_ns() + CHILD_START_MARGIN_NS
    parts = [records_path.with_name(f"{records_path.name}.part{share}") for share in range(plan.processes)]
    children = [
        context.Process(target=_child, args=(plan, share, start_ns, part, board), daemon=True)
        for share, part in enumerate(parts)
    ]
    try:
        for child in children:
            child.start()
        uvloop.run(_watch(plan, start_ns, writer, children, board, on_progress))
        for share, child in enumerate(children):
            child.join()
            if child.exitcode != 0:
                raise ForebayError(f"load generator process {share} failed (exit code {child.exitcode})")
        for part in parts:
            for line in read_lines(part):
                writer.write(line)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
                child.join()
        for part in parts:
            part.unlink(missing_ok=True)


def _child(plan: Plan, share: int, start_ns: int, part: Path, board: SynchronizedArray[int]) -> None:
    # Ctrl-C reaches the whole group; the parent answers it and ends its generators.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    writer = RecordWriter(part)
    offset = share * len(_SLOTS)

    def publish(progress: Progress) -> None:
        late_us = int(progress.most_late_ms * 1e3)
        row = [progress.sent, progress.waited_for_connection, late_us, *progress.outcomes.values()]
        board[offset : offset + len(_SLOTS)] = row

    try:
        arrivals = plan.arrivals[share :: plan.processes]
        uvloop.run(Generator(plan, arrivals, start_ns, writer, share).run(publish))
    finally:
        writer.close()


async def _watch(
    plan: Plan,
    start_ns: int,
    writer: RecordWriter,
    children: list[multiprocessing.context.SpawnProcess],
    board: SynchronizedArray[int],
    on_progress: OnProgress,
) -> None:
    async with _observed(plan, start_ns, writer):
        while any(child.is_alive() for child in children):
            await asyncio.sleep(PROGRESS_S)
            rows = [board[share * len(_SLOTS) : (share + 1) * len(_SLOTS)] for share in range(plan.processes)]
            columns = dict(zip(_SLOTS, zip(*rows, strict=True), strict=True))
            on_progress(
                Progress(
                    elapsed_s=(time.monotonic_ns() - start_ns) / 1e9,
                    total=len(plan.arrivals),
                    sent=sum(columns["sent"]),
                    outcomes={outcome: sum(columns[outcome]) for outcome in OUTCOMES},
                    waited_for_connection=sum(columns["waited"]),
                    most_late_ms=max(columns["late_us"]) / 1e3,
                )
            )
