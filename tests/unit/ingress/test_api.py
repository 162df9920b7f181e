"""Keys and credits over the admin port: what is answered, to whom, and how mistakes are told. No socket is needed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from prometheus_client import CollectorRegistry

from forebay.core.snapshot import Snapshot
from forebay.ingress.admin import AdminServer
from forebay.ingress.api.keys import KeyEndpoints
from forebay.ingress.api.ledger import LedgerEndpoints
from forebay.ingress.api.table import Asked, Endpoint, Reply, Table
from forebay.ledger.database import Database, StoreError, StoreGoneError, open_store
from forebay.ledger.key import Known
from forebay.ledger.keys import Filter, KeyStore

SNAPSHOT = Snapshot(draining=False, offered=0, outcomes={}, queued=0, in_flight=0, keys=0, pools=())
KNOWN = Known(frozenset({"default", "gold"}), frozenset({"*", "chat"}), frozenset())
TOKEN, READ_TOKEN = "t0ken", "r3ad"


@dataclass
class Answered:
    status: int
    body: Any
    reply: Reply

    @property
    def code(self) -> str:
        """Of an error; its shape is checked by the way."""
        assert set(self.body) == {"error"}
        assert set(self.body["error"]) == {"code", "message", "param"}
        assert self.body["error"]["message"]
        return str(self.body["error"]["code"])

    @property
    def message(self) -> str:
        return str(self.body["error"]["message"])


class Api:
    """An admin port without its socket, and what the gateway was told."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.store = KeyStore(database, KNOWN)
        self.looks: list[int] = []
        self.credited: list[str] = []
        keys = KeyEndpoints(self.store, lambda: self.looks.append(threading.get_ident()))
        ledger = LedgerEndpoints(database, self.store, self.credited.append)
        self.server = AdminServer(
            lambda: SNAPSHOT, dict, CollectorRegistry(), TOKEN, read_token=READ_TOKEN,
            more=(*keys.endpoints(), *ledger.endpoints()), version="1",
        )  # fmt: skip
        self.loop = asyncio.new_event_loop()

    def ask(
        self, method: str, target: str, body: Any = None, *, token: str = TOKEN, word: str | None = None,
        content_type: str = "application/json",
    ) -> Answered:  # fmt: skip
        path, _, query = target.partition("?")
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        asked = Asked(path, query=query, body=data, content_type=content_type, idempotency=word)
        headers = {"authorization": f"Bearer {token}".encode()}
        reply = self.loop.run_until_complete(self._whole(method, path, asked, headers))
        return Answered(reply.status, json.loads(reply.body) if reply.kind == b"application/json" else None, reply)

    async def _whole(self, method: str, path: str, asked: Asked, headers: dict[str, bytes]) -> Reply:
        reply = await self.server.respond(method, path, asked, headers)
        if reply.pieces is None:
            return reply
        return reply._replace(body=b"".join([piece async for piece in reply.pieces]), pieces=None)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    database = open_store(f"sqlite:///{tmp_path / 'keys.db'}")
    made = Api(database)
    yield made
    made.loop.run_until_complete(made.loop.shutdown_default_executor())
    made.loop.close()
    database.close()


def test_the_life_of_a_key(api: Api) -> None:
    made = api.ask("POST", "/api/v1/keys", {"name": "alice", "class": "gold", "limits": {"concurrency": 2}})
    assert made.status == 201
    key = made.body["key"]
    assert made.body["secret"].startswith(f"sk-fb-{key['id']}-")
    assert (key["class"], key["limits"]["concurrency"], key["state"]) == ("gold", 2, "active")
    assert api.ask("GET", f"/api/v1/keys/{key['id']}").body == api.ask("GET", "/api/v1/keys/alice").body == key
    assert api.ask("GET", "/api/v1/keys").body == {"data": [key], "next_cursor": None}
    changed = api.ask("PATCH", "/api/v1/keys/alice", {"name": "a b/c", "limits": {"concurrency": None}})
    assert (changed.status, changed.body["limits"], changed.body["class"]) == (200, None, "gold")
    assert api.ask("GET", "/api/v1/keys/a%20b%2Fc").body == changed.body
    assert api.ask("DELETE", f"/api/v1/keys/{key['id']}").body["state"] == "revoked"
    assert api.ask("POST", f"/api/v1/keys/{key['id']}/revoke").status == 200, "once more changes nothing"
    assert [change["action"] for change in api.ask("GET", "/api/v1/audit").body["data"]] == [
        "revoke",
        "change",
        "create",
    ]
    assert len(api.looks) == 4, "every change is brought into force before it is answered"
    assert made.body["secret"] not in json.dumps(api.ask("GET", "/api/v1/audit").body)


def test_the_database_is_never_waited_for_on_the_loop(api: Api) -> None:
    api.ask("POST", "/api/v1/keys", {"name": "a"})
    api.ask("PATCH", "/api/v1/keys/a", {"name": "b"})
    assert threading.get_ident() not in api.looks


def test_a_repeated_request_is_carried_out_once(api: Api) -> None:
    first = api.ask("POST", "/api/v1/keys", {"name": "a", "prepaid": True}, word="one")
    again = api.ask("POST", "/api/v1/keys", {"name": "a", "prepaid": True}, word="one")
    assert (again.status, again.body["key"], again.body["secret"]) == (201, first.body["key"], None)
    assert api.ask("POST", "/api/v1/keys", {"name": "b"}, word="one").code == "conflict"
    assert api.ask("POST", "/api/v1/keys", {"name": "b"}, word="x" * 129).code == "invalid_request"
    for _ in range(2):
        given = api.ask("POST", "/api/v1/keys/a/credit", {"tokens": 100, "note": "n"}, word="pay")
        assert (given.status, given.body["balance"]["available"]) == (201, 100)
    assert api.ask("POST", "/api/v1/keys/a/credit", {"tokens": 200}, word="pay").status == 409


def test_credit_is_given_taken_and_shown(api: Api) -> None:
    key = api.ask("POST", "/api/v1/keys", {"name": "a", "prepaid": True}).body["key"]["id"]
    api.ask("POST", "/api/v1/keys/a/credit", {"tokens": 500, "note": "=1+1"})
    taken = api.ask("POST", "/api/v1/keys/a/credit", {"tokens": -200})
    assert taken.body["balance"] == {
        "key": key, "topped_up": 300, "available": 300, "held": 0, "spent": 0, "debt": 0,
    }  # fmt: skip
    assert taken.body["transfer"]["actor"].startswith("token:")
    assert TOKEN not in json.dumps(taken.body)
    assert api.credited == [key, key]
    assert api.ask("GET", "/api/v1/keys/a/credit").body == taken.body["balance"]
    assert api.ask("GET", "/api/v1/ledger/balances").body["data"] == [taken.body["balance"]]
    history = api.ask("GET", f"/api/v1/ledger/history?key={key}&limit=1").body
    assert [transfer["amount"] for transfer in history["data"]] == [-200]
    rest = api.ask("GET", f"/api/v1/ledger/history?limit=5&cursor={history['next_cursor']}").body
    assert [transfer["amount"] for transfer in rest["data"]] == [500]
    assert api.ask("GET", "/api/v1/ledger/verify").body == {"clean": True, "discrepancies": []}
    assert api.ask("POST", "/api/v1/keys/a/credit", {"tokens": -301}).code == "refused"
    assert api.ask("POST", "/api/v1/keys/a/credit", {"tokens": 0}).code == "refused"
    assert api.ask("POST", "/api/v1/keys/a/credit", {"tokens": 1 << 60}).code == "invalid_request"
    assert api.ask("POST", "/api/v1/keys/a/credit", {"tokens": 5, "notes": ""}).code == "invalid_request"


def test_credit_where_it_would_have_no_effect_is_refused(api: Api) -> None:
    api.ask("POST", "/api/v1/keys", {"name": "plain"})
    assert "not prepaid" in api.ask("POST", "/api/v1/keys/plain/credit", {"tokens": 5}).message
    gone = api.ask("POST", "/api/v1/keys", {"name": "gone", "prepaid": True}).body["key"]["id"]
    api.ask("DELETE", f"/api/v1/keys/{gone}")
    assert "was revoked" in api.ask("POST", f"/api/v1/keys/{gone}/credit", {"tokens": 5}).message
    assert api.credited == []


def test_the_ledger_is_exported_whole(api: Api) -> None:
    key = api.ask("POST", "/api/v1/keys", {"name": "a", "prepaid": True}).body["key"]["id"]
    for tokens in (5, 6, 7):
        api.ask("POST", "/api/v1/keys/a/credit", {"tokens": tokens})
    exported = api.ask("GET", "/api/v1/ledger/export").body
    assert [row["amount"] for row in exported] == [5, 6, 7]
    reply = api.ask("GET", f"/api/v1/ledger/export?format=csv&key={key}").reply
    assert reply.kind.startswith(b"text/csv")
    assert len(reply.body.splitlines()) == 4
    assert api.ask("GET", "/api/v1/ledger/export?format=xml").code == "invalid_request"


def test_a_ledger_that_does_not_add_up_is_a_409(api: Api) -> None:
    api.ask("POST", "/api/v1/keys", {"name": "a", "prepaid": True})
    api.ask("POST", "/api/v1/keys/a/credit", {"tokens": 5})
    with api.database.begin() as connection:
        connection.exec_driver_sql("UPDATE accounts SET balance = 6 WHERE kind = 'available'")
    answer = api.ask("GET", "/api/v1/ledger/verify")
    assert (answer.status, answer.body["clean"]) == (409, False)
    assert answer.body["discrepancies"]


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("POST", "/api/v1/keys", {"name": "x"}),
        ("PATCH", "/api/v1/keys/a", {"name": "x"}),
        ("DELETE", "/api/v1/keys/a", None),
        ("POST", "/api/v1/keys/a/revoke", None),
        ("POST", "/api/v1/keys/a/credit", {"tokens": 1}),
        ("POST", "/api/v1/config/reload", None),
        ("POST", "/api/v1/tuner/freeze", None),
    ],
)
def test_a_token_for_reading_changes_nothing(api: Api, method: str, target: str, body: Any) -> None:
    before = api.ask("POST", "/api/v1/keys", {"name": "a", "prepaid": True}).body["key"]
    refused = api.ask(method, target, body, token=READ_TOKEN)
    assert (refused.status, refused.code) == (403, "read_only")
    assert api.ask("GET", "/api/v1/keys", token=READ_TOKEN).body["data"] == [before]
    assert api.ask(method, target, body, token="wrong").status == 401
    assert api.ask("GET", "/api/v1/keys", token="wrong").code == "invalid_token"


def test_without_a_token_web_pages_of_other_origins_change_nothing(api: Api) -> None:
    """The port of a gateway on somebody's own machine, and a page that they happen to read."""
    api.server._token = None

    def ask(method: str, **headers: bytes) -> int:
        asked = Asked("/api/v1/keys", body=b'{"name": "x"}', content_type="application/json")
        return api.loop.run_until_complete(api.server.respond(method, "/api/v1/keys", asked, headers)).status

    for origin in (b"https://evil.example.com", b"null", b"http://evil.example.com:8081", b"http://[", b""):
        assert ask("POST", origin=origin, host=b"127.0.0.1:8081") == 403
    assert ask("POST", origin=b"http://evil.example.com:8081", host=b"evil.example.com:8081") == 403, "a name rebound"
    assert ask("POST", origin=b"http://127.0.0.1:8081", host=b"127.0.0.1:8081") == 201
    assert ask("POST", host=b"127.0.0.1:8081") == 201, "no browser"
    assert api.ask("GET", "/api/v1/audit").body["data"][0]["actor"] == "loopback"


@pytest.mark.parametrize(
    ("target", "param"),
    [
        ("/api/v1/keys?limit=0", "limit"),
        ("/api/v1/keys?limit=1001", "limit"),
        ("/api/v1/keys?limit=many", "limit"),
        ("/api/v1/keys?limt=5", "limt"),
        ("/api/v1/keys?cursor=zzz", "cursor"),
        ("/api/v1/keys?cursor=", "cursor"),
        ("/api/v1/keys?state=gone", "state"),
        ("/api/v1/keys?name=a&name=b", None),
        ("/api/v1/keys?" + "&".join(f"a{i}=1" for i in range(20)), None),
        ("/api/v1/keys?name=%ff", None),
        ("/api/v1/audit?cursor=W10", "cursor"),
        ("/api/v1/audit?key=1&state=active", "state"),
        ("/api/v1/ledger/history?cursor=WyJhIl0", "cursor"),
        ("/api/v1/ledger/history?limit=-1", "limit"),
        ("/api/v1/ledger/balances?cursor=WzFd", "cursor"),
    ],
)
def test_a_bad_query_says_which_field(api: Api, target: str, param: str | None) -> None:
    answer = api.ask("GET", target)
    assert (answer.status, answer.code) == (400, "invalid_request"), answer.body
    assert answer.body["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "content_type", "status", "says"),
    [
        (b"", "application/json", 400, "a JSON body is needed"),
        (b"{", "application/json", 400, "no valid JSON"),
        (b'{"name": "\xff"}', "application/json", 400, "no valid JSON"),
        (b"[" * 50_000, "application/json", 400, ""),
        (b"[]", "application/json", 400, "must be an object"),
        (b'{"name": "a"}', "application/x-www-form-urlencoded", 415, "content-type: application/json"),
        (b'{"name": "a"}', "", 415, "content-type: application/json"),
        (b'{"name": "a", "nmae": "b"}', "application/json", 400, "did you mean 'name'"),
        (b'{"name": "a", "routes": ["chatt"]}', "application/json", 400, "did you mean 'chat'"),
        (b'{"name": "a", "class": "golden"}', "application/json", 400, "did you mean 'gold'"),
        (b'{"name": "a", "limits": {"tokens_per_minute": -5}}', "application/json", 400, "a whole number >= 0"),
        (b'{"name": "a", "limits": {"tokens_per_minute": 1e30}}', "application/json", 400, "limits.tokens_per_minute"),
        (b'{"name": "a", "expires_at": "2001-01-01T00:00:00Z"}', "application/json", 400, "is in the past"),
    ],
)
def test_a_bad_body_says_what_and_where(api: Api, body: bytes, content_type: str, status: int, says: str) -> None:
    answer = api.ask("POST", "/api/v1/keys", body, content_type=content_type)
    assert answer.status == status, answer.body
    assert says in answer.message
    assert answer.code
    assert api.store.page(Filter()).data == []


def test_what_is_not_there_is_said(api: Api) -> None:
    assert api.ask("GET", "/api/v1/keys/nobody").code == "not_found"
    assert api.ask("PATCH", "/api/v1/keys/nobody", {"name": "x"}).status == 404
    assert api.ask("GET", "/api/v1/keys/a/b").status == 404
    assert api.ask("PUT", "/api/v1/keys/a").reply.extra == b"allow: GET, HEAD, PATCH, DELETE\r\n"
    for _ in range(2):
        api.ask("POST", "/api/v1/keys", {"name": "twin"})
    assert api.ask("DELETE", "/api/v1/keys/twin").code == "conflict"


def test_a_store_that_is_away_is_a_503_with_a_time(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise StoreGoneError("the store does not answer")

    def broken(*_: object, **__: object) -> None:
        raise StoreError("the store refused")

    monkeypatch.setattr(api.store, "page", away)
    answer = api.ask("GET", "/api/v1/keys")
    assert (answer.status, answer.code, answer.reply.extra) == (503, "store_unavailable", b"retry-after: 1\r\n")
    monkeypatch.setattr(api.store, "page", broken)
    assert api.ask("GET", "/api/v1/keys").status == 500


def test_a_gateway_without_a_store_says_how_to_have_one() -> None:
    table = Table((), {"/api/v1/keys": "start it with --keys"})
    with pytest.raises(Exception, match="start it with --keys"):
        table.find("GET", "/api/v1/keys/a")


# ---- /openapi.json


@pytest.fixture
def document(api: Api) -> dict[str, Any]:
    made = api.ask("GET", "/openapi.json").body
    assert isinstance(made, dict)
    return made


def test_the_description_is_valid_openapi_3_1(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    OpenAPIV31SpecValidator(document).validate()


def test_every_endpoint_is_described(api: Api, document: dict[str, Any]) -> None:
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert described == {(e.path, e.method.lower()) for e in api.server._table.endpoints}
    assert {"/metrics", "/healthz", "/openapi.json", "/api/v1/keys/{key}", "/api/v1/ledger/verify"} <= set(
        document["paths"]
    )
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)


def test_the_description_says_what_is_asked_and_what_is_needed(document: dict[str, Any]) -> None:
    create = document["paths"]["/api/v1/keys"]["post"]
    schema = create["requestBody"]["content"]["application/json"]["schema"]
    new_key = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    assert new_key["required"] == ["name"]
    assert new_key["additionalProperties"] is False
    assert "tokens_per_minute" in document["components"]["schemas"]["Limits"]["properties"]
    assert "idempotency-key" in [parameter["name"] for parameter in create["parameters"]]
    assert {"201", "400", "401", "403", "409"} <= set(create["responses"])
    assert document["paths"]["/healthz"]["get"]["security"] == []
    query = [parameter["name"] for parameter in document["paths"]["/api/v1/keys"]["get"]["parameters"]]
    assert query == ["name", "team", "class", "state", "cursor", "limit"]


def test_an_answer_fits_its_description(api: Api, document: dict[str, Any]) -> None:
    from openapi_schema_validator import OAS31Validator

    api.ask("POST", "/api/v1/keys", {"name": "a", "prepaid": True, "limits": {"concurrency": 1}})
    api.ask("POST", "/api/v1/keys/a/credit", {"tokens": 5})
    for path, target in (
        ("/api/v1/keys", "/api/v1/keys"),
        ("/api/v1/keys/{key}", "/api/v1/keys/a"),
        ("/api/v1/keys/{key}/credit", "/api/v1/keys/a/credit"),
        ("/api/v1/audit", "/api/v1/audit"),
        ("/api/v1/ledger/history", "/api/v1/ledger/history"),
        ("/api/v1/ledger/verify", "/api/v1/ledger/verify"),
    ):
        response = document["paths"][path]["get"]["responses"]["200"]
        schema = response["content"]["application/json"]["schema"] | {"components": document["components"]}
        OAS31Validator(schema).validate(api.ask("GET", target).body)


def test_endpoints_know_whether_they_change_anything() -> None:
    async def nothing(asked: Asked) -> Reply:
        return Reply(200)

    assert not Endpoint("GET", "/a", "", nothing).changes
    assert all(Endpoint(method, "/a", "", nothing).changes for method in ("POST", "PATCH", "DELETE", "PUT"))
