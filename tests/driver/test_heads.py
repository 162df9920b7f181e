"""Heads that a connection sends again: known by their bytes, and still each request's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

import pytest

from forebay.core.limits.fixed import FixedConfig
from forebay.core.pipeline import PipelineConfig
from forebay.core.pool import PoolConfig

from .test_gateway import Quiet
from .wire import ScriptedEngine, WiredGateway, answer, post

COMPLETION = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
Seen = list[tuple[bytes | None, str]]


@pytest.fixture
def seen() -> Seen:
    """What the engine got: a header of the client's, and its text."""
    return []


@pytest.fixture
def gateway(seen: Seen) -> Iterator[WiredGateway]:
    def answers(engine: ScriptedEngine, headers: dict[bytes, bytes], body: bytes) -> None:
        seen.append((headers.get(b"x-tag"), json.loads(body)["messages"][0]["content"]))
        engine.send(answer(COMPLETION))

    pool = PoolConfig("e", ("e/0",), limit=FixedConfig(limit=4))
    made = WiredGateway(PipelineConfig((pool,)), Random(1), Quiet(), answers)
    yield made
    made.close()


def asks(text: str, *headers: str) -> bytes:
    return post({"model": "m", "messages": [{"role": "user", "content": text}]}, *headers)


@pytest.mark.parametrize("seed", range(20))
def test_each_request_is_passed_on_with_its_own_head_and_body(gateway: WiredGateway, seen: Seen, seed: int) -> None:
    """Whether the head is the last one again, one known from before, one that differs by a byte, or in two pieces."""
    chance, clients, sent = Random(seed), [gateway.client() for _ in range(2)], []
    for number in range(40):
        tag = chance.choice(["a", "b", "a: 1", ""])
        text = f"{number} " + "word\r\n\r\n " * chance.choice([0, 1, 40, 1_000])
        data = asks(text, *([f"x-tag: {tag}"] if tag else []))
        cut = chance.choice([len(data), len(data), len(data), chance.randrange(1, len(data))])
        client = chance.choice(clients)
        client.got = b""
        client.transport.write(data[:cut])
        client.transport.write(data[cut:])
        gateway.run_to(number + 1)
        assert client.status == 200
        sent.append((tag.encode() or None, text))
    assert seen == sent


def test_a_known_head_is_judged_anew_when_keys_change(gateway: WiredGateway, seen: Seen) -> None:
    client = gateway.client()
    for number in range(3):
        client.got = b""
        client.transport.write(asks("hi"))
        gateway.run_to(number + 1)
        assert client.status == 200
    gateway.site.reload({}, None, 503)
    client.got = b""
    client.transport.write(asks("hi"))
    gateway.run_to(5)
    assert client.status == 401
    assert len(seen) == 3


@pytest.mark.parametrize("size", ["+2", "02x", "9999999999", "-1"])
def test_a_length_that_is_none_takes_the_long_way(gateway: WiredGateway, seen: Seen, size: str) -> None:
    """The digits are all that may differ in a head that is known."""
    client = gateway.client()
    for number in range(2):
        client.got = b""
        client.transport.write(asks("hi"))
        gateway.run_to(number + 1)
        assert client.status == 200
    client.got = b""
    head, _, body = asks("hi").partition(b"\r\n\r\n")
    client.transport.write(head.replace(b"length: %d" % len(body), b"length: " + size.encode()) + b"\r\n\r\n" + body)
    gateway.run_to(5)
    assert 400 <= client.status < 500
    assert len(seen) == 2
