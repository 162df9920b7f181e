"""What is asked of a gateway in many cases: that a refusal touched nothing, that it still serves, what it charged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import scripts
from .backend import FakeBackend
from .client import Answer, RawClient, ask, chat, wire
from .gateway import GatewayProcess


@contextmanager
def untouched(gateway: GatewayProcess, backend: FakeBackend) -> Iterator[None]:
    """What happens inside takes no slot and no place, reaches no engine, and disturbs no request after it."""
    before, calls = gateway.snapshot(), len(backend.calls)
    yield
    gateway.settles()
    after = gateway.snapshot()
    assert len(backend.calls) == calls, "the engine was contacted"
    admitted = [
        sum(count for outcome, count in each["outcomes"].items() if outcome != "shed") for each in (before, after)
    ]
    assert admitted[0] == admitted[1], "it was admitted"
    assert gateway.alive


def still_serves(gateway: GatewayProcess, **how: Any) -> None:
    """An ordinary request gets its ordinary answer."""
    assert ask(gateway.port, chat(), **how).status == 200


def head_of(length: int | None = None, *more: tuple[str, str], **how: Any) -> bytes:
    """The head of a POST whose body does not follow; `length` is declared, None declares nothing."""
    declared = [] if length is None else [("content-length", str(length))]
    return wire(headers=[("content-type", "application/json"), *declared, *more], **how)


def exchange(gateway: GatewayProcess, data: bytes, *, within: float = 5.0, method: str = "POST") -> Answer:
    """Send these bytes on a new connection and read one answer."""
    with RawClient(gateway.port) as client:
        client.send(data)
        return client.read_answer(within, method=method)


def charged(gateway: GatewayProcess, backend: FakeBackend) -> int:
    """Tokens that key a was charged beyond key b, which did nothing; both have the same budget."""
    backend.script = scripts.ordinary
    left = [
        int(ask(gateway.port, chat(max_tokens=10), key=key).header("x-ratelimit-remaining-tokens") or 0)
        for key in ("sk-a", "sk-b")
    ]
    return left[1] - left[0]
