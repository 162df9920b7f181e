"""Every example is run as it stands, and every naive version shows its fault."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.naive.pausing_queue import PausingQueue
from examples.naive.sleeping_tuner import SleepingTuner
from examples.naive.token_budget import TokenBudget
from examples.naive.two_step_gate import TwoStepGate
from tests.faults.rig.client import ask, chat
from tests.faults.rig.gateway import config_for, key, serving

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
QUESTION = "What is a forebay?"


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """A simulated engine, two hundred times faster than the GPU."""
    command = [sys.executable, "-m", "forebay", "engine", "simulated", "--port", "0", "--time-scale", "200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("listening on ").strip()
    finally:
        process.terminate()
        process.wait(timeout=5)
        if process.stdout is not None:
            process.stdout.close()


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT, env=os.environ | (environment or {}), capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def gateway(engine: str, tmp_path: Path, **settings: Any) -> Any:
    return serving(config_for(engine, **settings), tmp_path)


def test_the_official_client_gets_an_answer_and_a_stream(engine: str, tmp_path: Path) -> None:
    with gateway(engine, tmp_path) as front:
        done = run("examples/openai_client.py", front.url)
    assert done.returncode == 0, done.stderr
    answer, stream = done.stdout.splitlines()
    assert answer.startswith("llama-3.1-8b: ")
    assert len(stream.split()) > 10


def test_the_official_client_shows_a_refusal(engine: str, tmp_path: Path) -> None:
    with gateway(engine, tmp_path, keys=[key("nothing", requests_per_minute=0)]) as front:
        done = run("examples/openai_client.py", front.url, "sk-nothing")
    assert done.returncode == 1
    assert "refused with 429 (key_requests)" in done.stderr
    assert "0 requests/min" in done.stderr


def test_the_retrying_client_comes_back_when_it_was_told_to(engine: str, tmp_path: Path) -> None:
    """The key's minute is spent; the next request fits three seconds later."""
    limits = {"default": {"requests_per_minute": 20}}
    with gateway(engine, tmp_path, limits=limits) as front:
        while ask(front.port, chat(max_tokens=1) | {"model": "llama-3.1-8b"}).status == 200:
            pass
        began = time.monotonic()
        done = run("examples/retrying_client.py", front.url, QUESTION, "20")
        took_s = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    waited = re.search(r"refused \(key_requests\), back in ([\d.]+) s", done.stderr)
    assert waited, done.stderr
    assert took_s >= float(waited[1]) - 0.1  # it was printed rounded


def test_the_retrying_client_gives_up_when_it_would_be_too_late(engine: str, tmp_path: Path) -> None:
    with gateway(engine, tmp_path, limits={"default": {"requests_per_minute": 2}}) as front:
        while ask(front.port, chat(max_tokens=1) | {"model": "llama-3.1-8b"}).status == 200:
            pass
        began = time.monotonic()
        done = run("examples/retrying_client.py", front.url, QUESTION, "10")
        took_s = time.monotonic() - began
    assert done.returncode == 1
    assert "too late" in done.stderr
    assert took_s < 10


def test_the_example_configuration_is_valid() -> None:
    secrets = {"SEARCH_KEY": "sk-search", "BATCH_KEY": "sk-batch"}
    done = run("-m", "forebay", "config", "check", "examples/team-keys.toml", environment=secrets)
    assert done.returncode == 0, done.stderr
    assert "2 instance(s), 96 in flight at most" in done.stdout
    assert not done.stderr


def test_every_example_is_listed_and_tested() -> None:
    for folder in (EXAMPLES, EXAMPLES / "naive"):
        page, tests = (folder / "README.md").read_text(), Path(__file__).read_text()
        for path in folder.iterdir():
            if path.suffix in {".py", ".toml"}:
                assert path.name in page, f"{path.name} is not in {folder.name}/README.md"
                assert path.stem in tests, f"{path.name} is not run here"


# ---- the naive versions: each fault, shown ---------------------------------------------------------------------


def test_a_budget_that_never_refills_refuses_for_ever() -> None:
    budget = TokenBudget(tokens_per_second=1000)
    statuses = [budget.admit("x" * 400) for _ in range(1000)]
    assert statuses.count(200) == 4  # the first second's worth, and nothing after it
    assert statuses[-900:] == [429] * 900


def test_a_pause_is_no_bound() -> None:
    queue = PausingQueue(depth_limit=20, pause_s=0)

    async def flood() -> None:
        await asyncio.gather(*(queue.push(number) for number in range(500)))

    asyncio.run(flood())
    assert len(queue.waiting) == 500
    assert queue.take(8) == list(range(8))


def test_a_check_apart_from_the_push_lets_everybody_in() -> None:
    async def flood(gate: TwoStepGate) -> list[int]:
        return await asyncio.gather(*(gate.handle("prompt") for _ in range(100)))

    gate = TwoStepGate(TokenBudget(10**9), depth_limit=20)
    assert asyncio.run(flood(gate)).count(200) == 100
    assert len(gate.waiting) == 100
    # And what the queue then refuses has been paid for all the same.
    left = gate.budget.left
    assert asyncio.run(flood(gate)) == [503] * 100
    assert gate.budget.left == left - 100 * (128 + 1)


def test_a_sleeping_tuner_stops_the_loop() -> None:
    beats: list[float] = []

    async def beside() -> None:
        tuning = asyncio.ensure_future(SleepingTuner(lambda: 0.5, lambda: 100.0, interval_s=0.05).run(steps=2))
        while not tuning.done():
            beats.append(time.monotonic())
            await asyncio.sleep(0.001)

    began = time.monotonic()
    asyncio.run(beside())
    assert time.monotonic() - began >= 0.1
    assert len(beats) < 10  # a hundred beats fit into that time


def test_a_tuner_by_utilization_is_blind_where_it_matters() -> None:
    idle = SleepingTuner(lambda: 0.61, lambda: 842.0)
    for _ in range(20):
        idle.step()
    assert idle.depth == 4  # an engine that starves gets an even shorter queue
    between = SleepingTuner(lambda: 0.99, lambda: 300.0)
    for _ in range(20):
        between.step()
    assert between.depth == 16  # neither low nor high: it stays, whatever that costs
