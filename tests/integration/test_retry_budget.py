"""Retries beyond their budget, over the wire: numbered by a library, or known by the same idempotency key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.faults.rig import scripts
from tests.faults.rig.backend import FakeBackend
from tests.faults.rig.client import Answer, RawClient, ask, chat, marker
from tests.faults.rig.gateway import GatewayProcess, config_for, key, serving

COUNT, NAME = "x-stainless-retry-count", "idempotency-key"
REFUSED, TRIES = 12, 80


@pytest.fixture
def gateway(backend: FakeBackend, tmp_path: Path) -> Iterator[GatewayProcess]:
    with serving(config_for(backend, slots=1, mode="admission", keys=[key("a")]), tmp_path) as made:
        yield made


@contextmanager
def busy(gateway: GatewayProcess, backend: FakeBackend) -> Iterator[None]:
    """The one slot is taken, and nobody may wait."""
    backend.script = scripts.streams([scripts.delta()], done=False, end=[scripts.Do.HOLD])
    with RawClient(gateway.port) as client:
        client.request(chat(stream=True), key="sk-a")
        assert client.read_head().status == 200
        yield


def send(gateway: GatewayProcess, *headers: tuple[str, str]) -> Answer:
    return ask(gateway.port, key="sk-a", headers=headers)


def spend(gateway: GatewayProcess, *header: tuple[str, str]) -> Answer:
    """New requests are refused until it is an overload, then retries of one are until the budget is used up."""
    for number in range(REFUSED):
        assert send(gateway, (NAME, f"{marker()}-{number}")).reason != "retry_budget", "it is new"
    for _ in range(TRIES):
        answer = send(gateway, *header)
        if answer.reason == "retry_budget":
            return answer
    raise AssertionError("every retry was looked at")


@pytest.mark.parametrize("header", [(COUNT, "1"), (NAME, "the same")], ids=["numbered", "same key"])
def test_retries_beyond_the_budget_are_refused(
    gateway: GatewayProcess, backend: FakeBackend, header: tuple[str, str]
) -> None:
    with busy(gateway, backend):
        refused = spend(gateway, header)
        assert refused.status == 429
        assert refused.header("x-should-retry") == "false"
        assert refused.header("retry-after") is None
        assert refused.error["code"] == "retry_budget_exceeded"
        assert send(gateway).reason == "queue_full", "what is new is judged as ever"
        assert send(gateway, (NAME, marker())).reason == "queue_full"


def test_the_official_client_stops_at_the_budget(gateway: GatewayProcess, backend: FakeBackend) -> None:
    statuses: list[int] = []

    def answered(response: Any) -> None:
        statuses.append(response.status_code)

    transport = openai.DefaultHttpxClient(event_hooks={"response": [answered]})
    options: dict[str, Any] = {"api_key": "sk-a", "max_retries": 2, "http_client": transport}
    ask_for: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with busy(gateway, backend), openai.OpenAI(base_url=f"{gateway.url}/v1", **options) as client:
        for _ in range(5):  # a second after it was spent the budget holds one again
            statuses.clear()
            spend(gateway, (COUNT, "1"))
            with pytest.raises((openai.RateLimitError, openai.InternalServerError)) as raised:
                client.chat.completions.create(**ask_for, extra_headers={COUNT: "1"})
            if statuses == [429]:
                break
            assert 429 not in statuses[:-1], "it goes on although it was told to stop"
        assert statuses == [429], "one attempt, though three were allowed"
        assert isinstance(raised.value, openai.RateLimitError)
        assert raised.value.code == "retry_budget_exceeded"
        assert raised.value.response.headers["x-should-retry"] == "false"


def test_what_comes_again_without_an_overload_is_served_and_the_engine_is_told(
    gateway: GatewayProcess, backend: FakeBackend
) -> None:
    for _ in range(15):
        mark = marker()
        assert ask(gateway.port, chat(mark), key="sk-a", headers=[(NAME, "the same")]).status == 200
        call = backend.call(mark)
        assert call is not None
        assert call.header(NAME) == "the same"
