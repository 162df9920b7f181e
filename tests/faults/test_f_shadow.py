"""F. Automatic tuning, third part: a real gateway that says what its tuner did, can be held, and tries things first."""

from __future__ import annotations

import http.client
import json
from typing import Any

from .rig import scripts
from .rig.backend import FakeBackend
from .rig.client import ask, chat, wire
from .rig.crowd import Crowd
from .rig.gateway import GatewayProcess, StartGateway, config_for, to_toml
from .rig.waiting import eventually


def post(gateway: GatewayProcess, path: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.admin_port, timeout=5)
    connection.request("POST", path)
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    return answer.status, body


def tuner(gateway: GatewayProcess) -> dict[str, Any]:
    (pool,) = json.loads(gateway.admin("/api/v1/tuner"))["pools"]
    assert isinstance(pool, dict)
    return pool


def test_f05_when_it_was_last_tuned_is_told(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """F-05: while requests run the tuner looks, says when it did and what it saw; at rest it does not look, and
    requests after that wake it. It can be held by hand."""
    gateway = start_gateway(config_for(backend, tuner={"interval_s": 0.3}))
    assert tuner(gateway)["acting"]["looked_s_ago"] is None
    assert ask(gateway.port).status == 200
    eventually(lambda: tuner(gateway)["acting"]["looks"] >= 1, 5, "a look after the first request")
    looks = tuner(gateway)["acting"]["looks"]
    assert gateway.metric("forebay_tuner_look_age_seconds", pool="fb") >= 0
    assert tuner(gateway)["depth"] == 256
    backend.script = scripts.silent
    with Crowd(gateway.port, 6) as crowd:
        for number in range(6):
            crowd.send(number, wire(chat()))
        eventually(lambda: tuner(gateway)["acting"]["looks"] > looks + 1, 8, "it looks on while requests run")
    gateway.settles()
    status, body = post(gateway, "/api/v1/tuner/freeze")
    assert (status, body["pools"][0]["acting"]["frozen"]) == (200, True)
    assert gateway.metric("forebay_tuner_frozen", pool="fb") == 1
    assert post(gateway, "/api/v1/tuner/unfreeze")[1]["pools"][0]["acting"]["frozen"] is False
    assert http_status(gateway, "GET", "/api/v1/tuner/freeze") == 405


def http_status(gateway: GatewayProcess, method: str, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.admin_port, timeout=5)
    connection.request(method, path)
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_window_is_tried_in_shadow_and_promoted_while_requests_run(
    backend: FakeBackend, start_gateway: StartGateway
) -> None:
    """A guarded window beside a fixed one: nothing changes, what it would do is told, and a reload lets it act."""
    config = config_for(backend, slots=3, mode="backpressure")
    gateway = start_gateway(config)
    shadow = {"kind": "guarded", "limit": 8, "least": 8, "most": 64}

    def reload(concurrency: dict[str, Any]) -> None:
        config["engines"][0]["concurrency"] = concurrency
        gateway.config_file.write_text(to_toml(config))
        assert post(gateway, "/api/v1/config/reload") == (200, {"reloaded": True, "warnings": []})

    backend.script = scripts.silent
    with Crowd(gateway.port, 5) as crowd:
        for number in range(5):
            crowd.send(number, wire(chat(stream=True)))
        eventually(lambda: gateway.gauges() == (3, 2))
        reload({"kind": "fixed", "limit": 3, "shadow": shadow})
        assert gateway.gauges() == (3, 2), "a shadow gives nobody a place"
        assert gateway.metric("forebay_concurrency_limit", engine="fb/0") == 3
        assert gateway.metric("forebay_shadow_concurrency_limit", engine="fb/0") == 8
        with Crowd(gateway.port, 1) as one_more:
            one_more.send(0, wire(chat(stream=True)))
            eventually(lambda: gateway.gauges() == (3, 3))
            said = gateway.metric("forebay_shadow_decisions_total", pool="fb", policy="window", verdict="looser")
            assert said == 1
            reload(shadow)
            eventually(lambda: gateway.gauges() == (6, 0), what="the promoted window lets all in")
            reload({"kind": "fixed", "limit": 3})
            assert gateway.gauges() == (6, 0), "and nobody out"
    gateway.settles()


def test_everything_is_tried_in_shadow_while_requests_run(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """Every setting that has a shadow, put in by a reload: each says something of what comes, and nobody feels it."""
    config = config_for(backend, slots=1, mode="hybrid")
    config["admission"]["wait_budget_ms"] = 20_000
    gateway = start_gateway(config)
    config["admission"]["shadow"] = {
        "wait_budget_ms": 5, "late_share": 0.2, "retry_budget": True, "retry": {"headroom": 0.5}, "waiting_room": 3,
    }  # fmt: skip
    config["queue"] = {**config.get("queue", {}), "shadow": {"depth_limit": 1, "order": "adaptive"}}
    config["classes"] = {"default": {"shadow": {"hold_back": 0.5, "floor_share": 0.1}}}
    config["engines"][0]["shadow"] = {"balance": "affinity"}
    gateway.config_file.write_text(to_toml(config))
    assert post(gateway, "/api/v1/config/reload") == (200, {"reloaded": True, "warnings": []})

    def told(policy: str) -> float:
        lines = gateway.admin("/metrics").decode().splitlines()
        mine = [line for line in lines if "shadow_decisions_total{" in line and f'policy="{policy}"' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in mine)

    backend.script = scripts.silent
    with Crowd(gateway.port, 4) as crowd:
        for number in range(4):
            crowd.send(number, wire(chat()))
        eventually(lambda: gateway.gauges() == (1, 3))
        assert told("depth") == 3, "of each that waits"
        assert told("wait_budget") == 3
        assert told("hold_back") == 1, "of the one that found a place"
        found = json.loads(gateway.admin("/api/v1/snapshot"))["pools"][0]["shadow_decisions"]
        assert found["depth"] == {"same": 1, "stricter": 2}
        del config["queue"]["shadow"], config["admission"]["shadow"], config["classes"], config["engines"][0]["shadow"]
        gateway.config_file.write_text(to_toml(config))
        assert post(gateway, "/api/v1/config/reload")[0] == 200
        assert gateway.gauges() == (1, 3), "nobody was let in or out"
    gateway.settles()
