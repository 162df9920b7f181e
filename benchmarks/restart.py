"""How long a gateway with many keys takes to serve again after it was killed.

``python -m benchmarks.restart`` (or ``make bench NAME=restart``) fills a store with 100,000 keys, starts a real gateway
on it, lets some of the keys call, kills it with SIGKILL and starts it again, several times: from the start of the
process to the first 200 of ``/readyz``. The first half of the starts finds keys without a day's quota that nobody has
used; the second half finds that each has quotas of a day and a month and was used today, which has to be counted again.
It takes about a minute, and writes
``benchmarks/results/restart-DATE.json`` and the generated section of ``docs/benchmarks.md``.
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from sqlalchemy import insert, select

from benchmarks import core_http, environment, publish, tables
from benchmarks.process import Process, free_port
from forebay.ledger.database import open_store
from forebay.ledger.posting import DAY_MS, civil_day
from forebay.ledger.tables import keys, usage

PAGE: Final = publish.DOCS / "benchmarks.md"
TARGET_S: Final = 2.0
CALLS: Final = 200
"""Of as many keys, before each kill: the journal has something to recover."""
START_S: Final = 60.0
ENGINE: Final = ("engine", "simulated", "--profile", "a100-80g/llama-3.1-8b/bf16/tp1/vllm", "--model-name", "m")
CASES: Final = {
    "unused": "four limits each, none used before",
    "used": "nine limits each with those of day and month, every key used today",
}
FOREBAY: Final = (sys.executable, "-m", "forebay")


class Gateway:
    """One gateway after the other, on the same ports, store and journal."""

    def __init__(self, folder: Path, engine_port: int) -> None:
        self.folder, self.port = folder, free_port()
        self._engine = f"http://127.0.0.1:{engine_port}"
        self._admin_port = free_port()
        self._starts = 0

    def start(self) -> tuple[Process, float, float]:
        """A new process, the seconds until it was ready, and those of CPU that it took. Raises StartError."""
        self._starts += 1
        began = time.monotonic()
        process = Process.start(
            f"gateway-{self._starts}",
            [*FOREBAY, "serve", "--upstream", self._engine, "--port", f"{self.port}",
             "--admin-port", f"{self._admin_port}", "--keys", f"sqlite:///{self.folder / core_http.FILLED}"],
            self.folder,
        )  # fmt: skip
        process.wait_until(lambda: _ready(self.port), START_S, every_s=0.01)
        return process, time.monotonic() - began, process.cpu_us() / 1e6

    def call(self, secrets: Sequence[str]) -> None:
        """One answered request of each of these keys."""
        body = json.dumps({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "How deep?"}]})
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            for secret in secrets:
                headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
                connection.request("POST", "/v1/chat/completions", body, headers)
                response = connection.getresponse()
                said = response.read()
                if response.status != 200:
                    raise SystemExit(f"restart: a request was answered {response.status}: {said[:300]!r}")


def _ready(port: int, path: str = "/readyz") -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=1)) as connection:
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except OSError:
            return False


def use_all(url: str) -> None:
    """Every key of the store has quotas of a day and a month, and was used today."""
    day = civil_day(time.time_ns() // 1_000_000 // DAY_MS)
    database = open_store(url)
    every = select(keys.c.limits).where(keys.c.name == "every").scalar_subquery()
    with database.begin() as connection:
        connection.execute(keys.update().values(limits=every))
        connection.execute(usage.delete())
        found = connection.execute(select(keys.c.id)).scalars().all()
        counts = {"requests": 3, "input_tokens": 900, "output_tokens": 300}
        connection.execute(insert(usage), [
            {"key_id": key, "period": period, "start": start} | counts
            for key in found for period, start in (("day", day), ("month", day // 100))
        ])  # fmt: skip
    database.close()


def measure(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    """By case, the seconds of every start after a kill, and of the start before them."""
    url = f"sqlite:///{folder / core_http.FILLED}"
    click.echo(f"making a store of {count:,} keys", err=True)
    secrets = core_http.fill(url, count).usual[:CALLS]
    engine_port = free_port()
    engine = Process.start("engine", [*FOREBAY, *ENGINE, "--port", f"{engine_port}"], folder)
    process: Process | None = None
    found: dict[str, Any] = {}
    try:
        engine.wait_until(lambda: _ready(engine_port, "/health"), START_S)
        gateway = Gateway(folder, engine_port)
        for case, title in CASES.items():
            if case == "used":
                use_all(url)
            taken, cpu = [], []
            for _ in range(repeats + 1):
                process, seconds, cpu_s = gateway.start()
                taken.append(seconds)
                cpu.append(cpu_s)
                click.echo(f"{title}: ready after {seconds:.2f} s", err=True)
                gateway.call(secrets)
                process.kill()
            spreads = {
                name: asdict(spread)
                for name, values in (("restart_s", taken), ("cpu_s", cpu))
                if (spread := tables.Spread.of(values[1:])) is not None
            }
            found[case] = {"first_s": taken[0], **spreads, "starts_s": taken}
    finally:
        for running in (process, engine):
            if running is not None:
                running.stop()
    return found


def markdown(result: dict[str, Any]) -> str:
    """The generated section of ``docs/benchmarks.md``."""
    cases = result["cases"]
    rows = [
        [
            f"{result['keys']:,} keys, {title}",
            f"{cases[case]['first_s']:.2f}",
            *(tables.cell(cases[case][figure], 2) for figure in ("restart_s", "cpu_s")),
        ]
        for case, title in CASES.items()
    ]
    slowest = max(cases[case]["restart_s"]["max"] for case in CASES)
    met = "met" if slowest < TARGET_S else "**missed**"
    lines = [
        *tables.provenance(result)[::2], f"{result['rounds_run']} kills of each case: median (fastest–slowest).", "",
        *tables.table(["s to the first 200 of /readyz", "first start", "after a kill -9", "of that CPU"], rows), "",
        f"Wanted: a restart within {TARGET_S:g} s with 100,000 keys. The slowest took {slowest:.2f} s: {met}.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


@click.command(help=__doc__)
@click.option("--keys", "count", type=click.IntRange(1_000), default=core_http.KEYS, show_default=True)
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True, help="Kills of each case.")
@publish.json_option
@publish.dry_option
def main(count: int, rounds: int, json_path: Path | None, dry: bool) -> None:
    load_before = environment.load_average()
    with tempfile.TemporaryDirectory() as folder:
        cases = measure(Path(folder), count, rounds)
    result = {
        "environment": environment.describe(load_before),
        "command": publish.command("restart", *sys.argv[1:]),
        "rounds_run": rounds,
        "keys": count,
        "cases": cases,
    }
    if json_path is not None or not dry:
        publish.write_results("restart", result, json_path)
    click.echo(markdown(result))
    if not dry:
        publish.write_sections(PAGE, {"restart": markdown(result)})


if __name__ == "__main__":
    main()
