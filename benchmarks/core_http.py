"""The whole way of a request inside the process, without sockets, with and without estimator, limits, keys and ledger.

Each arm is a real gateway, made by `App` from a configuration; only the ends differ: bytes are handed to a client
connection's protocol and to that of an engine connection, whose transports keep what is written. The arms take turns
in one run. CPU time is that of the loop's thread; what the ledger's threads spend is given apart, by the request.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random
from shutil import copyfile
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest.mock import patch

import msgspec
import uvloop

from benchmarks import tables
from forebay.app import App
from forebay.config.load import loads
from forebay.core.admission.estimate import SETTLED
from forebay.core.model import Demand, Request, Usage
from forebay.engines.pool import Upstream
from forebay.ingress.http import peek as peek_module
from forebay.ingress.http.server import ServerConnection

if TYPE_CHECKING:
    from forebay.ledger.database import Database
    from forebay.ledger.keys import Created

KEYS: Final = 100_000
ACTIVE: Final = 1000
BLOCK: Final = 2000
"""Requests of one arm in a row."""
YIELD_EVERY: Final = 50
THREADS_S: Final = 3.0
THREADS_PER_S: Final = (500, 5000)
"""Requests per second at which the ledger's threads are looked at."""
TARGET_US: Final = 8.0
FILLED: Final = "filled.db"
"""The store that those of the arms are copies of."""

_TEXT = "The gate opens when the water behind it is high enough, and closes before the channel overflows. "
_BODY = b'{"model":"m","max_tokens":128,"messages":[{"role":"user","content":"%b"}]}' % (_TEXT * 9).encode()
_REPLY = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1767225600,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"It is measured twice."},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":187,"completion_tokens":60,"total_tokens":247}}'
)
ANSWER: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(_REPLY),
    _REPLY,
)

USUAL: Final = (
    "requests_per_minute = 100_000_000, tokens_per_minute = 10_000_000_000, tokens_per_second = 1_000_000_000, "
    "burst_s = 2.0, concurrency = 100_000"
)
EVERY: Final = (
    f"{USUAL}, input_tokens_per_minute = 10_000_000_000, output_tokens_per_minute = 10_000_000_000, "
    "weighted_tokens_per_minute = 10_000_000_000, tokens_per_day = 1_000_000_000_000, "
    "tokens_per_month = 10_000_000_000_000"
)
OF_GROUPS: Final = "requests_per_minute = 100_000_000, tokens_per_minute = 10_000_000_000, concurrency = 100_000"


@dataclass(frozen=True, slots=True)
class Arm:
    """One gateway. `active`: keys that call in turn, each at least once before the first round."""

    name: str
    title: str
    estimates: bool = True
    limits: str = ""  # of every key, as in a configuration
    stored: bool = False
    prepaid: bool = False
    active: int = 1
    warm: int = 0  # requests before the first round


BARE, CLAIMED = "bare", "store, 1,000"
"""What all are compared with, and the arm that the target is for."""
_STORE = f"a store of {KEYS:,} keys with those four, and their ledger"
ARMS: Final = (
    Arm(BARE, "no estimator, limits, keys or ledger", estimates=False),
    Arm("estimator", "the estimator"),
    Arm("usual", "estimator; requests/min, tokens/min, tokens/s and concurrency of a key", limits=USUAL),
    Arm("every", "estimator; nine limits of a key, three each of team, class and all", limits=EVERY),
    Arm("store", f"estimator; {_STORE}: one key calls", limits=USUAL, stored=True),
    Arm(CLAIMED, f"the same: {ACTIVE:,} keys in turn", limits=USUAL, stored=True, active=ACTIVE),
    Arm("store, learned", f"the same, when each key has had {SETTLED} answers, from which on few teach anything",
        limits=USUAL, stored=True, active=ACTIVE, warm=ACTIVE * SETTLED),
    Arm("prepaid", "the same: one key that pays with credit", limits=USUAL, stored=True, prepaid=True),
    Arm("store, every", f"the same: {ACTIVE:,} keys in turn, with all those limits", limits=EVERY, stored=True,
        active=ACTIVE),
    Arm("store, all", f"the same, four limits: all {KEYS:,} keys in turn, so that no head was read before",
        limits=USUAL, stored=True, active=KEYS),
)  # fmt: skip


class _Constant:
    """In place of an estimator: the same for all, and nothing to learn."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand

    def estimate(self, request: Request) -> Demand:  # noqa: ARG002
        return self._demand

    def learn(self, request: Request, usage: Usage) -> Usage:  # noqa: ARG002
        return usage


class _Wire(asyncio.Transport):
    """Keeps the last that was written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.last = b""
        self._closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes += 1
        self.last = bytes(data)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self._closed

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self._closed = True

    abort = close

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Line:
    """One client's connection to a gateway, and that gateway's connection to its engine."""

    def __init__(self, app: App, requests: Iterator[bytes]) -> None:
        self.client, self.wire = _Wire(), _Wire()
        self._server = ServerConnection(app.site)
        self._server.connection_made(self.client)
        pool = next(iter(app.engines.values())).connections
        self._upstream = Upstream(pool)
        self._upstream.connection_made(self.wire)
        pool.spare[:] = [self._upstream]
        self._requests = requests

    async def run(self, number: int) -> None:
        """So many requests, one after the other. Raises AssertionError for any that is not answered 200."""
        server, upstream, wire, client = self._server, self._upstream, self.wire, self.client
        for count, request in enumerate(islice(self._requests, number)):
            sent, answered = wire.writes, client.writes
            server.data_received(request)
            while wire.writes == sent:
                assert client.writes == answered, client.last
                await asyncio.sleep(0.001)  # it waits for its key's credit
            upstream.data_received(ANSWER)
            assert client.last.startswith(b"HTTP/1.1 200"), client.last
            if not count % YIELD_EVERY:
                await asyncio.sleep(0)


def _request(secret: str) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %b\r\naccept: */*\r\nuser-agent: bench/1\r\ncontent-length: %d\r\n\r\n%b"
    ) % (secret.encode(), len(_BODY), _BODY)


def config_text(arm: Arm, engine_port: int, folder: Path) -> str:
    """The configuration of an arm's gateway."""
    lines = [
        "[server]",
        "port = 0",
        "keep_alive_s = 3600",
        "[admin]",
        "port = 0",
        "[[engines]]",
        'name = "engine"',
        'metrics_path = ""',
    ]
    lines += [
        f'urls = ["http://127.0.0.1:{engine_port}"]',
        "concurrency = { limit = 64 }",
        "probe = { interval_s = 600 }",
    ]
    if arm.limits is EVERY:
        lines += ["[teams.t]", f"limits = {{ {OF_GROUPS} }}", "[classes.c]", f"limits = {{ {OF_GROUPS} }}"]
        lines += ["[limits]", f"all = {{ {OF_GROUPS} }}"]
    elif arm.limits:
        lines += ["[teams.t]", "[classes.c]"]
    if arm.limits:
        lines += ["[keys]"]
        if arm.stored:
            lines += [
                f'store = "sqlite:///{folder / arm.name}.db"',
                "[ledger]",
                f'journal = "{folder / arm.name}.journal"',
            ]
        else:
            lines += ["[[keys.static]]", 'id = "k"', f'secret = "{SECRET}"', 'class = "c"', 'team = "t"']
            lines += [f"limits = {{ {arm.limits} }}"]
    return "\n".join(lines) + "\n"


SECRET: Final = "sk-fb-aaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"


class Secrets(NamedTuple):
    """What the owners of a store's keys send."""

    usual: list[str]
    every: list[str]
    prepaid: str


def fill(url: str, keys: int) -> Secrets:
    """A store with so many keys with the usual limits, ACTIVE with all of them, and one that pays with credit.

    Of each kind one is made as people make them; the others are copies of its row with ids and hashes of their own.
    """
    from forebay.config.schema import Limits
    from forebay.ledger.credits import Credits
    from forebay.ledger.database import open_store
    from forebay.ledger.key import NewKey
    from forebay.ledger.keys import By, KeyStore

    usual, every = (
        msgspec.toml.decode(f"limits = {{ {text} }}".encode(), type=dict[str, Limits])["limits"]
        for text in (USUAL, EVERY)
    )
    database = open_store(url)
    try:
        store = KeyStore(database)

        def made(name: str, limits: Limits, *, prepaid: bool = False) -> Created:
            asked = NewKey(name=name, team="t", class_="c", limits=limits, prepaid=prepaid)
            return store.create(asked, By("benchmark"))

        prepaid = made("prepaid", usual, prepaid=True)
        Credits(database).top_up(prepaid.key.id, 10**12, idempotency="benchmark", actor="benchmark")
        assert prepaid.secret is not None
        return Secrets(
            _copied(database, made("usual", usual), keys),
            _copied(database, made("every", every), ACTIVE),
            prepaid.secret,
        )
    finally:
        database.close()


def _copied(database: Database, made: Created, number: int) -> list[str]:
    """What the owners of so many keys send: this one, and copies of it."""
    from sqlalchemy import insert, select

    from forebay.ledger import tables as schema
    from forebay.ledger.credential import mint

    assert made.secret is not None
    minted = [mint() for _ in range(1, number)]
    with database.begin() as connection:
        query = select(schema.keys).where(schema.keys.c.id == made.key.id)
        row = dict(connection.execute(query).mappings().one())
        copies = [
            row | {"id": one.public_id, "verifier": one.verifier, "name": f"{made.key.name}-{place}"}
            for place, one in enumerate(minted)
        ]
        if copies:
            connection.execute(insert(schema.keys), copies)
    return [made.secret, *(one.credential for one in minted)]


def _unpriced(arm: Arm) -> AbstractContextManager[object]:
    """Without an estimator a body's text is not priced either."""
    return nullcontext() if arm.estimates else patch.object(peek_module, "tokens_per_byte", lambda *_: 0.25)


async def _healthy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The engine, as far as probes see it."""
    await reader.readline()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    writer.close()


async def _gateway(arm: Arm, engine_port: int, folder: Path, known: Secrets) -> tuple[App, Line]:
    secrets = [SECRET]
    if arm.stored:
        copyfile(folder / FILLED, folder / f"{arm.name}.db")
        like = known.every if arm.limits is EVERY else known.usual
        secrets = [known.prepaid] if arm.prepaid else Random(1).sample(like, arm.active)
    app = App(loads(config_text(arm, engine_port, folder), name=arm.name, environment={}).config)
    await app.start()
    line = Line(app, cycle([_request(secret) for secret in secrets]))
    if not arm.estimates:
        request = Request("k", "m", text_bytes=len(_BODY), max_output_tokens=128)
        app.pipeline.estimator = _Constant(app.pipeline.estimator.estimate(request))  # type: ignore[assignment]
    return app, line


async def _threads_ms(line: Line, per_s: int) -> float:
    """CPU in ms a second that all threads but the loop's spend, the ledgers', at so many requests per second."""
    began, spent, sent = time.monotonic(), time.thread_time_ns() - time.process_time_ns(), 0
    while (elapsed := time.monotonic() - began) < THREADS_S:
        due = int(elapsed * per_s)
        await line.run(due - sent)
        sent = due
        await asyncio.sleep(0.005)
    spent += time.process_time_ns() - time.thread_time_ns()
    return spent / 1e6 / (time.monotonic() - began)


async def _measured(
    rounds: int, folder: Path, say: Callable[[str], None]
) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
    engine = await asyncio.start_server(_healthy, "127.0.0.1", 0)
    port = engine.sockets[0].getsockname()[1]
    gateways: dict[Arm, tuple[App, Line]] = {}
    found: dict[str, list[float]] = {arm.name: [] for arm in ARMS}
    try:
        say(f"making a store of {KEYS:,} keys")
        known = fill(f"sqlite:///{folder / FILLED}", KEYS)
        for arm in ARMS:
            gateways[arm] = await _gateway(arm, port, folder, known)
        for number in range(rounds + 1):
            for arm, (_, line) in gateways.items():
                with _unpriced(arm):
                    if not number:  # each key has called before
                        await line.run(max(BLOCK, min(arm.active, 20_000), arm.warm))
                        continue
                    before = time.thread_time_ns()
                    await line.run(BLOCK)
                    found[arm.name].append((time.thread_time_ns() - before) / BLOCK / 1000)
            say(f"round {number}/{rounds}" if number else "warm")
        await asyncio.sleep(2.0)  # the last of it is posted
        lines = [next(line for arm, (_, line) in gateways.items() if arm.name == name) for name in ("store", CLAIMED)]
        idle = await _threads_ms(lines[0], 0)
        ledger = [
            {"per_s": per_s, "ms": [await _threads_ms(line, per_s) - idle for line in lines]} for per_s in THREADS_PER_S
        ]
        ledger.insert(0, {"per_s": 0, "ms": [idle / sum(arm.stored for arm in ARMS)]})
    finally:
        for app, _ in gateways.values():
            await app.close()
        engine.close()
    return found, ledger


def measure(rounds: int, folder: Path, say: Callable[[str], None]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """CPU µs per request of every arm, and what each adds to the bare one within the same round; and what the threads
    of a ledger spend by the rate of requests, of one key and of ACTIVE in turn."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found, ledger = runner.run(_measured(rounds, folder, say))
    return [
        {
            "name": arm.name,
            "title": arm.title,
            "us": _spread(found[arm.name]),
            "added_us": _spread(own - bare for own, bare in zip(found[arm.name], found[BARE], strict=True)),
        }
        for arm in ARMS
    ], ledger


def _spread(values: Iterable[float]) -> dict[str, Any] | None:
    spread = tables.Spread.of(values)
    return None if spread is None else asdict(spread)


def memory(folder: Path) -> dict[str, float]:
    """Bytes per key of the gateway's resident memory: known, and after each has called once.

    A process of its own for a store of one usual key and for one of KEYS; the difference is the keys'.
    """
    found = []
    for keys in (1, KEYS):
        arm = _of_memory(keys)
        secrets = fill(f"sqlite:///{folder / arm.name}.db", keys).usual
        (folder / f"{arm.name}.secrets").write_text("\n".join(secrets))
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found.append(pool.submit(_resident_of, folder, keys).result())
    few, many = found
    return {name: (many[name] - few[name]) / (KEYS - 1) for name in few}


def _of_memory(keys: int) -> Arm:
    return Arm(f"memory-{keys}", "", limits=USUAL, stored=True, active=keys)


def _resident_of(folder: Path, keys: int) -> dict[str, float]:
    async def run() -> dict[str, float]:
        engine, arm = await asyncio.start_server(_healthy, "127.0.0.1", 0), _of_memory(keys)
        text = config_text(arm, engine.sockets[0].getsockname()[1], folder)
        app = App(loads(text, name=arm.name, environment={}).config)
        await app.start()
        found = {"known_bytes": _resident()}
        with (folder / f"{arm.name}.secrets").open() as secrets:
            await Line(app, (_request(line.strip()) for line in secrets)).run(keys)
        found["called_bytes"] = _resident()
        await app.close()
        engine.close()
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def _resident() -> float:
    """Pages of this process that are in memory, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096.0
