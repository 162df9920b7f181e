"""Where and from what a benchmark ran: machine, kernel, commit, time."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.peers import ROOT


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def load_average() -> float:
    """Programs that wanted a core over the last minute: taken *before* a benchmark adds its own."""
    return round(os.getloadavg()[0], 2)


def describe(load_before: float) -> dict[str, object]:
    """The environment as results files hold it. ``load_before`` is the load average when the benchmark began."""
    return {
        "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _git("rev-parse", "--short=12", "HEAD") or "unknown",
        "dirty": bool(_git("status", "--porcelain", "--", "src", "benchmarks/*.py", "pyproject.toml")),
        "machine": _cpu_model(),
        "cpus": os.cpu_count(),
        "load_before": load_before,
        "system": f"Linux {platform.release()}",
        "python": platform.python_version(),
    }
