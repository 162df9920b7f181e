"""L. Start, health, drain, reload, third part: a configuration that is read anew while the gateway works."""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from .rig import scripts
from .rig.backend import FakeBackend
from .rig.client import RawClient, ask, chat, wire
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, to_toml
from .rig.waiting import eventually

LONG_WORD = "internationalization" * 20
"""Dear by its bytes, and few tokens to a tokenizer that knows it."""
NAMES = [f"k{number}" for number in range(1_000)]


class Reloadable:
    """A gateway, its file, and the two ways to have it read anew."""

    def __init__(self, gateway: GatewayProcess, backend: FakeBackend) -> None:
        self.gateway, self.backend = gateway, backend

    def write(self, text: str) -> None:
        self.gateway.config_file.write_text(text)

    def hang_up(self, says: str) -> None:
        before = self.gateway.stderr.count(says)
        self.gateway.process.send_signal(signal.SIGHUP)
        eventually(lambda: self.gateway.stderr.count(says) > before, within=5, what=f"{says!r} in the log")

    def post(self) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway.admin_port, timeout=5)
        connection.request("POST", "/api/v1/config/reload")
        answer = connection.getresponse()
        body = json.loads(answer.read())
        connection.close()
        return answer.status, body


@pytest.fixture
def reloadable(backend: FakeBackend, start_gateway: StartGateway) -> Reloadable:
    return Reloadable(start_gateway(settings(backend)), backend)


def settings(backend: FakeBackend, *, requests: int = 3, slots: int = 1, **more: Any) -> dict[str, Any]:
    keys = [key("a", requests_per_minute=requests)]
    return config_for(backend, slots=slots, places=5, mode="backpressure", keys=keys, **more)


@pytest.mark.parametrize("way", ["SIGHUP", "POST"])
def test_l06_a_reload_is_taken_whole_and_loses_nothing(reloadable: Reloadable, way: str) -> None:
    """L-06: no queued request is lost, no bucket refilled, no stream closed."""
    gateway, backend = reloadable.gateway, reloadable.backend
    backend.script = scripts.silent
    with RawClient(gateway.port) as running, RawClient(gateway.port) as waiting:
        running.send(wire(chat(), key="sk-a"))
        eventually(lambda: gateway.gauges() == (1, 0))
        waiting.send(wire(chat(), key="sk-a"))
        eventually(lambda: gateway.gauges() == (1, 1))
        reloadable.write(to_toml(settings(backend, requests=4, slots=2)))
        if way == "SIGHUP":
            reloadable.hang_up("was reloaded")
        else:
            assert reloadable.post() == (200, {"reloaded": True, "warnings": []})
        eventually(lambda: gateway.gauges() == (2, 0), what="the waiting request in the second place")
        with RawClient(gateway.port) as third:
            third.send(wire(chat(), key="sk-a"))  # the third of four: it waits
            eventually(lambda: gateway.gauges() == (2, 1))
            with RawClient(gateway.port) as fourth:
                fourth.send(wire(chat(), key="sk-a"))
                eventually(lambda: gateway.gauges() == (2, 2))
                assert ask(gateway.port, key="sk-a").reason == "key_requests", "spent before the reload is spent"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("depth_limit", "did you mean"),
        ("port", "[server] drain_timeout_s: cannot change while the gateway runs"),
        ("syntax", "forebay.toml:1"),
    ],
)
def test_l06_a_bad_file_changes_nothing_and_says_why(reloadable: Reloadable, change: str, says: str) -> None:
    """L-06: neither the old settings nor the process are harmed."""
    text = to_toml(settings(reloadable.backend, requests=100))
    broken = {
        "depth_limit": text.replace("requests_per_minute", "request_per_minute"),
        "port": text.replace('"drain_timeout_s" = 1', '"drain_timeout_s" = 9'),
        "syntax": "= nonsense\n" + text,
    }[change]
    assert broken != text
    reloadable.write(broken)
    reloadable.hang_up(says)
    status, body = reloadable.post()
    assert status == 409
    assert says in body["error"]["message"]
    assert "nothing has changed" in body["error"]["message"]
    statuses = [ask(reloadable.gateway.port, key="sk-a").status for _ in range(4)]
    assert statuses == [200, 200, 200, 429], "the limit of before"


def test_l06_another_key_and_another_secret(reloadable: Reloadable) -> None:
    """L-06: a secret that was taken back is refused, on a connection that used it before too."""
    gateway = reloadable.gateway
    with RawClient(gateway.port) as kept:
        kept.send(wire(chat(), key="sk-a"))
        assert kept.read_answer().status == 200
        changed = to_toml(settings(reloadable.backend)).replace("sk-a", "sk-b")
        reloadable.write(changed)
        assert reloadable.post()[0] == 200
        kept.send(wire(chat(), key="sk-a"))
        assert kept.read_answer().status == 401
    assert ask(gateway.port, key="sk-b").status == 200


def test_l06_what_requests_are_expected_to_cost_may_change(reloadable: Reloadable) -> None:
    """Reservations follow at once; another tokenizer's count as soon as that is loaded, while requests go on."""
    gateway, backend = reloadable.gateway, reloadable.backend
    backend.script = scripts.streams(scripts.deltas(2))  # the engine reports no usage: nothing is learned
    day, names = 10_000_000, iter(NAMES)

    def reload(**estimate: Any) -> None:
        keys = [key(name, tokens_per_day=day) for name in NAMES]
        reloadable.write(to_toml(config_for(backend, mode="backpressure", places=5, keys=keys, estimate=estimate)))
        assert reloadable.post() == (200, {"reloaded": True, "warnings": []})

    def reserved(text: str = "Hi") -> int:
        """Tokens that a key's first stream takes of its day while it runs."""
        body = chat(stream=True) | {"messages": [{"role": "user", "content": text}]}
        answer = ask(gateway.port, body, key=f"sk-{next(names)}")
        assert answer.status == 200
        return day - int(answer.header("x-ratelimit-remaining-tokens") or 0)

    reload(output_tokens_default=300)
    first = reserved()
    reload(output_tokens_default=1_000)
    assert reserved() == pytest.approx(first + 700, abs=10)  # bodies differ by the name that marks them
    by_bytes = reserved(LONG_WORD)
    reload(output_tokens_default=1_000, tokenizers={"m": "o200k"})
    eventually(lambda: reserved(LONG_WORD) < by_bytes, within=20, what="the tokenizer's own count")
    reload(output_tokens_default=1_000)
    eventually(lambda: reserved(LONG_WORD) == by_bytes, within=20, what="the price of the bytes again")


def test_l06_only_a_post_reloads(reloadable: Reloadable, tmp_path: Path) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", reloadable.gateway.admin_port, timeout=5)
    connection.request("GET", "/api/v1/config/reload")
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("allow")) == (405, "POST")
    connection.close()


def test_a_refusal_can_be_explained(reloadable: Reloadable) -> None:
    """The figures behind a refusal, by the id that its answer carried; nothing about others."""
    gateway = reloadable.gateway
    for _ in range(3):
        ask(gateway.port, key="sk-a")
    refused = ask(gateway.port, key="sk-a")
    found = json.loads(gateway.admin(f"/api/v1/explain/{refused.header('x-request-id')}"))
    assert (found["outcome"], found["reason"], found["key"], found["limit"]) == ("shed", "key_requests", "a", 3)
    connection = http.client.HTTPConnection("127.0.0.1", gateway.admin_port, timeout=5)
    connection.request("GET", "/api/v1/explain/fb-nobody")
    assert connection.getresponse().status == 404
    connection.close()
