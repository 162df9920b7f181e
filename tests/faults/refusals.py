"""One refusal of each kind, streamed and not, collected from two gateways: the material of class C."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .rig import scripts
from .rig.backend import FakeBackend
from .rig.client import Answer, RawClient, ask, chat, marker, wire
from .rig.gateway import GatewayProcess, config_for
from .rig.waiting import eventually

OWN_LIMIT = {"key_requests", "key_tokens", "key_concurrency"}
SHARED = {"queue_full", "queue_wait", "expired", "warming", "no_engine", "draining"}
FINAL = {"invalid_key", "key_forbidden", "never_fits", "malformed"}
ENGINE = {"engine_error", "engine_timeout"}
STATUS = {
    "invalid_key": 401,
    "key_forbidden": 403,
    "key_requests": 429,
    "key_tokens": 429,
    "key_concurrency": 429,
    "never_fits": 413,
    "malformed": 400,
    "queue_full": 503,
    "queue_wait": 503,
    "expired": 503,
    "warming": 503,
    "no_engine": 503,
    "draining": 503,
    "engine_error": 502,
    "engine_timeout": 504,
}


@dataclass
class Collected:
    """What was refused, and what the gateway wrote down about it."""

    answers: dict[tuple[str, bool], Answer] = field(default_factory=dict)  # by (reason, stream)
    metrics: str = ""
    log: list[dict[str, Any]] = field(default_factory=list)
    secrets: tuple[str, ...] = ()
    backend_addresses: tuple[str, ...] = ()


def collect(folder: Path) -> Collected:
    """Provoke every refusal twice."""
    collected = Collected()
    backend, warming, gone = FakeBackend(), FakeBackend(probe=scripts.refuses(503)), FakeBackend()
    gone.die()
    try:
        _collect(collected, folder, backend, warming, gone)
    finally:
        for each in (backend, warming, gone):
            each.close()
    return collected


def _key(name: str, *, mode: str | None = None, models: list[str] | None = None, **limits: float) -> dict[str, Any]:
    key: dict[str, Any] = {"id": name, "secret": f"sk-{name}-secret", "limits": limits}
    if mode is not None:
        key["mode"] = mode
    if models is not None:
        key["models"] = models
    return key


def _config(folder: Path, backend: FakeBackend, warming: FakeBackend, gone: FakeBackend) -> dict[str, Any]:
    keys = [
        _key("free"),
        _key("strict", mode="admission"),
        _key("waits", mode="hybrid"),
        _key("narrow", models=["other"]),
        _key("rpm", requests_per_minute=2),
        _key("tpm", tokens_per_minute=1000),
        _key("par", concurrency=1),
    ]
    config = config_for(
        backend,
        slots=1,
        keys=keys,
        engine={"models": ["m"], "timeouts": {"first_byte_s": 0.5}},
        server={"max_body_bytes": 100_000, "drain_timeout_s": 5},
        telemetry={"access_log": True, "access_log_path": str(folder / "access.jsonl")},
    )
    more = [("warming", warming), ("gone", gone)]
    config["engines"] += [
        {"name": name, "kind": "openai", "urls": [fake.url], "models": [name], "probe": {"interval_s": 0.2}}
        for name, fake in more
    ]
    return config


def _collect(collected: Collected, folder: Path, backend: FakeBackend, warming: FakeBackend, gone: FakeBackend) -> None:
    config = _config(folder, backend, warming, gone)
    collected.secrets = tuple(key["secret"] for key in config["keys"]["static"])
    collected.backend_addresses = tuple(str(fake.port) for fake in (backend, warming, gone))
    gateway = GatewayProcess(config, folder, ready=False)
    try:
        eventually(lambda: [e["readiness"] for e in gateway.engines()] == ["up", "warming", "down"], 5)
        backend.plan.append(scripts.says(after=0.05))
        assert ask(gateway.port, key="sk-free-secret").status == 200  # a service time is known from here on
        for stream in (False, True):
            _ask_each(collected, gateway, backend, stream)
        collected.metrics = gateway.admin("/metrics").decode()
        _draining(collected, gateway, backend)
    finally:
        gateway.kill()
    assert gateway.process.returncode == 0, gateway.stderr
    assert "Traceback" not in gateway.stderr, gateway.stderr
    collected.log = [json.loads(line) for line in (folder / "access.jsonl").read_text().splitlines()]


def _ask_each(collected: Collected, gateway: GatewayProcess, backend: FakeBackend, stream: bool) -> None:
    def note(reason: str, answer: Answer) -> None:
        collected.answers[reason, stream] = answer

    def refused(key: str, body: dict[str, Any] | bytes | None = None, **how: Any) -> Answer:
        return ask(gateway.port, chat(stream=stream) if body is None else body, key=f"sk-{key}-secret", **how)

    note("invalid_key", refused("nobody"))
    note("key_forbidden", refused("narrow"))
    note("malformed", refused("free", b'{"model": "m", "stream": true, "messages": ['))
    note("never_fits", refused("free", chat(stream=stream, padding="x" * 200_000)))
    note("warming", refused("free", chat(stream=stream) | {"model": "warming"}))
    note("no_engine", refused("free", chat(stream=stream) | {"model": "gone"}))

    if not stream:
        assert [refused("rpm").status, refused("rpm").status] == [200, 200]
    note("key_requests", refused("rpm"))
    if not stream:
        usage = {"prompt_tokens": 5, "completion_tokens": 900, "total_tokens": 905}
        backend.plan.append(scripts.steps(scripts.answer(200, scripts.completion(usage=usage))))
        assert refused("tpm").status == 200
    note("key_tokens", refused("tpm", chat(stream=stream, max_tokens=500)))

    with _busy(gateway, backend, "par"):
        note("key_concurrency", refused("par"))
        note("queue_full", refused("strict"))
        note("queue_wait", refused("waits", headers=[("x-forebay-deadline-ms", "1")]))
        note("expired", refused("waits"))

    backend.plan.append(scripts.steps(scripts.Do.RESET))
    note("engine_error", refused("free"))
    backend.plan.append(scripts.silent)
    note("engine_timeout", refused("free"))
    assert refused("free").status == 200  # two failures in a row do not eject an engine, and now it is one


@contextmanager
def _busy(gateway: GatewayProcess, backend: FakeBackend, key: str) -> Iterator[RawClient]:
    """The one slot is taken by a stream."""
    mark = marker()
    backend.by_marker[mark] = scripts.streams([scripts.delta()], done=False, end=[scripts.Do.HOLD])
    with RawClient(gateway.port) as client:
        client.send(wire(chat(mark, stream=True), key=f"sk-{key}-secret"))
        assert client.read_head().status == 200
        client.read_event()
        yield client
    gateway.settles()


def _draining(collected: Collected, gateway: GatewayProcess, backend: FakeBackend) -> None:
    """New work that comes while the last stream is being finished."""
    mark = marker()
    backend.by_marker[mark] = scripts.streams(scripts.deltas(2), every=0.7)
    with RawClient(gateway.port) as running:
        running.send(wire(chat(mark, stream=True), key="sk-free-secret"))
        assert running.read_head().status == 200
        gateway.signal(signal.SIGTERM)
        eventually(lambda: gateway.snapshot()["draining"])
        for stream in (False, True):
            collected.answers["draining", stream] = ask(gateway.port, chat(stream=stream), key="sk-free-secret")
        assert list(running.events()) == [*scripts.deltas(2), scripts.DONE]
    gateway.process.wait(5)
