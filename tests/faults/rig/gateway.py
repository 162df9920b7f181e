"""`forebay serve` as a process of its own, seen from outside: ports, snapshot, metrics, memory, descriptors."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from .backend import FakeBackend
from .waiting import eventually

LISTENING = re.compile(r"listening on http://[^:]+:(\d+)")
ADMIN = re.compile(r"admin on http://[^:]+:(\d+)")
PAGE = os.sysconf("SC_PAGE_SIZE")


def config_for(
    *backends: FakeBackend | str,
    slots: int = 4,
    places: int | None = None,
    mode: str = "hybrid",
    wait_budget_ms: int | None = None,
    keys: Sequence[Mapping[str, Any]] = (),
    engine: Mapping[str, Any] | None = None,
    **sections: Mapping[str, Any],
) -> dict[str, Any]:
    """A gateway config: S = `slots` at each backend, Q = `places` in the queue, static `keys` (none: anonymous)."""
    urls = [b if isinstance(b, str) else b.url for b in backends]
    config: dict[str, Any] = {
        "server": {"drain_timeout_s": 1},
        "admission": {"mode": mode} | ({} if wait_budget_ms is None else {"wait_budget_ms": wait_budget_ms}),
        "engines": [
            {
                "name": "fb",
                "kind": "openai",
                "urls": urls,
                "concurrency": {"kind": "fixed", "limit": slots},
                "probe": {"interval_s": 0.2, "timeout_s": 0.5},
            }
            | dict(engine or {})
        ],
        "keys": {"anonymous": not keys, "static": [dict(key) for key in keys]},
    }
    if places is not None:
        config["queue"] = {"depth_limit": places}
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    return config


def key(name: str, **limits: float) -> dict[str, Any]:
    """A static key `sk-NAME` with these limits."""
    return {"id": name, "secret": f"sk-{name}", "limits": limits}


class GatewayProcess:
    """One gateway. Stopping it checks that it ends well: exit status 0 and no traceback."""

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: Path,
        *,
        ready: bool = True,
        environment: Mapping[str, str] | None = None,
        ports: tuple[int, int] = (0, 0),
    ) -> None:
        """`environment` is added to our own without its FOREBAY_ variables. With given ports (data, admin) nothing is
        waited for."""
        folder.mkdir(parents=True, exist_ok=True)
        self.config_file = folder / "forebay.toml"
        self.config_file.write_text(to_toml(config))
        self._stdout = folder / "stdout"
        self._stderr = folder / "stderr"
        self.port, self.admin_port = ports
        command = [sys.executable, "-m", "forebay", "serve", "--config", str(self.config_file)]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("FOREBAY_")}
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), "--admin-port", str(self.admin_port)],
                stdout=out,
                stderr=err,
                env=inherited | {"PYTHONUNBUFFERED": "1"} | dict(environment or {}),
            )
        if any(ports):
            return
        try:
            self.port = int(self._line(LISTENING))
            self.admin_port = int(self._line(ADMIN))
            if ready:
                eventually(self.ready, within=5, what="every engine ready")
        except BaseException:
            self.kill()
            raise

    def _line(self, pattern: re.Pattern[str]) -> str:
        def found() -> str | None:
            match = pattern.search(self.stdout)
            assert match or self.alive, f"forebay serve ended with {self.process.returncode}: {self.stderr}"
            return match.group(1) if match else None

        return eventually(found, within=40, what=f"a line like {pattern.pattern!r} on stdout") or ""

    # ---- what can be seen from outside

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def stdout(self) -> str:
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def admin(self, path: str) -> bytes:
        """The body of an admin GET that must succeed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=20)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            assert response.status == 200, f"{path}: {response.status} {body!r}"
            return body
        finally:
            connection.close()

    def snapshot(self) -> dict[str, Any]:
        snapshot = json.loads(self.admin("/api/v1/snapshot"))
        assert isinstance(snapshot, dict)
        return snapshot

    def engines(self) -> list[dict[str, Any]]:
        return [engine for pool in self.snapshot()["pools"] for engine in pool["engines"]]

    def ready(self) -> bool:
        return all(engine["readiness"] == "up" for engine in self.engines())

    def outcome(self, name: str) -> int:
        count = self.snapshot()["outcomes"][name]
        assert isinstance(count, int)
        return count

    def gauges(self) -> tuple[int, int]:
        """(in flight, queued); neither may be negative, and engines and pools must agree with the total."""
        snapshot = self.snapshot()
        in_flight, queued = snapshot["in_flight"], snapshot["queued"]
        engines = [engine["in_flight"] for pool in snapshot["pools"] for engine in pool["engines"]]
        assert min([in_flight, queued, *engines]) >= 0, snapshot
        assert sum(engines) == in_flight, snapshot
        assert sum(pool["queue_depth"] for pool in snapshot["pools"]) == queued, snapshot
        return in_flight, queued

    def settles(self, within: float = 1.0) -> None:
        """In flight and queued are exactly 0 within so many seconds."""
        eventually(lambda: self.gauges() == (0, 0), within, "in flight and queue at 0")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels; 0 when there is none."""
        families = text_string_to_metric_families(self.admin("/metrics").decode())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * PAGE

    def cpu_s(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def open_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    # ---- its end

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.alive:
            self.process.kill()
        self.process.wait()

    def stop(self, within: float = 20.0) -> None:
        """SIGTERM, and the checks on how it ended."""
        assert self.alive, f"forebay serve ended by itself with {self.process.returncode}: {self.stderr}"
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"SIGTERM did not end it within {within} s: {self.stderr}") from None
        assert self.process.returncode == 0, f"exit {self.process.returncode}: {self.stderr}"
        assert "Traceback" not in self.stderr, self.stderr


@contextmanager
def serving(config: Mapping[str, Any], folder: Path, *, ready: bool = True) -> Iterator[GatewayProcess]:
    """A gateway for several tests; at the end it must stop with status 0 and without a traceback."""
    gateway = GatewayProcess(config, folder, ready=ready)
    try:
        yield gateway
        gateway.stop()
    finally:
        gateway.kill()


StartGateway = Callable[..., GatewayProcess]
"""Called with a config, and what else a `GatewayProcess` takes but its folder."""


@contextmanager
def started(folder: Path) -> Iterator[StartGateway]:
    """Starts gateways, each in a folder of its own; at the end each must stop with status 0 and without a traceback."""
    gateways: list[GatewayProcess] = []

    def start(config: Mapping[str, Any], **how: Any) -> GatewayProcess:
        gateway = GatewayProcess(config, folder / f"gateway-{len(gateways)}", **how)
        gateways.append(gateway)
        return gateway

    try:
        yield start
        for gateway in gateways:
            gateway.stop()
    finally:
        for gateway in gateways:
            gateway.kill()


def wait_until(at: float) -> None:
    """Sleep to an instant of `time.monotonic()`: for cases that are about time passing."""
    time.sleep(max(0.0, at - time.monotonic()))  # the case is the passing of this time


def to_toml(config: Mapping[str, Any]) -> str:
    """The same settings as TOML, one line for each section."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in config.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)
