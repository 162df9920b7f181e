"""D. Queue and admission gate, second part: bytes, pile-ups, estimates, recovery, settings."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from forebay.core.instant import SECOND
from forebay.sim.records import COMPLETED
from forebay.sim.scenario import ClientSpec, FaultSpec

from . import worlds
from .rig import scripts
from .rig.backend import FakeBackend
from .rig.checks import head_of
from .rig.client import ask, chat, wire
from .rig.crowd import Crowd
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, to_toml
from .rig.waiting import eventually, in_parallel

MEGABYTE = 1024 * 1024
PATIENT: dict[str, Any] = {"mode": "hybrid", "wait_budget_ms": 30_000}


def status(gateway: GatewayProcess) -> dict[str, Any]:
    shown = json.loads(gateway.admin("/api/v1/status"))
    assert isinstance(shown, dict)
    return shown


# ---- D-07: bytes --------------------------------------------------------------------------------------------------


def test_d07_waiting_bodies_are_bounded_in_bytes(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-07: room for 20 requests and for 60 MB: of 20 bodies of 20 MB three wait, the others are refused unread."""
    size, room = 20 * MEGABYTE, 63 * MEGABYTE
    gateway = start_gateway(
        config_for(
            backend, slots=1, places=20, queue={"bytes_limit": room, "tokens_limit": 1 << 40},
            server={"max_buffered_body_bytes": 2 * room}, **PATIENT,
        )
    )  # fmt: skip
    ask(gateway.port)
    backend.script = scripts.silent
    before, most = gateway.rss_bytes(), 0
    body = json.dumps(chat() | {"pad": "x" * size}).encode()
    with Crowd(gateway.port, 20) as crowd:
        for number in range(20):
            crowd.send(number, head_of(len(body)))
        for number in range(20):
            crowd.read(0.02)
            if number not in crowd.heads:
                crowd.clients[number].send(body)
            most = max(most, gateway.rss_bytes())
        eventually(lambda: gateway.gauges() == (1, 3), 5)
        crowd.read(0.5)
        most = max(most, gateway.rss_bytes())
        assert len(crowd.with_status(503)) == 16
        assert {head.get("x-forebay-reason") for head in crowd.heads.values()} == {"queue_full"}
        assert status(gateway)["buffered_body_bytes"] <= 4 * len(body)
        assert most - before < 2 * room
    gateway.settles()


def test_d07_trickled_bodies_are_bounded_in_bytes(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-07: 300 clients each declare 20 MB and trickle: what is held stays under server.max_buffered_body_bytes, those
    beyond it are refused, and whoever has a small request is served beside them."""
    bound, piece = 40 * MEGABYTE, b"x" * (256 * 1024)
    gateway = start_gateway(config_for(backend, slots=2, server={"max_buffered_body_bytes": bound}, **PATIENT))
    ask(gateway.port)
    before, most, held = gateway.rss_bytes(), 0, 0
    with Crowd(gateway.port, 300) as crowd:
        for number in range(300):
            crowd.send(number, head_of(20 * MEGABYTE))
        for number in range(300):
            if number not in crowd.heads:
                crowd.clients[number].send(piece)
            crowd.read(0)
            if number % 20 == 0:
                most, held = max(most, gateway.rss_bytes()), max(held, status(gateway)["buffered_body_bytes"])
        crowd.read(1.0, until=300 - bound // len(piece))
        most, held = max(most, gateway.rss_bytes()), max(held, status(gateway)["buffered_body_bytes"])
        assert held <= bound + len(piece)
        assert most - before < 2 * bound
        refused = crowd.with_status(413, 503)
        assert len(refused) == len(crowd.heads) >= 300 - bound // len(piece) - 1
        assert all(crowd.heads[number].get("retry-after") for number in crowd.with_status(503))
        assert gateway.gauges() == (0, 0), "who is still sending holds no place"
    eventually(lambda: status(gateway)["buffered_body_bytes"] == 0)
    assert ask(gateway.port).status == 200


# ---- D-08, D-16: pile-ups -----------------------------------------------------------------------------------------


async def _one(port: int, body: bytes, patience_s: float) -> tuple[int, str]:
    """(status, reason) of one request on a connection of its own; (0, how) when none came."""
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(body)
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                await reader.read(-1)
            finally:
                writer.transport.abort()
    except TimeoutError:
        return 0, "no answer"
    except (OSError, asyncio.IncompleteReadError) as error:
        return 0, type(error).__name__
    reason = next((line.partition(": ")[2] for line in head.split("\r\n") if line.startswith("x-forebay-reason")), "")
    return int(head.split(" ", 2)[1]), reason


def barrage(
    ports: Sequence[int], rate: float, seconds: float, *, patience_s: float = 15.0, api_key: str | None = None
) -> Counter[tuple[int, str]]:
    """Open-loop requests, spread over the ports in turn; the number of each kind of answer."""

    async def all_of_it() -> list[tuple[int, str]]:
        request = wire(chat(), headers=[("connection", "close")], key=api_key)
        began, tasks = time.monotonic(), []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            tasks.append(asyncio.create_task(_one(ports[number % len(ports)], request, patience_s)))
        return list(await asyncio.gather(*tasks))

    return Counter(asyncio.run(all_of_it()))


def test_d08_a_pile_up_in_front_of_the_queue(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-08: nothing is decided for a second while 300 requests come in each second. All of them are decided at once
    afterwards: the queue's bound holds, the rest gets 503, memory stays.

    Keys and limits are in this process, which cannot wait for itself; here the whole gateway is frozen instead. A
    store that slows down is to be tested when there is one."""
    keys = [key("a", requests_per_minute=1_000_000)]
    gateway = start_gateway(config_for(backend, slots=4, places=8, keys=keys, **PATIENT))
    backend.script = scripts.says(after=0.3)
    assert ask(gateway.port, key="sk-a").status == 200
    before, fds = gateway.rss_bytes(), gateway.open_fds()

    def frozen() -> float:
        gateway.signal(signal.SIGSTOP)
        try:
            time.sleep(1.0)  # how long the gateway stands still: the case itself
        finally:
            gateway.signal(signal.SIGCONT)
        return time.monotonic()

    def load() -> tuple[Counter[tuple[int, str]], float]:
        return barrage([gateway.port], 300, 1.0, api_key="sk-a"), time.monotonic()

    results = in_parallel(lambda work: work(), [frozen, load])
    thawed, (answers, done) = results[0], results[1]  # type: ignore[misc]
    assert set(answers) <= {(200, ""), (503, "queue_full"), (503, "queue_wait")}, answers
    assert answers.total() == 300
    assert 12 <= answers[200, ""] <= 40
    assert done - thawed < 3.0  # type: ignore[operator]
    assert gateway.rss_bytes() - before < 40 * MEGABYTE
    gateway.settles()
    eventually(lambda: gateway.open_fds() <= fds + 10)
    assert ask(gateway.port, key="sk-a").status == 200
    assert backend.high_water <= 4


def test_d08_connections_are_capped(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-08: accepted and undecided are bounded by server.max_connections: beyond it a connection is closed at once."""
    gateway = start_gateway(config_for(backend, server={"max_connections": 50}))
    with Crowd(gateway.port, 80) as crowd:
        for number in range(80):
            crowd.send(number, b"POST /v1/chat/completions HTTP/1.1\r\n")
        crowd.read(1.0, until=30)
        assert len(crowd.ended) == 30
        assert not crowd.heads
    eventually(lambda: ask(gateway.port).status == 200)


def _every_request_gets_an_answer(gateways: list[GatewayProcess], backend: FakeBackend, rate: float, s: float) -> None:
    answers = barrage([gateway.port for gateway in gateways], rate, s)
    assert set(answers) <= {(200, ""), (503, "queue_full"), (503, "queue_wait"), (503, "expired")}, answers
    assert answers.total() == int(rate * s)
    assert answers[200, ""] >= 10
    for gateway in gateways:
        gateway.settles()
        eventually(lambda gateway=gateway: status(gateway)["connections"] == 0, 5)
    assert sum(gateway.snapshot()["offered"] for gateway in gateways) == answers.total()
    assert not backend.open_calls


def test_d16_no_request_is_left_without_an_answer(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-16: two processes before one backend, Q small, 400 a second for 1.5 s: as many answers as requests.

    A gateway is one process; several of them are several gateways."""
    gateways = [start_gateway(config_for(backend, slots=2, places=2)) for _ in range(2)]
    backend.script = scripts.says(after=0.05)
    _every_request_gets_an_answer(gateways, backend, 400, 1.5)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_d16_two_minutes(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-16 at its full size: four processes, 3,000 requests a minute for two minutes."""
    gateways = [start_gateway(config_for(backend, slots=2, places=2)) for _ in range(4)]
    backend.script = scripts.says(after=0.2)
    _every_request_gets_an_answer(gateways, backend, 50, 120)


# ---- D-10: shares -------------------------------------------------------------------------------------------------

CLASSES = """
[admission]
fair_share = true
[classes.gold]
weight = 3
[classes.basic]
weight = 1
[keys]
anonymous = false
[[keys.static]]
id = "a"
secret = "sk-a"
class = "gold"
[[keys.static]]
id = "b"
secret = "sk-b"
class = "basic"
"""


def test_d10_the_share_of_a_class_is_configured(tmp_path: Path) -> None:
    """D-10 for 60 s: where classes are to share, they get weights and not priorities. Three parts and one of what is
    completed, with both asking for twice all of it; nobody waits for ever."""
    fixed = 'kind = "fixed"\nlimit = 16'
    full = worlds.capacity(fixed, seats=16)
    load = worlds.trace(tmp_path / "load.csv", [(0, 60, 2 * full), (0, 60, 2 * full)], keys=["a", "b"])
    run = worlds.simulation(load, concurrency=fixed, sections=CLASSES, seats=16)
    run.run()
    records = run.records
    done = Counter(
        records.keys[records.key[row]]
        for row in range(len(records))
        if records.outcome[row] == COMPLETED and records.done_ns[row] > 10 * SECOND
    )
    assert done["a"] / done["b"] == pytest.approx(3, rel=0.2)
    assert done.total() >= 0.9 * full * 50
    assert all(records.done_ns[row] - records.intended_ns[row] < 5 * SECOND for row in range(len(records)))


# ---- D-13: estimates ----------------------------------------------------------------------------------------------


def test_d13_a_fresh_process(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-13: wait budget 50 ms. The first request is served, eight at once fill the slots, and when answers take ten
    times as long as learnt, they go on being made at that pace."""
    gateway = start_gateway(config_for(backend, slots=4, wait_budget_ms=50))
    backend.script = scripts.says(after=0.04)
    assert ask(gateway.port).status == 200
    gateway.settles()
    at_once = [answer.status for answer in in_parallel(lambda _: ask(gateway.port), range(8))]
    assert set(at_once) <= {200, 503}
    assert at_once.count(200) >= 4
    for _ in range(5):
        assert ask(gateway.port).status == 200, "an empty system refuses nobody"
    backend.script = scripts.says(after=0.4)
    began = time.monotonic()
    done: list[float] = []

    def insists(_: int) -> None:
        while time.monotonic() < began + 1.6:
            if ask(gateway.port).status == 200:
                done.append(time.monotonic() - began)
            else:
                time.sleep(0.02)  # a caller that insists, not one that spins

    in_parallel(insists, range(10))
    per_turn = Counter(int(at / 0.8) for at in done)
    # Ten a second is what four slots make: at least half of that in each 0.8 s.
    assert all(per_turn[turn] >= 4 for turn in range(2)), per_turn
    assert len(done) >= 0.75 * 10 * 1.6


@pytest.mark.parametrize(("load", "seed"), [(1.5, 1), (3.0, 2), (10.0, 3)])
def test_d13_ten_times_slower_under_any_overload(tmp_path: Path, load: float, seed: int) -> None:
    """D-13 at scale: untrained, a wait budget of 50 ms, and steps ten times as long from the tenth second on."""
    fixed = 'kind = "fixed"\nlimit = 8'
    full = worlds.capacity(fixed)
    run = worlds.simulation(
        worlds.trace(tmp_path / "load.csv", [(0, 60, load * full)], seed=seed),
        concurrency=fixed,
        sections="[admission]\nwait_budget_ms = 50",
        faults=[FaultSpec(kind="slow", from_s=10, factor=10)],
        seed=seed,
    )
    run.run()
    records = run.records
    assert records.outcome[0] == COMPLETED, "the first request is served"
    done = Counter(
        int(at / SECOND) // 5 for at, outcome in zip(records.done_ns, records.outcome, strict=True)
        if outcome == COMPLETED
    )  # fmt: skip
    for turn in range(12):
        now = full if turn < 2 else full / 10
        assert done[turn] >= 0.6 * now * 5, f"from {turn * 5} s: {done}"


# ---- D-15: after the burst ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fixed", "guarded"])
@pytest.mark.parametrize("retry", ["sdk", "naive"])
def test_d15_recovers_when_the_burst_is_over(tmp_path: Path, retry: str, kind: str) -> None:
    """D-15: twice the capacity for 30 s, from callers that leave after 5 s and retry; then one a second. Goodput is at
    least 80 % of the capacity during it, and 10 s later everybody is served as fast as when nobody else is there."""
    concurrency = f'kind = "{kind}"\nlimit = 8'
    full = worlds.capacity(concurrency)
    clients = ClientSpec(retry=retry, patience_s=5.0)  # type: ignore[arg-type]
    run = worlds.simulation(
        worlds.trace(tmp_path / "load.csv", [(0, 30, 2 * full), (30, 90, 1)]), concurrency=concurrency, clients=clients
    )
    run.run()
    records = run.records
    rows = range(len(records))
    served = [row for row in rows if records.outcome[row] == COMPLETED]
    within = [row for row in served if 2 * SECOND <= records.done_ns[row] < 30 * SECOND]
    assert len(within) >= 0.8 * full * 28
    after = [row for row in rows if records.intended_ns[row] >= 40 * SECOND]
    assert len(after) > 30
    assert all(records.outcome[row] == COMPLETED and records.attempts[row] == 1 for row in after)
    latencies = sorted(records.done_ns[row] - records.intended_ns[row] for row in after)
    alone = latencies[0]
    assert latencies[int(0.9 * len(latencies))] <= 1.3 * alone, "as fast as unloaded"


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_d15_live(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-15 live: 20 a second can be served, 40 come for 30 s from callers that retry three times, then one a second."""
    gateway = start_gateway(config_for(backend, slots=2))
    backend.script = scripts.says(after=0.1)
    began = time.monotonic()
    chance = Random(15)

    async def caller(at: float) -> tuple[float, int, float]:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        sent = time.monotonic()
        for attempt in range(4):
            left = sent + 5 - time.monotonic()
            if left <= 0:
                break
            answered, _ = await _one(gateway.port, wire(chat(), headers=[("connection", "close")]), left)
            if answered == 200:
                return at, 200, time.monotonic() - sent
            await asyncio.sleep(min(left, 0.5 * 2**attempt * chance.uniform(0.75, 1)))
        return at, 0, time.monotonic() - sent

    async def everybody() -> list[tuple[float, int, float]]:
        times = [number / 40 for number in range(1200)] + [30.0 + number for number in range(60)]
        return list(await asyncio.gather(*map(caller, times)))

    results = asyncio.run(everybody())
    good = sum(answered == 200 and 2 <= at + took < 30 for at, answered, took in results)
    assert good >= 0.8 * 20 * 28
    after = [(answered, took) for at, answered, took in results if at >= 40]
    assert all(answered == 200 for answered, _ in after)
    assert sorted(took for _, took in after)[len(after) * 9 // 10] < 0.1 * 1.5


# ---- D-14: settings -----------------------------------------------------------------------------------------------

SET: dict[str, tuple[str, ...]] = {
    "file": (),
    "environment": (
        "FOREBAY_ENGINES__0__CONCURRENCY__LIMIT=1",
        "FOREBAY_QUEUE__DEPTH_LIMIT=1",
        "FOREBAY_QUEUE__DEADLINE_S=0.8",
        "FOREBAY_KEYS__STATIC__0__LIMITS__CONCURRENCY=1",
    ),
}


@pytest.mark.parametrize("source", list(SET))
def test_d14_every_limit_is_in_force_and_shown(backend: FakeBackend, start_gateway: StartGateway, source: str) -> None:
    """D-14: in flight, queue, deadline and a key's own limit, from the file, and from the environment over a file that
    says otherwise: what the admin port shows is what is done."""
    in_file = source == "file"
    keys = [key("one", concurrency=1 if in_file else 9), key("free"), key("held") | {"mode": "backpressure"}]
    gateway = start_gateway(
        config_for(
            backend, slots=1 if in_file else 9, places=1 if in_file else 9, keys=keys,
            queue={"deadline_s": 0.8 if in_file else 9}, wait_budget_ms=800,
        ),
        environment=dict(setting.split("=") for setting in SET[source]),
    )  # fmt: skip
    shown = status(gateway)["effective"]
    assert (shown["engines"][0]["concurrency_limit"], shown["depth_limit"], shown["deadline_s"]) == (1, 1, 0.8)
    (pool,) = gateway.snapshot()["pools"]
    assert (pool["queue_depth_limit"], pool["engines"][0]["concurrency_limit"]) == (1, 1)
    gate = backend.script = scripts.Gate(scripts.says())
    with Crowd(gateway.port, 3) as crowd:
        crowd.send(0, wire(chat(), key="sk-one"))
        eventually(lambda: gateway.gauges() == (1, 0))
        refused = ask(gateway.port, key="sk-one")
        assert (refused.status, refused.reason) == (429, "key_concurrency")
        crowd.send(1, wire(chat(), key="sk-held"))
        crowd.read(2.0, until=1)
        assert crowd.heads[1].get("x-forebay-reason") == "expired"
        assert 0.78 <= crowd.took(1) <= 1.05
        crowd.send(2, wire(chat(), key="sk-free"))
        eventually(lambda: gateway.gauges() == (1, 1))
        refused = ask(gateway.port, key="sk-free")
        assert (refused.status, refused.reason) == (503, "queue_full")
        gate.open(backend)
        crowd.read(2.0)
        assert len(crowd.with_status(200)) == 2


MISSPELT: list[tuple[dict[str, Any], dict[str, str], list[str], str]] = [
    ({"queue": {"depht_limit": 5}}, {}, [], "depth_limit"),
    ({"engines": [{"name": "e", "urls": ["http://127.0.0.1:1"], "concurency": {"limit": 1}}]}, {}, [], "concurrency"),
    ({"quue": {"depth_limit": 5}}, {}, [], "queue"),
    ({}, {"FOREBAY_QUEUE__DEADLINES": "5"}, [], "FOREBAY_QUEUE__DEADLINES"),
    ({}, {"FOREBAY_QUEUE__DEPTH_LIMIT": "many"}, [], "FOREBAY_QUEUE__DEPTH_LIMIT"),
    ({}, {}, ["--max-in-flihgt", "5"], "--max-in-flihgt"),
]


@pytest.mark.parametrize(("config", "environment", "flags", "said"), MISSPELT, ids=[case[3] for case in MISSPELT])
def test_d14_a_misspelt_setting_is_an_error_at_start(
    tmp_path: Path, config: dict[str, Any], environment: dict[str, str], flags: list[str], said: str
) -> None:
    """D-14: in the file, in the environment, on the command line; the message names it, and what was meant."""
    config = {"engines": [{"name": "e", "urls": ["http://127.0.0.1:1"]}]} | config
    (tmp_path / "forebay.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "forebay", "serve", "--config", str(tmp_path / "forebay.toml"), "--port", "0"]
    ended = subprocess.run(
        [*command, *flags], env={"PATH": "/usr/bin:/bin"} | environment, capture_output=True, text=True, timeout=20,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
