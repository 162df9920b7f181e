"""Calibrate a simulated engine behind a real port: what is found must be what it was started with."""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from forebay.cli import calibrate
from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.fitted import read_fitted
from forebay.engines.simulated.profile import StepProfile
from forebay.errors import ForebayError
from forebay.load.workload import Workload
from forebay.workload.arrival import NS_PER_S, Arrival
from tests.integration.processes import open_loop, simulated

PROFILE = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"


def test_an_engine_behind_a_port_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    flags = ("--profile", PROFILE, "--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--max-model-len", "1200")
    with simulated(tmp_path, *flags) as engine:
        options = ["--target", engine.url, "--write", str(path), "--duration", "5"]
        options += ["--max-num-batched-tokens", "256", "--longest-prompt", "300"]
        done = CliRunner().invoke(calibrate.command, options, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert f"written: {path}" in done.output
    found, true = read_fitted(path), profile_named(PROFILE)
    assert isinstance(true, StepProfile)
    # The batch is what the engine told.
    assert (found.limits.max_num_seqs, found.limits.max_num_batched_tokens) == (8, 256)
    for step in ((1, 1, 20, 0.0), (8, 8, 200, 0.0), (256, 1, 0, 32768.0)):
        assert found.profile.step_ms(*step) == pytest.approx(true.step_ms(*step), rel=0.15), step
    # And the file is an engine to simulate, here behind a port again.
    with simulated(tmp_path, "--profile", str(path)) as again:
        assert again.metric("forebay_engine_max_batch") == 8


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "say what to fit from: --target URL to probe an engine"),
        (["--target", "ftp://x"], "not an http or https URL"),
        (["--target", "http://127.0.0.1:1"], "cannot be reached"),
        (["--target", "http://127.0.0.1:1", "--duration", "1"], "--duration must lie within 5 and 3600 s"),
        (["--records", "none.jsonl"], "give --max-num-seqs"),
        (["--records", "none.jsonl", "--max-num-seqs", "8"], "none.jsonl"),
        (["--records", "x", "--max-num-seqs", "8", "--max-num-batched-tokens", "4"], "do not fit together"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, options: list[str], told: str) -> None:
    with pytest.raises(ForebayError) as caught:
        CliRunner().invoke(
            calibrate.command, [*options, "--write", str(tmp_path / "mine.json")], catch_exceptions=False
        )
    assert told in str(caught.value)


def test_an_engine_that_serves_is_watched(tmp_path: Path) -> None:
    path = tmp_path / "watched.json"
    # Busier towards the end: windows that differ are what the fit lives on.
    rng, at, arrivals = Random(1), 0.0, []
    for number in range(70):
        at += rng.expovariate(4.0 + number / 3)
        arrivals.append(Arrival(int(at * NS_PER_S), "load", rng.randint(8, 400), rng.randint(4, 80)))
    with simulated(tmp_path, "--profile", PROFILE, "--max-num-seqs", "8") as engine:
        workload = Workload(route="completions", model="llama-3.1-8b")
        load = threading.Thread(target=open_loop, args=(engine.target, workload, arrivals))
        load.start()
        options = ["--metrics", engine.url, "--write", str(path), "--duration", "5"]
        done = CliRunner().invoke(calibrate.command, options, catch_exceptions=False)
        load.join()
    assert done.exit_code == 0, done.output
    true = profile_named(PROFILE)
    assert isinstance(true, StepProfile)
    found = read_fitted(path).profile
    assert "from counters" in found.confidence
    assert found.step_ms(6, 6, 1500, 0.0) == pytest.approx(true.step_ms(6, 6, 1500, 0.0), rel=0.3)
