"""`forebay plan` as a user runs it: files written, mistakes told, interrupted and resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from forebay.cli import main

FOREBAY = [sys.executable, "-c", "from forebay.cli import main; main()"]
TRAFFIC = ["--rate", "2", "--prompt-tokens", "300-900", "--output-tokens", "~40/1", "--window-min", "0.2"]
ASKED = [*TRAFFIC, "--model", "llama-3.1-8b", "--gpu", "l4", "--gpu", "l40s", "--ttft-ms", "1500", "--tpot-ms", "150"]


def plan(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [*FOREBAY, "plan", "--processes", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


def test_a_plan_is_shown_written_and_its_configuration_passes_the_check(tmp_path: Path) -> None:
    html, toml, out = tmp_path / "p.html", tmp_path / "deep" / "forebay.toml", tmp_path / "p.json"
    wanted = ["--json", str(out), "--html", str(html), "--write-config", str(toml), "--state", str(tmp_path / "s")]
    done = plan(*ASKED, "--price", "l4=0.50", *wanted)
    assert "serves llama-3.1-8b (bf16) under 2 requests/s (poisson)" in " ".join(done.stdout.split())
    assert "Prices as of" in done.stdout
    assert f"written: {toml}" in done.stdout
    found = json.loads(out.read_text())
    assert found["answer"]["cost"]["per_month"] == pytest.approx(730 * found["answer"]["cost"]["per_hour"])
    assert found["config"] == toml.read_text()
    tags = _Tags()
    tags.feed(html.read_text())
    assert {"table", "script", "pre"} <= set(tags.tags)
    check = subprocess.run([*FOREBAY, "config", "check", str(toml)], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr


def test_the_json_may_go_to_stdout_alone(tmp_path: Path) -> None:
    done = plan(*ASKED, "--no-compare", "--no-vary", "--json", "-", "--fresh")
    assert json.loads(done.stdout)["objective"]["ttft_ms"] == 1500


def test_a_plan_that_was_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    """Ctrl-C in the middle: status 130, and no traceback; the same command gives the same answer and runs less."""
    state = tmp_path / "state"
    arguments = [*ASKED, "--state", str(state), "--json", "-"]
    command = [*FOREBAY, "plan", "--processes", "1", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        until = time.monotonic() + 40
        while len(list(state.glob("*/*.json"))) < 5 and time.monotonic() < until:
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=20)
    assert child.returncode == 130, err
    assert "Traceback" not in err
    assert f"they are kept in {state}" in err
    kept = len(list(state.glob("*/*.json")))
    assert kept >= 5
    resumed = json.loads(plan(*arguments).stdout)
    whole = json.loads(plan(*ASKED, "--fresh", "--json", "-").stdout)
    assert resumed["simulations_reused"] == kept
    assert whole["simulations_reused"] == 0
    assert resumed["simulations"] == whole["simulations"] > kept
    for part in ("answer", "candidates", "comparisons", "sensitivity", "traffic_curves", "check", "config"):
        assert resumed[part] == whole[part], part


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*TRAFFIC, "--model", "llama-3.1-8b", "--ttft-ms", "20"], "The nearest objective that a fleet of any size"),
        ([*TRAFFIC, "--model", "lamma", "--ttft-ms", "900"], "did you mean"),
        ([*TRAFFIC, "--model", "llama-3.1-8b"], "there is no objective"),
        ([*ASKED, "--trace", "azure_llm_2023_conv"], "either as --trace or as --rate"),
        (["--trace", "azure_conv", "--model", "llama-3.1-8b", "--ttft-ms", "900"], "azure_llm_2023_conv"),
        ([*ASKED, "--price", "l4"], "--price l4: use GPU=USD"),
        ([*ASKED, "--prices", "/nowhere.csv"], "/nowhere.csv: cannot be read as prices"),
        ([*ASKED, "--max-gpus", "0"], "--max-gpus 0"),
        ([*ASKED, "--rate", "90000", "--window-min", "60"], "shorten --window-min"),
        ([*TRAFFIC, "--model", "bert-base/seq128", "--tpot-ms", "5"], "answers at once"),
        ([*ASKED, "--window-min", "nan"], "--window-min nan"),
        ([*ASKED, "--fresh", "--state", "x"], "give one of the two"),
        ([*ASKED, "--html", "/proc/x/p.html"], "/proc/x/p.html: cannot be written"),
    ],
)
def test_a_mistake_is_one_line_and_status_two(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["forebay", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert says in err
    assert out == ""
    assert len(err.strip().splitlines()) == 1


def test_a_broken_trace_is_named_with_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("timestamp,prompt_tokens,output_tokens\n0,100,10\n1,many,10\n", encoding="utf-8")
    done = plan("--trace", str(trace), "--model", "llama-3.1-8b", "--ttft-ms", "900", status=2)
    assert "mine.csv" in done.stderr
    assert "line 3" in done.stderr
