"""The comparison with real proxies runs, and every one of them carries the same load without losing an answer.

Figures are printed, not asserted: they are the machine's, and `make bench NAME=proxy` is where they are taken.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.peers

ROOT = Path(__file__).resolve().parents[2]
PROXIES = ("forebay", "envoy-filters", "vllm-router", "sglang-router")


def test_every_proxy_carries_the_load(tmp_path: Path) -> None:
    results = tmp_path / "proxy.json"
    command = [sys.executable, "-m", "benchmarks.proxy", "--quick", "--rounds", "1"]
    command += ["--only", ",".join(PROXIES), "--json", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(results.read_text())
    assert found["failures"] == []
    for name in PROXIES:
        summary = found["summary"][name]
        assert summary["requests_per_s"]["median"] > 100, name
        assert summary["request_cpu_us"]["median"] > 1, name
        assert summary["chunk_cpu_us"]["median"] > 1, name
    assert found["summary"]["forebay"]["refusal_cpu_us"]["median"] > 1
    assert found["memory"]["forebay"]["queued_request_bytes"] > 0
