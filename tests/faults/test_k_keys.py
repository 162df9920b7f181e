"""K. Keys, identity, routes, CORS: who is asking, from where, and what that opens."""

from __future__ import annotations

import http.client
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from forebay.config.schema import Limits
from forebay.ingress.http.routes import EXACT
from forebay.ledger.database import open_store
from forebay.ledger.key import KeyChange, NewKey
from forebay.ledger.keys import By, KeyStore

from .rig import scripts
from .rig.backend import FakeBackend
from .rig.checks import exchange, still_serves, untouched
from .rig.client import Answer, RawClient, ask, chat, marker, wire
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, serving
from .rig.waiting import eventually

ME = By("test")
PAGE = "https://app.example.com"
LETTERS = str.maketrans("0123456789", "abcdefghij")
EXPOSED = {"retry-after", "retry-after-ms", "x-should-retry", "x-ratelimit-remaining-requests"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def gateway(shared_backend: FakeBackend, folder: Path) -> Iterator[GatewayProcess]:
    """One gateway: key `a` is free, `spent` may do nothing more, `c0` to `c9` have three requests a minute."""
    shared_backend.restart()
    config = config_for(
        shared_backend,
        slots=1,
        places=4,
        mode="backpressure",
        keys=[
            key("a"),
            key("spent", requests_per_minute=1),
            key("gold") | {"class": "gold"},
            *(key(f"c{i}", requests_per_minute=3) for i in range(10)),
        ],
        classes={"gold": {"priority": 1}},
        engine={"api_key": "sk-of-the-engine"},
        server={"cors_origins": [PAGE]},
        telemetry={"access_log": True, "access_log_path": str(folder / "access.jsonl"), "log_level": "debug"},
    )
    with serving(config, folder) as process:
        assert ask(process.port, key="sk-spent").status == 200
        yield process


def sent(gateway: GatewayProcess, *headers: tuple[str, str], path: str = "/v1/chat/completions") -> Answer:
    return ask(gateway.port, chat(), headers=headers, path=path)


def written(gateway: GatewayProcess, folder: Path) -> str:
    """All that the gateway wrote down: log, access log, metrics, status, snapshot."""
    pages = [gateway.admin(page).decode() for page in ("/metrics", "/api/v1/status", "/api/v1/snapshot")]
    return "".join([gateway.stdout, gateway.stderr, (folder / "access.jsonl").read_text(), *pages])


# ---- K-01


def test_k01_every_documented_place_is_one_bucket(gateway: GatewayProcess, fresh_backend: FakeBackend) -> None:
    """Three requests a minute, whichever way the key comes: the fourth is refused."""
    ways = [
        ("authorization", "Bearer sk-c0"),
        ("authorization", "bearer sk-c0"),
        ("Authorization", "BEARER  sk-c0"),
        ("api-key", "sk-c0"),
        ("x-api-key", "sk-c0"),
        ("X-API-Key", "sk-c0"),
    ]
    answers = [sent(gateway, way) for way in ways]
    assert [answer.status for answer in answers] == [200, 200, 200, 429, 429, 429]
    assert {answer.reason for answer in answers[3:]} == {"key_requests"}
    remaining = [int(answer.header("x-ratelimit-remaining-requests") or -1) for answer in answers]
    assert remaining == [2, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("scheme", ["sk-a", "Bearersk-a", "Basic c2stYQ==", "Token sk-a", "Bearer", "Bearer "])
def test_k01_what_is_no_bearer_token_is_no_key(
    gateway: GatewayProcess, fresh_backend: FakeBackend, scheme: str
) -> None:
    with untouched(gateway, fresh_backend):
        answer = sent(gateway, ("authorization", scheme))
        assert (answer.status, answer.reason, answer.header("x-should-retry")) == (401, "invalid_key", "false")
        assert "authorization: Bearer" in answer.error["message"]


def test_k01_two_keys_that_differ_are_a_conflict(gateway: GatewayProcess, fresh_backend: FakeBackend) -> None:
    with untouched(gateway, fresh_backend):
        for other in (("x-api-key", "sk-c1"), ("api-key", "sk-nobody"), ("authorization", "Bearer sk-c1")):
            answer = sent(gateway, ("authorization", "Bearer sk-a"), other)
            assert (answer.status, answer.reason) == (401, "invalid_key")
            assert "two different keys" in answer.error["message"]
    assert sent(gateway, ("authorization", "Bearer sk-a"), ("x-api-key", "sk-a")).status == 200


@pytest.mark.parametrize("query", ["api-key=sk-a", "key=sk-a", "x=1&key=sk-a", "api_key=sk-a", "x=1&api-key=sk-a"])
def test_k01_a_key_in_the_query_is_refused_and_written_nowhere(
    gateway: GatewayProcess, fresh_backend: FakeBackend, folder: Path, query: str
) -> None:
    with untouched(gateway, fresh_backend):
        for path in ("/v1/chat/completions", "/v1/nowhere"):
            answer = ask(gateway.port, chat(), path=f"{path}?{query.replace('sk-a', 'sk-in-the-query')}")
            assert answer.status in {401, 404}
            assert "sk-in-the-query" not in answer.body.decode()
    assert "sk-in-the-query" not in written(gateway, folder)


# ---- K-02


@pytest.mark.parametrize(
    "secret", ["SK-A", "sk-A", "sk-a\t.", "sk-а".encode().decode("latin-1"), "sk-a,sk-a", '"sk-a"', "sk-", "a"]
)
def test_k02_a_key_matches_exactly_or_not_at_all(
    gateway: GatewayProcess, fresh_backend: FakeBackend, secret: str
) -> None:
    keys = gateway.snapshot()["keys"]
    with untouched(gateway, fresh_backend):
        assert (answer := sent(gateway, ("authorization", f"Bearer {secret}"))).status == 401, answer.body
    assert gateway.snapshot()["keys"] == keys, "state for a key that nobody has"


def test_k02_white_space_around_a_key_is_not_part_of_it(gateway: GatewayProcess, fresh_backend: FakeBackend) -> None:
    for spelt in ("Bearer sk-a ", "Bearer \t sk-a\t"):
        assert sent(gateway, ("authorization", spelt)).status == 200
    assert sent(gateway, ("api-key", "  sk-a  ")).status == 200


def test_k02_an_enormous_key(gateway: GatewayProcess, fresh_backend: FakeBackend) -> None:
    with untouched(gateway, fresh_backend), RawClient(gateway.port) as client:
        client.send(wire(headers=[("authorization", "Bearer " + "k" * 50_000), ("content-length", "0")]))
        assert client.read_answer().status == 401
    with untouched(gateway, fresh_backend):
        assert exchange(gateway, wire(chat(), key="k" * 1_000_000)[:200_000]).status == 431


# ---- K-03


def preflight(gateway: GatewayProcess, origin: str, *, path: str = "/v1/chat/completions") -> Answer:
    asked = [
        ("origin", origin),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type,x-stainless-lang"),
    ]
    return exchange(gateway, wire(method="OPTIONS", path=path, headers=asked), method="OPTIONS")


def test_k03_a_preflight_needs_no_key_and_no_place(gateway: GatewayProcess, fresh_backend: FakeBackend) -> None:
    fresh_backend.script = scripts.silent
    with RawClient(gateway.port) as running:
        running.request(chat(), key="sk-a")
        eventually(lambda: gateway.gauges() == (1, 0))
        for _ in range(20):
            answer = preflight(gateway, PAGE)
            assert (answer.status, answer.body) == (200, b"")
            assert answer.header("access-control-allow-origin") == PAGE
            assert "POST" in (answer.header("access-control-allow-methods") or "")
            assert answer.header("access-control-allow-headers") == "authorization,content-type,x-stainless-lang"
            assert answer.header("vary") == "origin"
            assert answer.header("x-ratelimit-limit-requests") is None
        assert gateway.gauges() == (1, 0)
    gateway.settles()
    assert len(fresh_backend.calls) == 1


def test_k03_other_origins_are_told_nothing(gateway: GatewayProcess, fresh_backend: FakeBackend) -> None:
    for origin in ("https://evil.example.com", "null", PAGE.upper(), PAGE + ".evil.com", PAGE + ":8443", "x\ty"):
        answer = preflight(gateway, origin)
        assert answer.header("access-control-allow-origin") is None, origin
        real = sent(gateway, ("origin", origin), ("authorization", "Bearer sk-a"))
        assert (real.status, real.header("access-control-allow-origin")) == (200, None)


def test_k03_a_page_can_read_every_refusal(gateway: GatewayProcess, fresh_backend: FakeBackend) -> None:
    page = ("origin", PAGE)
    fresh_backend.plan.append(scripts.refuses(503))
    answers = {
        200: sent(gateway, page, ("authorization", "Bearer sk-a"), path="/v1/embeddings"),
        401: sent(gateway, page, ("authorization", "Bearer sk-nobody")),
        404: sent(gateway, page, ("authorization", "Bearer sk-a"), path="/v1/nowhere"),
        405: ask(gateway.port, method="GET", key="sk-a", headers=[page]),
        429: sent(gateway, page, ("authorization", "Bearer sk-spent")),
    }
    answers[503] = answers[200] if answers[200].status == 503 else sent(gateway, page, ("api-key", "sk-a"))
    for status, answer in answers.items():
        if status != 200:
            assert answer.status == status
        assert answer.header("access-control-allow-origin") == PAGE, status
        exposed = {name.strip() for name in (answer.header("access-control-expose-headers") or "").split(",")}
        assert exposed >= EXPOSED, status
        assert len(answer.head.all("access-control-allow-origin")) == 1


def test_k03_one_word_on_origins_even_when_the_engine_has_its_own(
    gateway: GatewayProcess, fresh_backend: FakeBackend
) -> None:
    theirs = [("access-control-allow-origin", "*"), ("access-control-allow-credentials", "true")]
    for stream in (False, True):
        for origin, allowed in ((PAGE, [PAGE]), ("https://evil.example.com", [])):
            fresh_backend.plan.append(
                scripts.streams(scripts.deltas(1), headers=theirs)
                if stream
                else scripts.steps(scripts.answer(200, scripts.completion(), theirs))
            )
            answer = ask(gateway.port, chat(stream=stream), key="sk-a", headers=[("origin", origin)])
            assert (answer.status, answer.head.all("access-control-allow-origin")) == (200, allowed)
            assert answer.header("access-control-allow-credentials") is None
    assert all(call.header("origin") is None for call in fresh_backend.calls)


def test_k03_repeated_requests_of_a_page_keep_their_lines(gateway: GatewayProcess, fresh_backend: FakeBackend) -> None:
    """The head of the second request is known by its bytes: what the browser needs is not lost on that way."""
    with RawClient(gateway.port) as client:
        for _ in range(3):
            client.request(chat(), key="sk-a", headers=[("origin", PAGE)])
            assert client.read_answer().header("access-control-allow-origin") == PAGE


# ---- K-04


def test_k04_a_flood_of_bad_keys(gateway: GatewayProcess, fresh_backend: FakeBackend) -> None:
    """Many keys that nobody has: refused at once, nothing is remembered of them, and others are served meanwhile."""
    body = json.dumps(chat()).encode()
    keys, calls = gateway.snapshot()["keys"], len(fresh_backend.calls)

    def flood(begin: int, count: int) -> None:
        with RawClient(gateway.port) as client:
            for start in range(begin, begin + count, 50):
                client.send(b"".join(wire(body, key=f"sk-fb-bad{i}-{i:064d}") for i in range(start, start + 50)))
                statuses = [client.read_answer().status for _ in range(50)]
                assert statuses == [401] * 50

    flood(0, 1000)
    before = gateway.rss_bytes()
    for step in range(1, 50):
        flood(step * 1000, 1000)
        still_serves(gateway, key="sk-a")
    assert gateway.rss_bytes() - before < 4 * 1024 * 1024
    assert gateway.snapshot()["keys"] == keys
    assert len(fresh_backend.calls) == calls + 49
    assert gateway.metric("forebay_rejected_total", reason="invalid_key") >= 50_000


# ---- K-06


IDENTITIES = [
    ("x-user-id", "root"),
    ("x-forwarded-for", "10.0.0.1"),
    ("x-real-ip", "10.0.0.1"),
    ("forwarded", "for=10.0.0.1"),
    ("x-priority", "100"),
    ("x-forebay-key", "a"),
    ("x-litellm-key", "sk-a"),
    ("openai-organization", "org-a"),
    ("x-consumer-username", "a"),
]


@pytest.mark.parametrize("header", IDENTITIES, ids=[name for name, _ in IDENTITIES])
def test_k06_a_header_makes_nobody_somebody_else(
    gateway: GatewayProcess, fresh_backend: FakeBackend, header: tuple[str, str]
) -> None:
    """A spent key stays spent, whoever it says it is."""
    with untouched(gateway, fresh_backend):
        assert sent(gateway, ("authorization", "Bearer sk-spent"), header).reason == "key_requests"
        assert sent(gateway, header).status == 401


Waiting = tuple[str, str, list[tuple[str, str]]]
"""What is sent by one that waits: marker, key, headers."""


def order_of(gateway: GatewayProcess, backend: FakeBackend, waiting: list[Waiting]) -> list[str]:
    """The markers in the order in which the backend gets them: all wait behind a request that runs, in this order."""
    gate = scripts.Gate(scripts.ordinary)
    backend.plan.append(gate)
    with RawClient(gateway.port) as running:
        running.request(chat(), key="sk-a")
        eventually(lambda: gateway.gauges() == (1, 0))
        clients = []
        for place, (mark, secret, headers) in enumerate(waiting):
            clients.append(client := RawClient(gateway.port))
            client.request(chat(mark), key=secret, headers=headers)
            eventually(lambda place=place: gateway.gauges() == (1, place + 1))  # type: ignore[misc]
        gate.open(backend)
        for client in clients:
            assert client.read_answer().status == 200
            client.close()
    return [call.marker for call in backend.calls][1:]


def test_k06_priority_by_header_goes_no_higher_than_the_class(
    gateway: GatewayProcess, fresh_backend: FakeBackend
) -> None:
    """Two of the lowest class wait and ask for the highest priority; one of a higher class goes before both."""
    gold, wish = marker(), [("x-forebay-priority", "100"), ("x-priority", "100")]
    urgent: list[Waiting] = [(marker(), "sk-a", wish) for _ in range(2)]
    assert order_of(gateway, fresh_backend, [*urgent, (gold, "sk-gold", [])])[0] == gold


def test_k06_naming_many_flows_gets_nobody_more_than_one_share(
    gateway: GatewayProcess, fresh_backend: FakeBackend
) -> None:
    """One key waits with three requests, each said to be of another flow; a request of another key goes between."""
    mine, other = [marker() for _ in range(3)], marker()
    waiting: list[Waiting] = [(mark, "sk-a", [("x-llm-d-inference-fairness-id", mark)]) for mark in mine]
    order = order_of(gateway, fresh_backend, [*waiting, (other, "sk-c9", [])])
    assert order.index(other) < order.index(mine[2])


# ---- K-07

GATED = sorted({path.decode() for path, route in EXACT.items() if route.gated})
KSERVE = ["/v2/models/m/infer", "/v2/models/m/versions/1/infer"]
WAYS_ROUND = [
    "/chat/completions", "/completions", "/v1/engines/m/completions", "/openai/deployments/m/chat/completions",
    "/v1/batches", "/v1/files", "/v1/images/generations", "/v1/audio/transcriptions/", "/v1/chat/completions/",
    "//v1/chat/completions", "/v1/./chat/completions", "/v1/%63hat/completions", "/generate", "/api/generate",
    "/api/chat", "/invocations", "/v1/load_lora_adapter", "/v2/repository/models/m/load", "/inference/v1/generate",
    "/rerank", "/v2/rerank", "/score", "/v1/moderations",
]  # fmt: skip


@pytest.mark.parametrize("path", [*GATED, *KSERVE])
def test_k07_a_spent_key_is_refused_on_every_route(
    gateway: GatewayProcess, fresh_backend: FakeBackend, path: str
) -> None:
    with untouched(gateway, fresh_backend):
        answer = ask(gateway.port, chat(), path=path, key="sk-spent")
        assert (answer.status, answer.reason) == (429, "key_requests"), answer.body
        assert ask(gateway.port, chat(stream=True), path=path, key="sk-spent").status == 429


@pytest.mark.parametrize("path", WAYS_ROUND)
def test_k07_no_other_way_leads_to_an_engine(gateway: GatewayProcess, fresh_backend: FakeBackend, path: str) -> None:
    with untouched(gateway, fresh_backend):
        for secret in ("sk-spent", "sk-a", None):
            answer = ask(gateway.port, chat(), path=path, key=secret)
            assert answer.status == 404, answer.body


# ---- K-08

HOSTILE_IDS = ["a%0d%0ab", "a\x1b[31mred", "é".encode().decode("latin-1"), "i" * 10_000, "a b", "a;b", "<script>", ""]


@pytest.mark.parametrize("request_id", HOSTILE_IDS, ids=ascii)
def test_k08_an_id_is_clean_or_replaced(
    gateway: GatewayProcess, fresh_backend: FakeBackend, folder: Path, request_id: str
) -> None:
    answer = sent(gateway, ("authorization", "Bearer sk-a"), ("x-request-id", request_id))
    if answer.status == 400:  # a control character that no header may hold
        assert "\x1b" in request_id
        assert fresh_backend.calls == []
    else:
        assert answer.status == 200
        shown = answer.header("x-request-id") or ""
        assert shown != request_id
        assert shown.startswith("fb-")
        assert len(shown) < 64
        assert [call.header("x-request-id") for call in fresh_backend.calls] == [shown]
    assert len(request_id) < 5 or request_id not in written(gateway, folder)


def test_k08_a_clean_id_is_kept(gateway: GatewayProcess, fresh_backend: FakeBackend) -> None:
    given = "req_2f0c-77.a:b/c+d=@e"
    answer = sent(gateway, ("authorization", "Bearer sk-a"), ("x-request-id", given))
    assert answer.head.all("x-request-id") == [given]
    assert fresh_backend.calls[-1].header("x-request-id") == given


def test_k08_keys_stay_on_their_side(gateway: GatewayProcess, fresh_backend: FakeBackend, folder: Path) -> None:
    """The caller's key reaches no engine, the engine's no caller, and neither is written down."""
    answers = [
        sent(gateway, ("authorization", "Bearer sk-a")),
        sent(gateway, ("x-api-key", "sk-a")),
        sent(gateway, ("api-key", "sk-a"), ("proxy-authorization", "Basic c2stYQ==")),
        sent(gateway, ("authorization", "Bearer sk-nobody-has-this")),
        ask(gateway.port, method="GET", path="/v1/models", key="sk-a"),
    ]
    for call in [*fresh_backend.calls, *fresh_backend.probes]:
        assert b"sk-a" not in call.raw_head
        assert b"c2stYQ" not in call.raw_head
    assert all(call.header("authorization") == "Bearer sk-of-the-engine" for call in fresh_backend.calls)
    for answer in answers:
        assert b"sk-" not in answer.head.raw + answer.body
    assert not any(secret in written(gateway, folder) for secret in ("sk-a", "sk-of-the-engine", "sk-nobody-has-this"))


def test_k08_a_key_is_forwarded_only_where_the_config_says_so(
    backend: FakeBackend, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(config_for(backend, keys=[key("a")], engine={"forward_key": True}))
    assert ask(gateway.port, chat(), headers=[("x-api-key", "sk-a")]).status == 200
    assert backend.calls[0].header("authorization") == "Bearer sk-a"
    assert backend.calls[0].header("x-api-key") is None


# ---- K-01, K-02, K-04, K-05 and K-08 with keys of a store, which another process changes


class Stored:
    """A gateway with a store of keys, and the store itself, which this process changes."""

    def __init__(self, gateway: GatewayProcess, folder: Path) -> None:
        self.gateway, self.folder = gateway, folder
        self.url = f"sqlite:///{folder / 'keys.db'}"
        self.database = open_store(self.url)
        self.keys = KeyStore(self.database)
        self.made = 0

    def make(self, **agreed: Any) -> tuple[str, str]:
        """(id, what its owner sends) of a new key that the gateway knows of by now."""
        self.made += 1
        made = self.keys.create(NewKey(name=f"key {self.made}", **agreed), ME)
        secret = made.secret
        assert secret is not None
        eventually(lambda: self.status(secret) == 200, within=5, what="the gateway knows the new key")
        return made.key.id, secret

    def status(self, secret: str) -> int:
        """What a cheap request with this key gets."""
        return ask(self.gateway.port, method="GET", path="/v1/models", key=secret).status

    def admin(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """One request to the admin port."""
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway.admin_port, timeout=10)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        parsed = json.loads(answer.read())
        connection.close()
        return answer.status, parsed


def with_store(backend: FakeBackend, folder: Path, **more: Any) -> dict[str, Any]:
    """One slot, five places, a static key, and a store."""
    folder.mkdir(exist_ok=True)
    log = {"access_log": True, "access_log_path": str(folder / "access.jsonl"), "log_level": "debug"}
    config = config_for(
        backend, slots=1, places=5, mode="backpressure", keys=[key("static")], telemetry=log, **more
    )  # fmt: skip
    config["keys"]["store"] = f"sqlite:///{folder / 'keys.db'}"
    config["ledger"] = {"journal": str(folder / "journal")}
    return config


@pytest.fixture(scope="module")
def shared_store(shared_backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    folder = tmp_path_factory.mktemp("store")
    with serving(with_store(shared_backend, folder), tmp_path_factory.mktemp("gateway")) as gateway:
        made = Stored(gateway, folder)
        yield made
        made.database.close()


@pytest.fixture
def stored(shared_store: Stored, fresh_backend: FakeBackend) -> Stored:
    return shared_store


def test_k05_a_key_that_is_revoked_while_its_requests_wait_and_run(stored: Stored, fresh_backend: FakeBackend) -> None:
    """One runs and two wait when another process revokes the key: they are finished, and new ones get 401."""
    (key_id, secret), (_, other) = stored.make(), stored.make()
    gate = scripts.Gate(scripts.ordinary)
    fresh_backend.plan.extend([gate, gate, gate])
    port = stored.gateway.port
    with RawClient(port) as running, RawClient(port) as first, RawClient(port) as second, RawClient(port) as kept:
        kept.send(wire(method="GET", path="/v1/models", key=secret))
        assert kept.read_answer(method="GET").status == 200
        running.request(chat(), key=secret)
        eventually(lambda: stored.gateway.gauges() == (1, 0))
        for place, client in enumerate((first, second)):
            client.request(chat(), key=secret)
            eventually(lambda place=place: stored.gateway.gauges() == (1, place + 1))  # type: ignore[misc]
        command = [sys.executable, "-m", "forebay", "keys", "revoke", key_id, "--store", stored.url]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        eventually(lambda: stored.status(secret) == 401, within=5)
        refused = ask(port, key=secret)
        assert (refused.status, refused.reason, refused.error["message"]) == (
            401,
            "invalid_key",
            "this key was revoked",
        )
        kept.request(chat(), key=secret)
        assert kept.read_answer().status == 401, "on a connection whose head was known"
        assert stored.gateway.gauges() == (1, 2)
        gate.open(fresh_backend)
        assert [client.read_answer().status for client in (running, first, second)] == [200, 200, 200]
    stored.gateway.settles()
    assert stored.status(other) == 200
    assert ask(port, key="sk-static").status == 200


def test_k05_a_change_over_the_admin_port_is_in_force_when_it_is_answered(stored: Stored) -> None:
    status, made = stored.admin("POST", "/api/v1/keys", {"name": "a", "limits": {"requests_per_minute": 1}})
    secret = made["secret"]
    assert (status, ask(stored.gateway.port, key=secret).status) == (201, 200)
    assert ask(stored.gateway.port, key=secret).reason == "key_requests"
    assert stored.admin("PATCH", "/api/v1/keys/a", {"limits": {"requests_per_minute": None}})[0] == 200
    assert ask(stored.gateway.port, key=secret).status == 200
    stored.admin("PATCH", "/api/v1/keys/a", {"models": ["other"]})
    assert ask(stored.gateway.port, key=secret).status == 403
    stored.admin("PATCH", "/api/v1/keys/a", {"models": ["*"], "routes": ["embeddings"]})
    assert ask(stored.gateway.port, key=secret).status == 403
    assert stored.admin("DELETE", "/api/v1/keys/a")[0] == 200
    assert ask(stored.gateway.port, key=secret).status == 401


def test_k05_an_expired_key_is_refused_and_a_restart_knows_it(
    backend: FakeBackend, start_gateway: StartGateway, tmp_path: Path
) -> None:
    config, folder = with_store(backend, tmp_path / "store"), tmp_path / "store"
    stored = Stored(start_gateway(config), folder)
    key_id, soon = stored.make(expires_at=datetime.now(UTC) + timedelta(seconds=1.5))
    _, lasting = stored.make()
    eventually(lambda: stored.status(soon) == 401, within=10)
    assert ask(stored.gateway.port, key=soon).error["message"] == "this key has expired"
    stored.gateway.stop()
    stored.gateway.stop = lambda: None  # type: ignore[method-assign]  # it has ended
    stored.gateway = start_gateway(config)
    assert [stored.status(secret) for secret in (soon, lasting, "sk-static")] == [401, 200, 200]
    stored.keys.change(key_id, KeyChange(expires_at=datetime.now(UTC) + timedelta(hours=1)), ME)
    eventually(lambda: stored.status(soon) == 200, within=5)
    stored.database.close()


def test_k02_a_stored_key_matches_exactly_or_not_at_all(stored: Stored) -> None:
    (_, secret), (_, other) = stored.make(), stored.make()
    keys = stored.gateway.snapshot()["keys"]
    for wrong in (
        secret.upper(), secret[:-1], secret + "a", secret[:-1] + ("a" if secret[-1] != "a" else "b"), secret[:22],
        secret[:23] + other[23:], secret.replace("sk-fb-", "sk_fb_"), f"{secret},{secret}",
    ):  # fmt: skip
        answer = ask(stored.gateway.port, key=wrong)
        assert (answer.status, answer.error["message"]) == (401, "this key is not known here"), wrong
    assert stored.gateway.snapshot()["keys"] == keys
    assert stored.status(f"  {secret} ") == 200
    assert ask(stored.gateway.port, chat(), headers=[("x-api-key", secret)]).status == 200


def test_k04_bad_keys_never_reach_the_store(stored: Stored) -> None:
    """The store is locked against everybody, and a flood of keys that look like stored ones is refused all the same."""
    _, secret = stored.make()
    body = json.dumps(chat()).encode()
    holder = sqlite3.connect(stored.folder / "keys.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with RawClient(stored.gateway.port) as client:
            for start in range(0, 5000, 50):
                made_up = [f"sk-fb-{str(i).translate(LETTERS):a>16}-{'a' * 32}" for i in range(start, start + 50)]
                client.send(b"".join(wire(body, key=wrong) for wrong in made_up))
                assert [client.read_answer().status for _ in range(50)] == [401] * 50
        assert ask(stored.gateway.port, key=secret).status == 200
    finally:
        holder.close()


def test_k08_a_stored_secret_is_written_nowhere(stored: Stored, fresh_backend: FakeBackend) -> None:
    key_id, secret = stored.make(limits=Limits(requests_per_minute=2))
    made = stored.admin("POST", "/api/v1/keys", {"name": "over the admin port"})[1]["secret"]
    for each in (secret, made, f"{secret[:-1]}x"):
        for _ in range(3):
            ask(stored.gateway.port, key=each)
    stored.keys.revoke(key_id, ME)
    eventually(lambda: stored.status(secret) == 401, within=5)
    pages = ["/metrics", "/api/v1/status", "/api/v1/snapshot", "/api/v1/keys", "/api/v1/audit", "/openapi.json"]
    text = (
        "".join(stored.gateway.admin(page).decode() for page in pages) + stored.gateway.stdout + stored.gateway.stderr
    )
    text += (stored.folder / "access.jsonl").read_text()
    files = b"".join(path.read_bytes() for path in stored.folder.rglob("*") if path.is_file())
    for each in (secret, made):
        assert each[-32:] not in text
        assert each[-32:].encode() not in files
        assert each[6:22] in text, "the public id is what it is called by"
    assert all(secret.encode() not in call.raw_head for call in fresh_backend.calls)
