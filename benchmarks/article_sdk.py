"""What the official clients do after a 429: attempts and the pauses between them, against a server on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

ANSWERS: dict[str, dict[str, str]] = {
    "no header": {},
    "retry-after: 2": {"retry-after": "2"},
    "retry-after-ms: 300": {"retry-after-ms": "300", "retry-after": "1"},
    "retry-after: 90": {"retry-after": "90"},
    "x-should-retry: false": {"x-should-retry": "false"},
}
"""Headers of the 429s, by what they are called in the result. 90 s is given no time to pass: see `HASTE`."""

HASTE = 12.0
"""A client that has not come back by now waits for longer."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What one client did: attempts in all (the first included), pauses in seconds."""

    client: str
    answer: str
    attempts: int
    pauses_s: tuple[float, ...]
    gave_up: bool


@contextmanager
def refusing(headers: dict[str, str]) -> Iterator[tuple[str, list[float]]]:
    """A server that answers every POST with 429; yields its URL and the growing list of arrival times."""
    arrivals: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            arrivals.append(time.monotonic())
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = b'{"error":{"message":"too many","type":"rate_limit_error","code":"rate_limit_exceeded"}}'
            self.send_response(429)
            for name, value in {
                **headers,
                "content-type": "application/json",
                "content-length": str(len(body)),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Nothing: stderr is for progress."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", arrivals
    finally:
        server.shutdown()
        server.server_close()


def _openai(url: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x")
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])


def _anthropic(url: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="x")
    client.messages.create(model="m", max_tokens=8, messages=[{"role": "user", "content": "hello"}])


CLIENTS: dict[str, Callable[[str], None]] = {"openai": _openai, "anthropic": _anthropic}


def behaviours(answers: dict[str, dict[str, str]] = ANSWERS) -> list[Behaviour]:
    """Every client against every answer, one after the other: some half a minute."""
    return [
        _behaviour(name, call, answer, headers) for answer, headers in answers.items() for name, call in CLIENTS.items()
    ]


def _behaviour(name: str, call: Callable[[str], None], answer: str, headers: dict[str, str]) -> Behaviour:
    ended = threading.Event()
    errors: list[Exception] = []

    def ask(url: str) -> None:
        try:
            call(url)
        except Exception as refusal:  # each client has a class of its own for it
            errors.append(refusal)
        ended.set()

    with refusing(headers) as (url, arrivals):
        # A daemon, because a client that waits for a minute and a half must not hold up the rest.
        threading.Thread(target=ask, args=(url,), daemon=True).start()
        gave_up = ended.wait(HASTE) and bool(errors)
        seen = list(arrivals)
    pauses = tuple(round(after - before, 3) for before, after in pairwise(seen))
    return Behaviour(name, answer, len(seen), pauses, gave_up)
