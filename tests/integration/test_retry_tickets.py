"""Retry tickets over the wire: a refusal brings one, the retry that shows it has the promised place, and no other has.

The one place is taken and nobody may wait (admission mode), so who gets in does so by a ticket alone.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from forebay.client import RetryTickets
from tests.faults.rig import scripts
from tests.faults.rig.backend import FakeBackend
from tests.faults.rig.client import Answer, RawClient, ask, chat, marker, wire
from tests.faults.rig.gateway import GatewayProcess, config_for, key, serving, to_toml
from tests.faults.rig.waiting import eventually

TICKET = "x-forebay-ticket"
SECRET, OTHER = "a-secret-of-thirty-two-characters", "another-secret-and-as-long-as-any"


def settings(backend: FakeBackend, secret: str = SECRET, *, tickets: bool = True) -> dict[str, Any]:
    admission = {"mode": "admission", "retry_tickets": tickets, "retry_ticket_secret": secret}
    telemetry = {"explain_completed": True}
    return config_for(backend, slots=1, keys=[key("a"), key("b")], admission=admission, telemetry=telemetry)


@pytest.fixture
def gateway(backend: FakeBackend, tmp_path: Path) -> Iterator[GatewayProcess]:
    with serving(settings(backend), tmp_path) as made:
        yield made


@pytest.fixture
def busy(gateway: GatewayProcess, backend: FakeBackend) -> Iterator[RawClient]:
    """The connection that has the one place until it closes."""
    mark = marker()
    backend.by_marker[mark] = scripts.streams([scripts.delta()], done=False, end=[scripts.Do.HOLD])
    with RawClient(gateway.port) as client:
        client.request(chat(mark, stream=True), key="sk-a")
        assert client.read_head().status == 200
        yield client


def refused(gateway: GatewayProcess, key: str = "sk-a") -> Answer:
    answer = ask(gateway.port, key=key)
    assert answer.reason == "queue_full"
    return answer


def ticket_of(answer: Answer) -> str:
    ticket = answer.header(TICKET)
    assert ticket is not None
    return ticket


def wait_for_place(answer: Answer) -> None:
    """Sleep until the instant that an answer names: what happens then is the case."""
    millis = answer.header("retry-after-ms")
    assert millis is not None
    assert int(millis) < 20_000
    time.sleep(max(0.0, answer.head.at + int(millis) / 1000 - time.monotonic()))


def counts(gateway: GatewayProcess) -> dict[str, int]:
    found = json.loads(gateway.admin("/api/v1/status"))["retry_tickets"]
    assert isinstance(found, dict)
    assert all(gateway.metric("forebay_retry_tickets_total", result=name) == count for name, count in found.items())
    return found


def test_who_shows_a_ticket_in_time_has_the_next_place(
    gateway: GatewayProcess, backend: FakeBackend, busy: RawClient
) -> None:
    answer = refused(gateway)
    wait_for_place(answer)
    mark = marker()
    with RawClient(gateway.port) as holder:
        holder.send(wire(chat(mark), key="sk-a", headers=[(TICKET, ticket_of(answer)), ("x-request-id", "holder-1")]))
        eventually(lambda: gateway.gauges() == (1, 1), what="it waits, where others are refused")
        late = refused(gateway)
        assert json.loads(gateway.admin(f"/api/v1/explain/{late.header('x-request-id')}"))["reserved_place"] is True
        busy.close()
        assert holder.read_answer().status == 200
    call = backend.call(mark)
    assert call is not None
    assert call.header(TICKET) is None, "no engine is told"
    explained = json.loads(gateway.admin("/api/v1/explain/holder-1"))
    assert (explained["held_place"], explained["met_queue"]) == (True, True)
    assert counts(gateway)["held"] == 1
    seen = gateway.stdout + gateway.stderr + gateway.admin("/api/v1/status").decode()
    assert SECRET not in seen


def test_what_is_wrong_with_a_ticket_is_counted_and_makes_no_difference(
    gateway: GatewayProcess, busy: RawClient
) -> None:
    answer, foreign = refused(gateway), refused(gateway, "sk-b")
    ticket = ticket_of(answer)
    early = ask(gateway.port, key="sk-b", headers=[(TICKET, ticket_of(refused(gateway, "sk-b")))])
    assert early.reason == "queue_full"
    wait_for_place(answer)
    forged = ticket[:-4] + ("AAAA" if ticket[-4:] != "AAAA" else "BBBB")
    for key_, shown in (
        ("sk-b", ticket),
        ("sk-a", ticket_of(foreign)),
        ("sk-a", forged),
        ("sk-a", "none"),
        ("sk-a", "x" * 20_000),
    ):
        assert ask(gateway.port, key=key_, headers=[(TICKET, shown)]).reason == "queue_full", shown
    with RawClient(gateway.port) as holder:
        holder.send(wire(chat(), key="sk-a", headers=[(TICKET, ticket)]))
        eventually(lambda: gateway.gauges() == (1, 1), what="its owner is let in all the same")
        again = ask(gateway.port, key="sk-a", headers=[(TICKET, ticket)])
        assert again.reason == "queue_full"
        busy.close()
        assert holder.read_answer().status == 200
    found = counts(gateway)
    issued = found.pop("issued")
    assert issued >= 8
    assert found == {"held": 1, "early": 1, "late": 0, "used": 1, "foreign": 3, "malformed": 2, "crowded": 0}


def reload(gateway: GatewayProcess, config: dict[str, Any]) -> None:
    gateway.config_file.write_text(to_toml(config))
    connection = http.client.HTTPConnection("127.0.0.1", gateway.admin_port, timeout=5)
    connection.request("POST", "/api/v1/config/reload")
    assert connection.getresponse().status == 200
    connection.close()


def test_a_reload_changes_the_secret_and_keeps_what_was_promised(
    gateway: GatewayProcess, backend: FakeBackend, busy: RawClient, tmp_path: Path
) -> None:
    answer = refused(gateway)
    reload(gateway, settings(backend, OTHER))
    with serving(settings(backend, OTHER), tmp_path / "other") as other:
        wait_for_place(answer)
        with RawClient(gateway.port) as holder:
            holder.send(wire(chat(), key="sk-a", headers=[(TICKET, ticket_of(answer))]))
            eventually(lambda: gateway.gauges() == (1, 1), what="a ticket of the old secret")
            busy.close()
            assert holder.read_answer().status == 200
        # To another gateway the old secret is nobody's: its ticket is as good as none.
        assert ask(other.port, key="sk-a", headers=[(TICKET, ticket_of(answer))]).status == 200
        assert counts(other)["foreign"] == 1
    reload(gateway, settings(backend, OTHER, tickets=False))
    assert json.loads(gateway.admin("/api/v1/status"))["retry_tickets"] is None


# ---- the official libraries ----------------------------------------------------------------------------------------

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def with_openai(gateway: GatewayProcess) -> None:
    http_client = openai.DefaultHttpxClient(event_hooks=RetryTickets().hooks())
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-a", http_client=http_client) as client:
        client.chat.completions.create(model="m", messages=MESSAGES)


def with_async_openai(gateway: GatewayProcess) -> None:
    async def call() -> None:
        http_client = openai.DefaultAsyncHttpxClient(event_hooks=RetryTickets().async_hooks())
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="sk-a", http_client=http_client) as client:
            await client.chat.completions.create(model="m", messages=MESSAGES)

    asyncio.run(call())


def with_anthropic(gateway: GatewayProcess) -> None:
    http_client = anthropic.DefaultHttpxClient(event_hooks=RetryTickets().hooks())
    with anthropic.Anthropic(base_url=gateway.url, api_key="sk-a", http_client=http_client) as client:
        client.messages.create(model="m", max_tokens=10, messages=MESSAGES)


@pytest.mark.parametrize("call", [with_openai, with_async_openai, with_anthropic])
def test_an_official_library_with_the_hooks_keeps_its_place(
    gateway: GatewayProcess, busy: RawClient, call: Callable[[GatewayProcess], None]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call, gateway)
        eventually(lambda: gateway.gauges() == (1, 1), within=20, what="its retry waits")
        assert gateway.outcome("shed") == 1, "its first attempt was refused"
        busy.close()
        called.result(timeout=20)
    assert counts(gateway)["held"] == 1


def test_an_official_library_without_them_is_refused_again(gateway: GatewayProcess, busy: RawClient) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-a", max_retries=1) as client:
        with pytest.raises(openai.InternalServerError) as raised:
            client.chat.completions.create(model="m", messages=MESSAGES)
        assert raised.value.response.headers["x-forebay-reason"] == "queue_full"
    assert gateway.outcome("shed") == 2
    assert counts(gateway)["held"] == 0
