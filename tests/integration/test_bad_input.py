"""What a person gets wrong: one clear line, the right exit status, nothing lost, never a traceback or a 500."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from forebay.engines.embedded.weights import cache_path
from tests.faults.rig.client import RawClient, ask, chat
from tests.faults.rig.gateway import GatewayProcess, config_for, serving
from tests.faults.rig.waiting import eventually

from .processes import FOREBAY, SimulatedEngine, environment, simulated

ENGINE = ("--time-scale", "20", "--model-name", "m")

WITHOUT_NUMPY = """
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == "numpy" else self._finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def run(*arguments: str, within: float = 20, **variables: str) -> subprocess.CompletedProcess[str]:
    """`forebay …` to its end."""
    return subprocess.run(
        [*FOREBAY, *arguments],
        capture_output=True,
        text=True,
        timeout=within,
        env=environment(**variables),
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str], status: int, *words: str) -> str:
    """It ended with this status, and said these words without a traceback; returns what it said."""
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr, done.stderr
    return done.stderr


def serve(folder: Path, config: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = folder / "forebay.toml"
    path.write_text(config)
    return run("serve", "--config", str(path), "--port", "0", "--admin-port", "0", within=20, **variables)


# ---- the configuration -------------------------------------------------------------------------------------------


def test_every_mistake_is_told_at_once_with_its_line_and_a_suggestion(tmp_path: Path) -> None:
    config = """
[server]
prot = 8080

[admission]
mode = "hybird"
wait_budget_ms = -5
"""
    said = refused(serve(tmp_path, config), 2)
    lines = said.splitlines()
    assert len(lines) == 3
    place = tmp_path / "forebay.toml"
    by_line = {line.removeprefix("forebay: ").split(":")[1]: line for line in lines}
    assert set(by_line) == {"3", "6", "7"}
    assert all(str(place) in line for line in lines)
    assert "prot" in by_line["3"]
    assert "port" in by_line["3"].partition("prot")[2], "it suggests what was meant"
    assert "hybrid" in by_line["6"]
    assert "wait_budget_ms" in by_line["7"]


def test_an_engine_url_without_a_scheme_is_shown_with_its_line(tmp_path: Path) -> None:
    config = '[[engines]]\nname = "llama"\nurls = ["127.0.0.1:8000"]\n'
    refused(serve(tmp_path, config), 2, "forebay.toml:3", "127.0.0.1:8000", "http://")


def test_bad_toml_names_line_and_column(tmp_path: Path) -> None:
    said = refused(serve(tmp_path, "[server]\nport = = 8080\n"), 2, "forebay.toml:2", "TOML", "column")
    assert said.count("\n") == 1


@pytest.mark.parametrize("content", [b"\xff\xfe\x00[", b"[" * 100_000], ids=["not text", "nested"])
def test_what_is_no_config_at_all(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.toml").write_bytes(content)
    refused(run("serve", "--config", str(tmp_path / "x.toml")), 2, "x.toml")


def test_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    refused(run("serve", "--config", str(tmp_path / "absent.toml")), 2, "absent.toml", "cannot be read")
    assert "Traceback" not in run("serve", "--config", str(tmp_path)).stderr
    assert run("serve", "--config", str(tmp_path)).returncode == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_config_without_the_right_to_read_it(tmp_path: Path) -> None:
    path = tmp_path / "locked.toml"
    path.write_text("")
    path.chmod(0)
    refused(run("serve", "--config", str(path)), 2, "locked.toml", "ermission")


def test_a_secret_that_is_not_there_is_named_not_shown(tmp_path: Path) -> None:
    config = '[[keys.static]]\nid = "a"\nsecret = "env:NO_SUCH_KEY"\n'
    refused(serve(tmp_path, config), 2, "forebay.toml:3", "NO_SUCH_KEY")


def test_variables_are_checked_like_the_file(tmp_path: Path) -> None:
    refused(serve(tmp_path, "", FOREBAY_SERVER__KEEP_ALIVE_S="soon"), 2, "FOREBAY_SERVER__KEEP_ALIVE_S")


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    refused(serve(tmp_path, '[tls]\ncertificate = "none.pem"\nkey = "none.key"\n'), 2, "none.pem")


# ---- the command line and the ports ------------------------------------------------------------------------------


def test_an_unknown_flag_is_answered_with_the_one_that_was_meant() -> None:
    refused(run("serve", "--upstreem", "http://127.0.0.1:1"), 2, "--upstreem", "--upstream")


@pytest.mark.parametrize("url", ["ftp://x", "not a url", "http://", "http://127.0.0.1:99999"])
def test_a_bad_upstream_url(url: str) -> None:
    said = refused(run("serve", "--upstream", url), 2, "--upstream")
    assert said.count("\n") == 1


def test_an_admin_port_open_to_others_needs_a_token(tmp_path: Path) -> None:
    refused(serve(tmp_path, '[admin]\nhost = "0.0.0.0"\n'), 2, "token", "0.0.0.0")


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_port_in_use_is_named_with_the_flag_that_changes_it(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        other = "--admin-port" if flag == "--port" else "--port"
        done = run("serve", "--upstream", "http://127.0.0.1:1", flag, port, other, "0")
    assert done.returncode in {1, 2}
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "in use" in line]
    assert port in line
    assert flag in line


def test_without_numpy_the_embedded_engine_says_what_to_install(tmp_path: Path) -> None:
    """As in the bare install: no finder finds it."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_NUMPY)
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"GGUF")
    done = run("engine", "embedded", "--port", "0", "--model", str(weights), PYTHONPATH=str(tmp_path))
    said = refused(done, 1, "NumPy", "forebay[embedded]")
    assert said.count("\n") == 1


# ---- engines that are not there ----------------------------------------------------------------------------------


def test_an_upstream_that_is_down_at_the_start_is_said_so_and_recovers_by_itself(tmp_path: Path) -> None:
    with simulated(tmp_path, *ENGINE) as engine:
        engine.stop()
        with serving(config_for(engine.url), tmp_path / "gateway", ready=False) as gateway:
            assert ask(gateway.port, path="/readyz", method="GET").status == 503
            assert ask(gateway.port, path="/healthz", method="GET").status == 200
            answer = ask(gateway.port, chat(max_tokens=3))
            assert (answer.status, answer.reason, answer.error["code"]) == (503, "no_engine", "no_engine")
            assert 1 <= answer.retry_after <= 55
            assert answer.header("x-should-retry") == "true"
            assert ask(gateway.port, path="/v1/models", method="GET").status == 503
            engine.start()
            eventually(lambda: ask(gateway.port, path="/readyz", method="GET").status == 200, within=3)
            assert ask(gateway.port, chat(max_tokens=3)).status == 200
            assert gateway.snapshot()["outcomes"]["shed"] == 1


def test_in_backpressure_mode_what_comes_before_the_engine_is_held_for_it(tmp_path: Path) -> None:
    with simulated(tmp_path, *ENGINE) as engine:
        engine.stop()
        config = config_for(engine.url, mode="backpressure")
        with serving(config, tmp_path / "gateway", ready=False) as gateway, RawClient(gateway.port) as client:
            client.request(chat(max_tokens=3))
            eventually(lambda: gateway.gauges() == (0, 1), what="it waits")
            engine.start()
            assert client.read_answer().status == 200


def test_warming_is_told_apart_from_away(tmp_path: Path) -> None:
    with (
        simulated(tmp_path, *ENGINE, "--cold-start-s", "1.5") as engine,
        serving(config_for(engine.url), tmp_path / "gateway", ready=False) as gateway,
    ):
        answer = ask(gateway.port, chat(max_tokens=3))
        assert (answer.status, answer.reason) == (503, "warming")
        eventually(lambda: ask(gateway.port, chat(max_tokens=3)).status == 200, within=4)


# ---- requests ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedEngine]:
    with simulated(tmp_path_factory.mktemp("engine"), *ENGINE) as started:
        yield started


@pytest.fixture(scope="module")
def gateway(engine: SimulatedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with serving(config_for(engine.url, slots=64), tmp_path_factory.mktemp("gateway")) as started:
        yield started


MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"hello",
    "cut": b'{"model":"m","messages":[{"role":"user"',
    "an array": b"[1,2,3]",
    "a number": b"1e999999",
    "null": b"null",
    "not UTF-8": b'{"model":"\xff\xfe","messages":[]}',
    "a surrogate": b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
    "deep": b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "wrong types": b'{"model":5,"messages":"x","max_tokens":"many","stream":"yes"}',
    "negative tokens": b'{"model":"m","messages":[],"max_tokens":-1}',
    "huge tokens": b'{"model":"m","messages":[],"max_tokens":1' + b"0" * 400 + b"}",
    "huge n": b'{"model":"m","messages":[],"n":99999999999999999999}',
    "twice": b'{"model":"m","model":"n","messages":[],"messages":[]}',
    "trailing": b'{"model":"m","messages":[]} {"model":"m"}',
    "NaN": b'{"model":"m","messages":[],"temperature":NaN}',
    "byte order mark": b'\xef\xbb\xbf{"model":"m","messages":[]}',
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages"])
def test_a_malformed_body_is_the_callers_error(gateway: GatewayProcess, path: str, name: str) -> None:
    answer = ask(gateway.port, MALFORMED[name], path=path, headers=[("content-type", "application/json")])
    # The engine may know better than the gateway: its own 4xx and answers are passed on.
    assert answer.status in {200, 400, 404, 411, 413, 422}, answer.body
    if answer.status != 200:
        assert answer.json()["error"]["message"]


def test_hostile_bytes_are_never_a_500_and_leave_nothing_behind(gateway: GatewayProcess) -> None:
    """Valid requests with bytes changed, taken out or put in, at random but always the same."""
    chance = Random(5)
    body = json.dumps(chat(stream=True, max_tokens=4)).encode()
    whole = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
    )
    statuses = set()
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            data[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(4))
        with RawClient(gateway.port) as client:
            client.send(bytes(data))
            client.sock.settimeout(0.05)
            try:
                first = client.sock.recv(4096)
            except (TimeoutError, ConnectionResetError):
                continue  # it waits for the rest of a head or body that never comes
            if first:
                assert first.startswith(b"HTTP/1."), first
                statuses.add(int(first.split(b" ", 2)[1]))
    assert statuses - {200, 400, 404, 405, 408, 411, 413, 414, 415, 417, 422, 431, 501, 505} == set()
    assert {200, 400} <= statuses
    gateway.settles()
    assert ask(gateway.port, chat(max_tokens=3)).status == 200


# ---- nothing given at all ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not cache_path().exists(), reason="the weights are not in the cache; forebay demo fetches them")
def test_serve_alone_serves_the_embedded_model(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("wb") as sink:
        process = subprocess.Popen(
            [*FOREBAY, "serve", "--port", "0", "--admin-port", "0"], stdout=sink, stderr=sys.stderr, env=environment()
        )
    try:
        line = eventually(
            lambda: next((x for x in out.read_text().splitlines() if x.startswith("listening on")), None),
            within=30,
            what="a gateway with its own engine",
        )
        assert line is not None
        port = int(line.rpartition(":")[2])
        eventually(lambda: ask(port, path="/readyz", method="GET").status == 200, within=30, what="a loaded model")
        (model,) = ask(port, path="/v1/models", method="GET").json()["data"]
        question = [{"role": "user", "content": "What is the capital of France?"}]
        body = chat(model=model["id"], messages=question, max_tokens=12, temperature=0)
        answer = ask(port, body, within=30)
        assert answer.status == 200
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
        process.terminate()
        assert process.wait(15) == 0
        assert not Path(f"/proc/{children[0]}").exists(), "its engine ends with it"
    finally:
        process.kill()
        process.wait()
