"""Load on prepaid keys while the gateway is killed again and again, and the books that clients keep meanwhile."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.ledger.credits import Credits
from forebay.ledger.database import Database, open_store
from forebay.ledger.key import NewKey
from forebay.ledger.keys import By, KeyStore
from forebay.ledger.statement import balance
from forebay.ledger.verify import verify
from tests.faults.rig.gateway import GatewayProcess, config_for
from tests.faults.rig.waiting import eventually

PROMPT = "Say how far the water falls behind the dam, and what it drives on its way."
WHOLE_TOKENS, STREAM_TOKENS = 8, 60
MOST_IN = 60  # prompt tokens of one request, generously
PLENTY = 10_000_000


@dataclass
class Book:
    """What one key's client knows that it used."""

    key: str
    secret: str
    stream: bool
    received: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens
    unsure: int = 0  # tokens that may have been used without the client's knowledge
    refused: int = 0

    def since(self, instant: float) -> int:
        return sum(tokens for at, tokens in self.received if at > instant)

    @property
    def total(self) -> int:
        return sum(tokens for _, tokens in self.received)


class Crowd:
    """One client for each book, that asks again as soon as it has its answer."""

    def __init__(self, books: list[Book]) -> None:
        self.books = books
        self.port = 0
        self._go, self._over = threading.Event(), threading.Event()
        self._quiet = threading.Barrier(len(books) + 1)
        self.failures: list[AssertionError] = []
        self._threads = [threading.Thread(target=self._run, args=(book,), daemon=True) for book in books]
        for thread in self._threads:
            thread.start()

    def resume(self, port: int) -> None:
        self.port = port
        self._go.set()

    def pause(self) -> None:
        """Returns when no client waits for anything; call it once the gateway is dead."""
        self._go.clear()
        self._quiet.wait(30)

    def stop(self) -> None:
        self._over.set()
        self._go.set()
        for thread in self._threads:
            thread.join(10)

    def _run(self, book: Book) -> None:
        while True:
            self._go.wait()
            while self._go.is_set() and not self._over.is_set():
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
                try:
                    (self._stream if book.stream else self._ask)(connection, book)
                except (OSError, http.client.HTTPException):
                    time.sleep(0.005)  # the gateway is dead: until it is said so
                except AssertionError as error:
                    self.failures.append(error)
                    time.sleep(0.02)
                finally:
                    connection.close()
            if self._over.is_set():
                return
            self._quiet.wait(30)

    @property
    def answers(self) -> int:
        assert not self.failures, self.failures
        return sum(len(book.received) for book in self.books)

    def _post(self, connection: http.client.HTTPConnection, book: Book, **body: Any) -> http.client.HTTPResponse | None:
        messages = [{"role": "user", "content": PROMPT}]
        text = json.dumps({"model": "m", "messages": messages, "stream": book.stream} | body)
        connection.request(
            "POST", "/v1/chat/completions", text,
            {"authorization": f"Bearer {book.secret}", "content-type": "application/json"},
        )  # fmt: skip
        response = connection.getresponse()
        if response.status == 200:
            return response
        said = response.read()
        assert response.status in {429, 503}, f"{response.status} {said!r}"
        book.refused += 1
        time.sleep(0.02)
        return None

    def _ask(self, connection: http.client.HTTPConnection, book: Book) -> None:
        book.unsure += MOST_IN + WHOLE_TOKENS
        response = self._post(connection, book, max_tokens=WHOLE_TOKENS)
        if response is not None:
            usage = json.loads(response.read())["usage"]
            book.received.append((time.monotonic(), usage["total_tokens"]))
        book.unsure -= MOST_IN + WHOLE_TOKENS  # not after an exception: then nobody knows

    def _stream(self, connection: http.client.HTTPConnection, book: Book) -> None:
        """Until its end every event is one token; then the usage is known, and takes the place of these."""
        book.unsure += MOST_IN + STREAM_TOKENS
        response = self._post(connection, book, max_tokens=STREAM_TOKENS, stream_options={"include_usage": True})
        seen, whole = len(book.received), response is None
        while response is not None and (line := response.readline()):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if usage := event.get("usage"):
                book.received[seen:] = [(time.monotonic(), usage["total_tokens"])]
                whole = True
            elif event["choices"][0]["delta"].get("content"):
                book.received.append((time.monotonic(), 1))
        if whole:  # a stream that was cut short may have used more than was received
            book.unsure -= MOST_IN + STREAM_TOKENS


@dataclass
class Report:
    """What a row of crashes has cost."""

    rounds: int = 0
    starts_s: list[float] = field(default_factory=list)
    windows_s: list[float] = field(default_factory=list)  # how much of the last moments was lost, at each kill
    lost_tokens: int = 0
    used_tokens: int = 0


def crash(
    folder: Path, url: str, engine: str, *, rounds: int, window_s: float, seed: int, answers: tuple[int, int]
) -> Report:
    """Kill the gateway `rounds` times under load, after so many answers or events, and compare the ledger with the
    clients' books each time.

    What was received earlier than `window_s` before a kill must be in the ledger; nothing that was never used may be.
    """
    chance, report = random.Random(seed), Report()
    store = open_store(url)
    books = [_book(store, f"{'stream' if stream else 'whole'}-{n}", stream, PLENTY) for stream in (False, True)
             for n in range(4)]  # fmt: skip
    poor = _book(store, "poor", False, 2_000)
    crowd = Crowd([*books, poor])
    forgiven = dict.fromkeys((book.key for book in crowd.books), 0)
    config = config_for(engine, slots=64, ledger={"journal": str(folder / "journal"), "lease_tokens": 2000})
    config["keys"] = {"anonymous": False, "store": url}
    gateway = _start(config, folder, report)
    try:
        for _ in range(rounds):
            enough = crowd.answers + chance.randint(*answers)
            crowd.resume(gateway.port)
            eventually(lambda: crowd.answers >= enough, within=60, what="load")  # noqa: B023 - called at once
            killed_at = time.monotonic()
            gateway.kill()
            crowd.pause()
            gateway = _start(config, folder, report)
            for book in crowd.books:
                _compare(store, book, killed_at, window_s, forgiven, report)
            report.rounds += 1
        crowd.resume(gateway.port)
        crowd.stop()
        gateway.stop()
    finally:
        gateway.kill()
    _settle(store, crowd.books, forgiven, report)
    store.close()
    return report


def _book(store: Database, name: str, stream: bool, tokens: int) -> Book:
    made = KeyStore(store).create(NewKey(name=name, prepaid=True), By("test"))
    assert made.secret is not None
    Credits(store).top_up(made.key.id, tokens, idempotency=f"first-{name}", actor="test")
    return Book(made.key.id, made.secret, stream)


def _start(config: dict[str, Any], folder: Path, report: Report) -> GatewayProcess:
    began = time.monotonic()
    gateway = GatewayProcess(config, folder / "gateway", ready=False)
    report.starts_s.append(time.monotonic() - began)
    eventually(gateway.ready, within=20, what="the engine ready")
    return gateway


def _compare(
    store: Database, book: Book, killed_at: float, window_s: float, forgiven: dict[str, int], report: Report
) -> None:
    spent, known = balance(store, book.key).spent, book.total - forgiven[book.key]
    lost = max(0, known - spent)
    late = book.since(killed_at - window_s)
    assert lost <= late, f"{book}: {lost} tokens lost, of which {late} were of the last {window_s} s"
    assert spent <= known + book.unsure, f"{book}: {spent} tokens spent, {known} and {book.unsure} known and unsure"
    forgiven[book.key] += lost
    report.lost_tokens += lost
    if lost:
        report.windows_s.append(killed_at - _since_when(book, lost))


def _since_when(book: Book, lost: int) -> float:
    """The instant since which so many tokens were received: at best, these were lost."""
    for at, tokens in reversed(book.received):
        lost -= tokens
        if lost <= 0:
            return at
    return 0.0


def _settle(store: Database, books: list[Book], forgiven: dict[str, int], report: Report) -> None:
    assert verify(store) == []
    for book in books:
        found = balance(store, book.key)
        assert (found.held, found.debt) == (0, 0), found
        assert found.spent <= found.topped_up, found
        known = book.total - forgiven[book.key]
        assert known <= found.spent <= known + book.unsure, f"{book.key}: {found.spent} spent, {known} known"
        report.used_tokens += found.spent
