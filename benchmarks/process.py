"""Child processes of a benchmark: start, wait until they serve, read their CPU time and memory, stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK")


class StartError(Exception):
    """A process did not come up; the message carries the end of what it printed."""


def free_port() -> int:
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name sits in parentheses and may itself hold spaces and parentheses.
    return text[text.rindex(")") + 2 :].split()


def tree(root: int) -> list[int]:
    """``root`` and every living descendant of it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))) is not None:
            parents[int(entry.name)] = int(fields[1])
    members = [root]
    for member in members:
        members += [pid for pid, parent in parents.items() if parent == member]
    return members


@dataclass(slots=True)
class Process:
    """One started process (and its children), in a session of its own so that all of it can be stopped."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, name: str, command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> Process:
        """Start ``command`` with its output in ``folder``."""
        log = folder / f"{name}.log"
        with log.open("wb") as sink:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=folder,
                start_new_session=True,
            )
        return cls(name, popen, log)

    def wait_until(self, serves: Callable[[], bool], timeout_s: float, *, every_s: float = 0.05) -> None:
        """Poll ``serves`` until it is true.

        Raises:
            StartError: the process ended, or the time is up.
        """
        deadline = time.monotonic() + timeout_s
        while not serves():
            status = self.popen.poll()
            if status is not None:
                raise StartError(f"{self.name} ended with status {status} while starting:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise StartError(f"{self.name} did not serve within {timeout_s:g} s; it printed:\n{self.tail()}")
            time.sleep(every_s)

    def tail(self, lines: int = 15) -> str:
        """The last lines that the process printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def cpu_us(self) -> int:
        """User and system time of the whole tree so far in µs, children that have ended included."""
        ticks = 0
        for pid in tree(self.popen.pid):
            if (fields := _stat_fields(pid)) is not None:
                ticks += sum(int(value) for value in fields[11:15])  # utime, stime, cutime, cstime
        return ticks * _TICK_US

    def rss_bytes(self) -> int:
        """Resident memory of the whole tree in bytes."""
        # The figure in /proc/PID/stat is kept per CPU and may lag by hundreds of pages; this one is counted.
        kib = 0
        for pid in tree(self.popen.pid):
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            kib += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Rss:"))
        return kib * 1024

    def kill(self) -> None:
        """End the process and its children as a crash does."""
        self._signal(signal.SIGKILL)
        self.popen.wait()

    def stop(self) -> None:
        """End the process and its children: asked first, then killed."""
        if self.popen.poll() is None:
            self._signal(signal.SIGTERM)
            try:
                self.popen.wait(timeout=3)
            except subprocess.TimeoutExpired:
                pass
        self._signal(signal.SIGKILL)  # children that outlived their parent are still in its session
        self.popen.wait()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.popen.pid, number)
        except ProcessLookupError:
            pass
