"""The data plane beside its peers: every proxy in front of one upstream, in one interleaved run.

``python -m benchmarks.proxy`` (or ``make bench NAME=proxy``) installs what is missing, runs about ten minutes, writes
``benchmarks/results/proxy-DATE.json`` and the generated section of ``docs/benchmarks.md``. ``--quick`` and ``--only``
are for looking; they print the same tables and write nothing unless ``--json`` says where.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from benchmarks import environment, measures, peers, proxy_tables, publish, traffic
from benchmarks.measures import Load
from benchmarks.process import Process, StartError, free_port
from benchmarks.proxies import FOREBAY_QUEUEING, PROXIES, Proxy, Running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE: Final = publish.DOCS / "benchmarks.md"
_CHUNKS_PER_S: Final = 50
_SLOW_ROUNDS: Final = 2
_DIRECT: Final = "direct"
_QUIET_LOAD: Final = 0.5


def _say(text: str) -> None:
    click.echo(text, err=True)


class Run:
    """One run: the started processes, the figures so far, and what could not be measured."""

    def __init__(self, chosen: list[Proxy], rounds: int, load: Load, folder: Path, stack: ExitStack) -> None:
        self._chosen = chosen
        self._load = load
        self._folder = folder
        self._stack = stack
        self._running: dict[str, Running] = {}
        self._slow = {proxy.name for proxy in chosen if proxy.slow}
        self.rounds: proxy_tables.Rounds = [{} for _ in range(rounds)]
        self.memory: dict[str, dict[str, float]] = {}
        self.failures: list[str] = []

    def start(self) -> None:
        """Start the upstream, then every proxy; one that does not start is a failure, not the end of the run."""
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.upstream", "--port", str(port)]
        command += ["--chunks-per-s", str(_CHUNKS_PER_S)]
        self._upstream = Process.start("upstream", command, self._folder, {"PYTHONPATH": str(peers.ROOT)})
        self._upstream_port = port
        self._stack.callback(self._upstream.stop)
        self._upstream.wait_until(lambda: traffic.serves(port), 10)
        self._running[_DIRECT] = Running(self._upstream, port)
        for proxy in self._chosen:
            with self._noting(f"{proxy.title} did not start"):
                began = time.monotonic()
                running = proxy.start(self._folder, port)
                self._stack.callback(running.process.stop)
                self._running[proxy.name] = running
                _say(f"{proxy.name} {proxy.version()}: up in {time.monotonic() - began:.1f} s")

    def measure(self) -> None:
        """All rounds. Within a round each figure is taken from all proxies before the next, so that ratios are close
        in time; the order turns from round to round, so that no proxy always follows the same one."""
        for name, running in self._running.items():  # warm: pools open, code paths compiled
            traffic.closed_loop(
                running.port, connections=self._load_of(name).connections, duration_s=1, folder=self._folder
            )
        steps: tuple[tuple[str, Callable[[Running, Load], measures.Metrics]], ...] = (
            ("requests", lambda running, load: measures.requests(running, self._upstream, load, self._folder)),
            ("chunks", lambda running, load: measures.chunks(running, self._upstream, load)),
            ("latency", lambda running, load: measures.latency(running, self._running[_DIRECT], load)),
            ("refusals", lambda running, load: measures.refusals(running, self._upstream, load, self._folder)),
        )
        names = list(self._running)
        for number, results in enumerate(self.rounds):
            turn = number % len(names)
            for step, take in steps:
                for name in names[turn:] + names[:turn]:
                    if name in self._slow and number >= _SLOW_ROUNDS:
                        continue
                    with self._noting(f"{name}, {step}, round {number + 1}"):
                        metrics = take(self._running[name], self._load_of(name))
                        results.setdefault(name, {}).update(metrics)
                        if metrics:
                            shown = "  ".join(f"{key} {value:,.1f}" for key, value in metrics.items())
                            _say(f"round {number + 1}/{len(self.rounds)}  {name}: {shown}")

    def measure_memory(self) -> None:
        """Memory per idle connection and per queued request, each on a process started for it."""
        for proxy in self._chosen:
            if not proxy.slow and proxy.name in self._running:
                self._measure_fresh(proxy.name, proxy.start, measures.idle_memory)
        if "forebay" in self._running:
            self._measure_fresh("forebay", FOREBAY_QUEUEING, measures.queue_memory)

    def _measure_fresh(
        self, name: str, start: Callable[[Path, int], Running], take: Callable[[Running, Load], measures.Metrics]
    ) -> None:
        with self._noting(f"{name}, {take.__name__}"):
            fresh = start(self._folder, self._upstream_port)
            try:
                metrics = take(fresh, self._load)
            finally:
                fresh.process.stop()
            self.memory.setdefault(name, {}).update(metrics)
            _say(f"{name}: " + "  ".join(f"{key} {value:,.0f}" for key, value in metrics.items()))

    def _load_of(self, name: str) -> Load:
        return self._load.for_slow() if name in self._slow else self._load

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Keep an expected failure as a line of the result, so that one proxy does not cost the others' figures."""
        try:
            yield
        except (StartError, peers.InstallError, traffic.TrafficError, OSError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            self.failures.append(f"{what}: {lines[0]}" + (f" {lines[-1].strip()}" if len(lines) > 1 else ""))
            _say(f"! {what}: {error}")


def _choose(only: str | None) -> list[Proxy]:
    if only is None:
        return list(PROXIES)
    known = {proxy.name: proxy for proxy in PROXIES}
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise click.BadParameter(f"no proxy is named {name!r}; known: {', '.join(known)}", param_hint="--only")
    return [proxy for proxy in PROXIES if proxy.name in wanted]


def _result(run: Run, chosen: list[Proxy], load: Load, load_before: float) -> dict[str, Any]:
    summary = proxy_tables.summarize(run.rounds)
    return {
        "environment": environment.describe(load_before),
        "command": publish.command("proxy", *sys.argv[1:]),
        "parameters": {**asdict(load), "chunks_per_s_and_stream": _CHUNKS_PER_S},
        "versions": {proxy.name: proxy.version() for proxy in chosen if proxy.name in summary},
        "titles": {proxy.name: proxy.title for proxy in chosen},
        "rounds_run": len(run.rounds),
        "summary": {name: {key: asdict(spread) for key, spread in row.items()} for name, row in summary.items()},
        "comparisons": proxy_tables.compare(run.rounds),
        "memory": run.memory,
        "failures": run.failures,
        "rounds": run.rounds,
    }


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(1, 50), default=None, help="Rounds [default: 5, with --quick 2].")
@click.option(
    "--only", metavar="NAMES", help="Comma-separated proxies instead of all: " + ", ".join(p.name for p in PROXIES)
)
@click.option("--quick", is_flag=True, help="Short bursts and two rounds: for looking, not for quoting.")
@publish.json_option
def main(rounds: int | None, only: str | None, quick: bool, json_path: Path | None) -> None:
    chosen = _choose(only)
    load = measures.QUICK if quick else measures.FULL
    load_before = environment.load_average()
    if load_before > _QUIET_LOAD:
        _say(f"! the machine is busy (load average {load_before:g}): every figure below, ratios included, is suspect")
    try:
        peers.WRK.ensure()
    except peers.InstallError as error:
        raise click.ClickException(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name, ExitStack() as stack:
        run = Run(chosen, rounds or (2 if quick else 5), load, Path(name), stack)
        run.start()
        run.measure()
        run.measure_memory()
        result = _result(run, chosen, load, load_before)
    click.echo(proxy_tables.markdown(result))
    whole = not quick and only is None
    if whole or json_path is not None:
        _say(f"wrote {publish.write_results('proxy', result, json_path)}")
    if whole:
        publish.write_sections(PAGE, {"proxy": proxy_tables.markdown(result)})
        _say(f"wrote the generated section of {PAGE}")
    if run.failures:
        raise click.ClickException(f"{len(run.failures)} measurements are missing, see above")


if __name__ == "__main__":
    main()
