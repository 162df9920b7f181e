"""What a live gateway records is the load that it was sent, and it can be replayed."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from forebay.load.target import Target
from forebay.load.workload import Key, Workload
from forebay.workload.arrival import NS_PER_S
from forebay.workload.generate import stream
from forebay.workload.trace import load_trace
from tests.faults.rig.client import ask, chat
from tests.faults.rig.gateway import config_for, key, serving

from .processes import open_loop, simulated

KEYS = (Key("heavy", "sk-heavy", 3.0), Key("light", "sk-light"))


def test_a_record_is_the_load_that_was_sent(tmp_path: Path) -> None:
    path = tmp_path / "record.csv"
    arrivals = list(stream(rate=60, duration_s=2, prompt_tokens="20-200", output_tokens="2-30", seed=4))
    with simulated(tmp_path, "--time-scale", "20", "--model-name", "m") as engine:
        keys = [key("heavy"), key("light"), key("poor", requests_per_minute=1)]
        config = config_for(engine.url, slots=64, keys=keys, telemetry={"record_path": str(path)})
        with serving(config, tmp_path / "gateway") as gateway:
            calls = open_loop(Target.parse(gateway.url), Workload(model="m", keys=KEYS), arrivals)
            statuses = [ask(gateway.port, chat(max_tokens=9), key="sk-poor").status for _ in range(3)]
            assert json.loads(gateway.admin("/api/v1/status"))["degraded"] == []
    assert all(call.complete for call in calls)
    assert statuses == [200, 429, 429]

    recorded = load_trace(path)
    sent, poor = recorded[: len(arrivals)], recorded[len(arrivals) :]
    assert [arrival.key for arrival in poor] == ["poor"] * 3
    # Ends are written in any order, and requests at nearly one time may overtake each other on their connections.
    assert Counter((a.prompt_tokens, a.output_tokens, a.key) for a in sent) == Counter(
        (call.prompt_tokens, call.output_tokens, call.shot.key) for call in calls
    )
    assert Counter(a.output_tokens for a in sent) == Counter(a.output_tokens for a in arrivals)
    late = sorted(abs(was.at_ns - (asked.at_ns - arrivals[0].at_ns)) for was, asked in zip(sent, arrivals, strict=True))
    assert late[len(late) // 2] < 0.1 * NS_PER_S
    assert late[-1] < NS_PER_S, "a machine that is busy for a moment sends late"

    text = path.read_text()
    assert "sk-" not in text
    with path.open() as file:
        rows = list(csv.DictReader(file))
    ends = Counter((row["outcome"], row["reason"], row["sizes"]) for row in rows)
    assert ends == {
        ("completed", "", "measured"): len(arrivals) + 1,
        ("shed", "key_requests", "estimated"): 1,
        ("shed", "key_requests", "unread"): 1,  # a key that is being refused is refused before its body is looked at
    }
    assert all(float(row["latency_ms"]) >= float(row["ttft_ms"]) > 0 for row in rows if row["key_id"] != "poor")


def test_a_record_that_cannot_be_kept_is_told_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("remember the milk\n")
    config = tmp_path / "forebay.toml"
    config.write_text(f'[telemetry]\nrecord_path = "{path}"\n[[engines]]\nname = "e"\nurls = ["http://127.0.0.1:9"]\n')
    command = [sys.executable, "-m", "forebay", "serve", "--config", str(config), "--port", "0", "--admin-port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert "holds something else" in ended.stderr
    assert "Traceback" not in ended.stderr
