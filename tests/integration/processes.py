"""Engines as processes of their own, and load on whatever listens. Gateways are those of the fault rig."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvloop

from forebay.load.client import Call, Client
from forebay.load.target import Target
from forebay.load.workload import Magazine, Workload
from forebay.workload.arrival import Arrival
from forebay.workload.retry import NoRetry
from tests.faults.rig.waiting import eventually

FOREBAY = [sys.executable, "-m", "forebay"]
LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")


def environment(**more: str) -> dict[str, str]:
    """Ours, without settings of the gateway."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    return kept | {"PYTHONUNBUFFERED": "1"} | more


class SimulatedEngine:
    """`forebay engine simulated` on a port of its own, the same one after a restart."""

    def __init__(self, folder: Path, *flags: str, port: int = 0) -> None:
        self._stdout, self._flags, self.port = folder / "engine.out", flags, port
        self.start()

    def start(self) -> None:
        command = [*FOREBAY, "engine", "simulated", "--port", str(self.port), *self._flags]
        with self._stdout.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment())
        try:
            self.port = int(eventually(self._announced, within=20, what="an engine that listens") or 0)
        except BaseException:
            self.kill()
            raise

    def _announced(self) -> str | None:
        text = self._stdout.read_text(errors="replace")
        assert self.process.poll() is None, f"the engine ended: {text}"
        found = LISTENING.search(text)
        return found.group(1) if found else None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def target(self) -> Target:
        return Target.parse(self.url)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        return sum(map(float, found))

    def faults(self, **settings: object) -> None:
        """Healthy but for these faults."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        for method, body in (("DELETE", None), ("POST", json.dumps(settings))):
            connection.request(method, "/faults", body)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            response.read()
        connection.close()

    def kill(self) -> None:
        """As a crash: SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()


@contextmanager
def simulated(folder: Path, *flags: str) -> Iterator[SimulatedEngine]:
    """An engine for as long as the block lasts."""
    engine = SimulatedEngine(folder, *flags)
    try:
        yield engine
    finally:
        engine.stop()


# ---- load --------------------------------------------------------------------------------------------------------


def open_loop(
    target: Target,
    workload: Workload,
    arrivals: Sequence[Arrival],
    *,
    leave_after_s: Callable[[int], float | None] = lambda index: None,
    watch: Callable[[], object] | None = None,
    watch_every_s: float = 0.25,
    seed: int = 1,
) -> list[Call]:
    """Send every arrival at its time, without retries, and return the calls, finished, in the order of arrival.

    `leave_after_s` says after how long the client of a request closes its connection; `watch` is called on a thread
    every so often while it runs.
    """
    return uvloop.run(_open_loop(target, workload, arrivals, leave_after_s, watch, watch_every_s, seed))


async def _open_loop(
    target: Target,
    workload: Workload,
    arrivals: Sequence[Arrival],
    leave_after_s: Callable[[int], float | None],
    watch: Callable[[], object] | None,
    watch_every_s: float,
    seed: int,
) -> list[Call]:
    loop = asyncio.get_running_loop()
    magazine = Magazine(workload, target.authority, target.prefix, seed)
    finished: list[Call] = []
    over = asyncio.Event()

    def done(call: Call) -> None:
        finished.append(call)
        if len(finished) == len(arrivals):
            over.set()

    client = Client(target, NoRetry(), done, seed=seed)
    watching = loop.create_task(_watch(watch, watch_every_s)) if watch is not None else None
    began_ns = time.monotonic_ns()
    try:
        for index, arrival in enumerate(arrivals):
            await asyncio.sleep((began_ns + arrival.at_ns - time.monotonic_ns()) / 1e9)
            call = Call(index, arrival, magazine.shot(arrival), began_ns + arrival.at_ns)
            client.send(call)
            if (patience_s := leave_after_s(index)) is not None:
                loop.call_later(patience_s, client.leave, call)
        await over.wait()
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await client.close()
    return sorted(finished, key=lambda call: call.index)


async def _watch(watch: Callable[[], object], every_s: float) -> None:
    while True:
        await asyncio.to_thread(watch)
        await asyncio.sleep(every_s)
