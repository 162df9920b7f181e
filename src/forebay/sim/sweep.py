"""Many scenarios, each in a process of its own: in any order, interrupted and resumed, the results are the same.

A finished outcome is kept under a name made of all that it depends on: the scenario, the sources of Forebay that take
part in a simulation, and the user's own files. What was kept by other code, or for another file, is never taken for an
answer. Processes are spawned, not forked: they share nothing with whoever calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import msgspec

from forebay.errors import ForebayError, UsageError
from forebay.sim.export import encode_rows
from forebay.sim.run import Outcome, Simulation
from forebay.sim.scenario import Scenario

Backend = Literal["processes", "ray"]
Progress = Callable[[int, int, Scenario], None]
"""Told after each scenario: how many are done, of how many, and which it was."""

MAX_PROCESSES = 1024
PARTS = (
    *("config", "core", "engines/simulated", "sim", "workload", "data/calibration", "data/traces"),
    *("report/records.py", "report/results.py", "report/statistics.py"),
)
"""What the result of a scenario depends on, within the package."""
ASKING = frozenset(
    f"sim/{name}.py"
    for name in (
        *("article", "bounds", "calibrate", "clairvoyant", "export"),
        *("grid", "policies", "replay", "squares", "sweep"),
    )
)
"""But for these, which only ask for simulations, or for something else."""


class SweepInterruptedError(ForebayError):
    """Stopped by the user; what was finished is kept."""

    exit_code = 130


def sweep(
    scenarios: Sequence[Scenario],
    *,
    processes: int | None = None,
    progress: Progress | None = None,
    resume_dir: Path | None = None,
    backend: Backend = "processes",
    keep_rows: bool = False,
    fresh: bool = False,
) -> list[Outcome]:
    """Outcomes in the order of the scenarios, however they were computed.

    `resume_dir` keeps each as it is finished, and gives back those that it has, unless `fresh`; with `keep_rows` a row
    per request is kept too (`rows_file`). Raises UsageError when it cannot be written, when a scenario cannot run, or
    when an extra is missing; SweepInterruptedError after Ctrl-C.
    """
    if keep_rows and resume_dir is None:
        raise ValueError("rows are kept in a directory: give resume_dir")
    count = processes or min(len(os.sched_getaffinity(0)), max(1, len(scenarios)))
    if not 1 <= count <= MAX_PROCESSES:
        raise UsageError(f"the number of processes must lie within 1 and {MAX_PROCESSES}, it is {count}")
    store = _Store(resume_dir, rows=keep_rows)
    keys = [_key(scenario) for scenario in scenarios]
    found: dict[str, Outcome] = {}
    for key in keys:
        if not fresh and key not in found and (kept := store.get(key)) is not None:
            found[key] = kept
    missing = {key: scenario for key, scenario in zip(keys, scenarios, strict=True) if key not in found}
    done = len(scenarios) - len(missing)
    compute = {"processes": _in_processes, "ray": _on_ray}[backend]
    answers = compute(missing, min(count, max(1, len(missing))), keep_rows)
    try:
        with contextlib.closing(answers):
            for answer in answers:
                if answer.outcome is None:
                    raise UsageError(answer.refusal)
                key = answer.key
                store.put(key, answer.outcome, answer.rows)
                found[key] = answer.outcome
                done += 1
                if progress is not None:
                    progress(done, len(scenarios), missing[key])
    except KeyboardInterrupt:
        raise SweepInterruptedError(_resume_message(done, len(scenarios), resume_dir)) from None
    return [found[key] for key in keys]


def _resume_message(done: int, total: int, resume_dir: Path | None) -> str:
    if resume_dir is None:
        return f"interrupted after {done} of {total} simulations; nothing was kept"
    kept = f"{done} of {total} simulations are done and kept in {resume_dir}"
    return f"interrupted: {kept}; the same command goes on from there"


class _Task(msgspec.Struct, frozen=True):
    """What a worker is given."""

    key: str
    scenario: Scenario
    rows: bool


class _Answer(msgspec.Struct, frozen=True):
    """What it gives back: an outcome, and rows when they were asked for; or the reason why there is none."""

    key: str
    outcome: Outcome | None = None
    rows: bytes = b""
    refusal: str = ""


def _answered(task: _Task) -> _Answer:
    try:
        simulation = Simulation(task.scenario)
        simulation.run()
        return _Answer(task.key, simulation.outcome(), encode_rows(simulation.records) if task.rows else b"")
    except ForebayError as error:
        return _Answer(task.key, refusal=str(error))


def rows_file(directory: Path, scenario: Scenario) -> Path:
    """Where a sweep with `keep_rows` keeps the requests of a scenario, as Parquet."""
    return directory / f"{_key(scenario)}.parquet"


def _key(scenario: Scenario) -> str:
    named = (scenario.workload.trace, scenario.workload.sizes_from, scenario.engines.profile)
    parts = [scenario.digest(), fingerprint(), *(_content(name) for name in named)]
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:32]


class _Store:
    """Finished outcomes as files, one each; written under another name first, so that none is ever half there."""

    def __init__(self, directory: Path | None, *, rows: bool) -> None:
        self._directory, self._rows = directory, rows
        self._encoder, self._decoder = msgspec.json.Encoder(), msgspec.json.Decoder(Outcome)
        if directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"{directory}: results cannot be kept here: {error.strerror or error}") from None

    def get(self, key: str) -> Outcome | None:
        if self._directory is None or (self._rows and not (self._directory / f"{key}.parquet").is_file()):
            return None
        try:
            return self._decoder.decode((self._directory / f"{key}.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            return None

    def put(self, key: str, outcome: Outcome, rows: bytes) -> None:
        if self._directory is None:
            return
        if rows:
            _write_whole(self._directory / f"{key}.parquet", rows)
        _write_whole(self._directory / f"{key}.json", self._encoder.encode(outcome))


def _write_whole(path: Path, data: bytes) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)


@cache
def fingerprint() -> str:
    """Digest of the sources and data that a simulation's result depends on."""
    digest = hashlib.sha256()
    root = files("forebay")
    for part in PARTS:
        for name, file in _files(part, root.joinpath(*part.split("/"))):
            digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _files(name: str, node: Traversable) -> Iterator[tuple[str, Traversable]]:
    if node.is_file():
        if not name.endswith(".pyc") and name not in ASKING:
            yield name, node
    elif node.is_dir():
        for child in sorted(node.iterdir(), key=lambda child: child.name):
            yield from _files(f"{name}/{child.name}", child)


def _content(name: str | None) -> str:
    """Digest of a file of the user's own, whose name does not tell its content; what ships is in the fingerprint."""
    if name is None:
        return ""
    try:
        state = os.stat(name)
        return _digest(name, state.st_size, state.st_mtime_ns)
    except OSError:
        return name


@lru_cache(maxsize=64)
def _digest(name: str, _size: int, _modified_ns: int) -> str:
    """A large file is read once for all scenarios that use it, and again when it has changed."""
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16]


# ---- local processes -----------------------------------------------------------------------------------------------


def _in_processes(missing: dict[str, Scenario], count: int, rows: bool) -> Generator[_Answer, None, None]:
    """Each answer as it is finished. Closing the iterator ends the processes."""
    queue = iter([_Task(key, scenario, rows) for key, scenario in missing.items()])
    if count == 1:
        yield from map(_answered, queue)
        return
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            workers[ours] = worker = context.Process(target=_work, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()
            _give(ours, worker, queue)
        left = len(missing)
        while left:
            for ready in wait(list(workers)):
                assert isinstance(ready, Connection)
                yield _taken(ready, workers[ready])
                left -= 1
                _give(ready, workers[ready], queue)
    finally:
        for connection, process in workers.items():
            connection.close()
            process.terminate()
        for process in workers.values():
            process.join()


def _give(connection: Connection, worker: BaseProcess, queue: Iterator[_Task]) -> None:
    """The next task for a worker, if there is one."""
    task = next(queue, None)
    if task is not None:
        try:
            connection.send_bytes(msgspec.msgpack.encode(task))
        except OSError:
            raise _gone(worker) from None


def _taken(connection: Connection, worker: BaseProcess) -> _Answer:
    try:
        return msgspec.msgpack.decode(connection.recv_bytes(), type=_Answer)
    except (EOFError, OSError):
        raise _gone(worker) from None


def _gone(worker: BaseProcess) -> ForebayError:
    """The error that says why a worker is not there any more."""
    worker.join(timeout=10)
    killed = worker.exitcode is not None and worker.exitcode < 0
    why = "was killed: too little memory? Use fewer processes" if killed else "failed: its error stands above"
    return ForebayError(f"a simulating process {why} (status {worker.exitcode}). What was finished before is kept")


def _work(connection: Connection) -> None:
    """A worker: tasks in, answers out, until the other end closes. The parent handles Ctrl-C for all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    decoder = msgspec.msgpack.Decoder(_Task)
    while True:
        try:
            task = decoder.decode(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(msgspec.msgpack.encode(_answered(task)))


# ---- Ray -----------------------------------------------------------------------------------------------------------


def _on_ray(missing: dict[str, Scenario], count: int, rows: bool) -> Generator[_Answer, None, None]:
    """The same on a Ray cluster: the one that RAY_ADDRESS names, else one on this machine's loopback."""
    ray = _ray()
    if not missing:
        return
    started = not ray.is_initialized()
    if started:
        _connect(ray, count)
    try:
        answer = ray.remote(num_cpus=1, max_retries=2)(_remote)
        running: list[Any] = []
        queue = iter([_Task(key, scenario, rows) for key, scenario in missing.items()])
        while True:
            # On a cluster the processes that it has decide how many run at once; a few more wait there.
            while len(running) < count and (task := next(queue, None)) is not None:
                running.append(answer.remote(msgspec.msgpack.encode(task)))
            if not running:
                return
            ready, running = ray.wait(running, num_returns=1)
            yield msgspec.msgpack.decode(ray.get(ready[0]), type=_Answer)
    finally:
        if started:
            ray.shutdown()


def _connect(ray: Any, count: int) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        ray.init(address="local", num_cpus=count, include_dashboard=False, **quiet)


def _ray() -> Any:
    if not os.environ.get("RAY_ADDRESS"):
        # Read when Ray is imported. Without it even a local Ray listens on all interfaces of the machine.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise UsageError("the backend `ray` needs the extra `ray`: pip install 'forebay[ray]'") from None
    return ray


def _remote(task: bytes) -> bytes:
    return msgspec.msgpack.encode(_answered(msgspec.msgpack.decode(task, type=_Task)))
