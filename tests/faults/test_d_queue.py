"""D. Queue and admission gate, first part: bounds, deadlines, engines that are gone, turns.

Queues that are not bounded where they matter, deadlines that fire late, bookkeeping that loses waiting requests.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from .rig import scripts
from .rig.backend import Call, FakeBackend
from .rig.client import RawClient, ask, chat, marker, wire
from .rig.crowd import Crowd
from .rig.gateway import GatewayProcess, StartGateway, config_for, key
from .rig.waiting import eventually, in_parallel

PATIENT: dict[str, Any] = {"mode": "hybrid", "wait_budget_ms": 30_000}  # whoever fits in the queue waits for a slot
AT_ONCE_S = 0.05


@contextmanager
def occupied(gateway: GatewayProcess, backend: FakeBackend, slots: int = 1, **how: Any) -> Iterator[scripts.Gate]:
    """All slots are taken until the gate is opened, or the end."""
    gate = scripts.Gate(scripts.says())
    backend.plan.extend([gate] * slots)
    with Crowd(gateway.port, slots) as running:
        for number in range(slots):
            running.send(number, wire(chat(), **how))
        eventually(lambda: gateway.gauges() == (slots, 0))
        yield gate
        gate.open(backend)
        running.read(5)
        assert len(running.with_status(200)) == slots


# ---- D-01 ---------------------------------------------------------------------------------------------------------


def ten(gateway: GatewayProcess, backend: FakeBackend, spacing_s: float, streams: tuple[bool, ...]) -> list[float]:
    """Ten requests at a spacing: 2 run, 3 wait, 5 are refused. Returns how long the refusals took."""
    gate = backend.script = scripts.Gate(scripts.ordinary)
    backend.forget_high_water()
    with Crowd(gateway.port, 10) as crowd:
        for number in range(10):
            crowd.send(number, wire(chat(stream=streams[number % len(streams)])))
            crowd.read(spacing_s)
        crowd.read(1.0, until=5)
        assert gateway.gauges() == (2, 3)
        eventually(lambda: backend.open_calls == 2)
        refused = crowd.with_status(503)
        assert len(refused) == len(crowd.heads) == 5
        assert {crowd.heads[number].get("x-forebay-reason") for number in refused} == {"queue_full"}
        gate.open(backend)
        crowd.read(5.0)
        assert len(crowd.with_status(200)) == 5
        assert not crowd.ended
    gateway.settles()
    assert backend.high_water == 2
    return [crowd.took(number) for number in refused]


def test_d01_the_bound_holds_at_any_spacing(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-01: S=2, Q=3; together, at 30 ms and at 300 ms; both stream modes; nothing known of the engine, and warm."""
    gateway = start_gateway(config_for(backend, slots=2, places=3, **PATIENT))
    took = []
    for stream in (False, True):  # the first of all finds a gateway that knows nothing
        for spacing_s in (0.0, 0.03):
            took += ten(gateway, backend, spacing_s, (stream,))
    took += ten(gateway, backend, 0.3, (False, True))
    # A refusal is the work of one turn of the event loop: a late one was made late by whoever else uses the machine.
    assert sorted(took)[len(took) * 4 // 5] < AT_ONCE_S, took


def test_d01_the_bound_holds_while_the_model_is_cold(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-01: an engine that is not ready yet bounds the queue too: at 0, where nobody is asked to hold."""
    backend.probe = scripts.refuses(503)
    gateway = start_gateway(config_for(backend, slots=2, places=3, **PATIENT), ready=False)
    with Crowd(gateway.port, 10) as crowd:
        for number in range(10):
            crowd.send(number, wire(chat()))
        crowd.read(1.0)
        assert len(crowd.with_status(503)) == 10
        assert {head.get("x-forebay-reason") for head in crowd.heads.values()} == {"warming"}
    assert not backend.calls


def test_d01_held_requests_are_bounded_too(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-01 in backpressure mode, warm and cold: the bound is queue.held_limit."""
    gateway = start_gateway(config_for(backend, slots=2, mode="backpressure", queue={"held_limit": 3}))
    ten(gateway, backend, 0.0, (False, True))
    backend.probe = scripts.refuses(503)
    eventually(lambda: not gateway.ready())
    gate = backend.script = scripts.Gate(scripts.ordinary)
    with Crowd(gateway.port, 10) as crowd:
        for number in range(10):
            crowd.send(number, wire(chat()))
        crowd.read(1.0, until=7)
        assert gateway.gauges() == (0, 3)
        assert len(crowd.with_status(503)) == len(crowd.heads) == 7
        backend.probe = scripts.healthy
        eventually(lambda: gateway.gauges() == (2, 1))
        gate.open(backend)
        crowd.read(5.0)
        assert len(crowd.with_status(200)) == 3


# ---- D-02, D-03: deadlines ----------------------------------------------------------------------------------------


def test_d02_the_deadline_fires_while_the_slot_is_taken(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-02: S=1 and a running request that goes on; each waiter is refused within 250 ms of its own deadline: the
    wait budget, the longest hold, and what the caller itself says."""
    keys = [key("hybrid") | {"mode": "hybrid"}, key("held") | {"mode": "backpressure"}]
    gateway = start_gateway(
        config_for(
            backend, slots=1, wait_budget_ms=1000, keys=[*keys, key("a")], queue={"deadline_s": 1.2},
            engine={"probe": {"interval_s": 30}},  # nothing else may wake the queue
        )
    )  # fmt: skip
    with occupied(gateway, backend, key="sk-a"), Crowd(gateway.port, 3) as waiting:
        waiting.send(0, wire(chat(), key="sk-hybrid"))
        waiting.send(1, wire(chat(), key="sk-held"))
        waiting.send(2, wire(chat(), key="sk-held", headers=[("x-forebay-deadline-ms", "500")]))
        waiting.read(3.0)
        for number, deadline_s in enumerate((1.0, 1.2, 0.5)):
            assert waiting.heads[number].status == 503
            assert waiting.heads[number].get("x-forebay-reason") == "expired"
            assert waiting.heads[number].get("retry-after")
            assert deadline_s - 0.02 <= waiting.took(number) <= deadline_s + 0.25
    assert len(backend.calls) == 1


ROUNDS, LANES, DEADLINE_S = 300, 30, 0.2


def test_d03_a_slot_that_frees_with_the_deadline(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-03: 300 rounds in which the slot frees within 10 ms of the waiter's deadline. The backend gets the request or
    the client gets the refusal, never both, never neither."""
    lanes = [f"m{lane}" for lane in range(LANES)]  # one engine entry with one slot each
    config = config_for(backend, slots=1, mode="backpressure", queue={"deadline_s": DEADLINE_S})
    (entry,) = config["engines"]
    config["engines"] = [entry | {"name": model, "models": [model]} for model in lanes]
    gateway = start_gateway(config)
    chance = random.Random(3)
    outcomes: dict[str, tuple[int, str | None]] = {}
    for _ in range(ROUNDS // LANES):
        _round(gateway, backend, chance, lanes, outcomes)
    gateway.settles()
    assert len(outcomes) == ROUNDS
    for mark, (status, reason) in outcomes.items():
        reached = backend.call(mark) is not None
        assert (status, reason) == ((200, None) if reached else (503, "expired")), f"{mark} reached it: {reached}"
    served = sum(status == 200 for status, _ in outcomes.values())
    assert ROUNDS / 20 < served < ROUNDS * 19 / 20, "the race is one"


def _round(
    gateway: GatewayProcess,
    backend: FakeBackend,
    chance: random.Random,
    lanes: list[str],
    outcomes: dict[str, tuple[int, str | None]],
) -> None:
    """In every lane one request runs, and one waits whose deadline comes when the first one ends, more or less."""
    ends: dict[str, float] = {}
    told = asyncio.Event()

    async def until_told(call: Call) -> None:
        await told.wait()
        await asyncio.sleep(max(0.0, ends[call.marker or ""] - time.monotonic()))
        await call.send(scripts.answer(200, scripts.completion()))

    size = len(lanes)
    first, second = [marker() for _ in lanes], [marker() for _ in lanes]
    backend.by_marker.update(dict.fromkeys(first, until_told))
    with Crowd(gateway.port, 2 * size) as crowd:
        for lane, model in enumerate(lanes):
            crowd.send(lane, wire(chat(first[lane]) | {"model": model}))
        eventually(lambda: gateway.gauges() == (size, 0))
        for lane, model in enumerate(lanes):
            crowd.send(size + lane, wire(chat(second[lane]) | {"model": model}))
            ends[first[lane]] = crowd.sent[size + lane] + DEADLINE_S + chance.uniform(-0.01, 0.01)
        backend.soon(told.set)
        crowd.read(5.0)
        assert sorted(crowd.with_status(200, 503)) == list(range(2 * size)), "an answer is missing"
        assert set(range(size)) <= set(crowd.with_status(200))
        for lane in range(size):
            head = crowd.heads[size + lane]
            outcomes[second[lane]] = head.status, head.get("x-forebay-reason")


# ---- D-06: nobody there -------------------------------------------------------------------------------------------


def test_d06_nobody_waits_for_an_engine_that_is_gone(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-06: the engine dies; those that wait are told within a probe interval, those that come later at once."""
    interval_s = 1.0
    gateway = start_gateway(
        config_for(backend, slots=1, engine={"probe": {"interval_s": interval_s, "timeout_s": 0.5}}, **PATIENT)
    )
    backend.script = scripts.silent
    with Crowd(gateway.port, 6) as crowd:
        crowd.send(0, wire(chat()))
        eventually(lambda: gateway.gauges() == (1, 0))
        for number in range(1, 6):
            crowd.send(number, wire(chat()))
        eventually(lambda: gateway.gauges() == (1, 5))
        died = time.monotonic()
        backend.die()
        crowd.read(3.0)
        assert crowd.heads[0].status == 502, "what ran"
        for number in range(1, 6):
            head = crowd.heads[number]
            assert (head.status, head.get("x-forebay-reason")) == (503, "no_engine")
            assert head.get("retry-after")
            assert head.at - died < interval_s
    began = time.monotonic()
    answer = ask(gateway.port)
    assert (answer.status, answer.reason) == (503, "no_engine")
    assert 1 <= answer.retry_after <= 5
    assert answer.head.at - began < 0.25
    gateway.settles()


def test_d06_held_requests_are_held_on_purpose(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-06 in backpressure mode, whose contract is to hold: an engine that returns serves them, and where none does
    they are told at their deadline. The exception to "fail at once", and documented as one."""
    gateway = start_gateway(config_for(backend, slots=1, mode="backpressure", queue={"deadline_s": 1.5}))
    backend.die()
    eventually(lambda: not gateway.ready())
    with Crowd(gateway.port, 2) as crowd:
        crowd.send(0, wire(chat()))
        crowd.send(1, wire(chat(), headers=[("x-forebay-deadline-ms", "400")]))
        crowd.read(1.0, until=1)
        assert crowd.heads[1].status == 503
        assert 0.35 <= crowd.took(1) < 0.65
        backend.listen()
        crowd.read(2.0)
        assert crowd.heads[0].status == 200


# ---- D-09 to D-11: turns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fair_share", [False, True])
def test_d09_one_key_fills_the_queue(backend: FakeBackend, start_gateway: StartGateway, fair_share: bool) -> None:
    """D-09: S=2, Q=20; a key sends 100, then another one 1, then 5. It may not hold every place, and the other key's
    are served after about S more completions."""
    gateway = start_gateway(
        config_for(
            backend,
            slots=2,
            places=20,
            keys=[key("a"), key("b")],
            admission={"mode": "hybrid", "wait_budget_ms": 30_000, "fair_share": fair_share},
        )
    )
    backend.script = scripts.says(after=0.1)
    marks = [marker() for _ in range(6)]
    with Crowd(gateway.port, 106) as crowd:
        for number in range(100):
            crowd.send(number, wire(chat(max_tokens=7), key="sk-a"))
        eventually(lambda: gateway.gauges()[1] >= 20)
        before = len(backend.calls)
        crowd.send(100, wire(chat(marks[0], max_tokens=7), key="sk-b"))
        eventually(lambda: backend.call(marks[0]) or 100 in crowd.with_status(503) or crowd.read(0.01), 3)
        for number in range(101, 106):
            crowd.send(number, wire(chat(marks[number - 100], max_tokens=7), key="sk-b"))
        crowd.read(10.0)
        assert [crowd.heads[number].status for number in range(100, 106)] == [200] * 6
    order = [call.marker for call in backend.calls]
    assert order.index(marks[0]) <= before + 2 * 2
    # Five at once take turns with the other key: every second slot.
    assert max(order.index(mark) for mark in marks[1:]) <= order.index(marks[0]) + 2 + 2 * 5 + 2


def test_d10_strict_priority_leaves_nobody_waiting_for_ever(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-10: a class above takes all there is. One of the class below is told at its deadline, by its budget or as
    long as it is held, and when to come back."""
    high = [key("high") | {"class": "high"}]
    low = [key("low") | {"mode": "hybrid"}, key("held") | {"mode": "backpressure"}]
    gateway = start_gateway(
        config_for(
            backend, slots=1, wait_budget_ms=600, keys=high + low, queue={"deadline_s": 1.0},
            classes={"high": {"priority": 1, "mode": "backpressure"}},
        )
    )  # fmt: skip
    backend.script = scripts.says(after=0.02)
    stop = time.monotonic() + 1.3

    def constant(_: int) -> int:
        served = 0
        while time.monotonic() < stop:
            served += ask(gateway.port, key="sk-high").status == 200
        return served

    def low_one(name: str) -> tuple[int, str | None, float]:
        eventually(lambda: gateway.gauges()[1] >= 2)
        began = time.monotonic()
        answer = ask(gateway.port, key=name)
        return answer.status, answer.reason, time.monotonic() - began

    jobs = [*range(6), "sk-low", "sk-held"]
    results = in_parallel(lambda job: constant(job) if isinstance(job, int) else low_one(job), jobs)
    assert sum(served for served in results[:6] if isinstance(served, int)) > 20
    for result, deadline_s in zip(results[6:], (0.6, 1.0), strict=True):
        assert isinstance(result, tuple)
        status, reason, took = result
        if status == 200:  # a gap in the load of the class above: served
            assert took <= deadline_s + 0.25
        else:
            assert (status, reason) == (503, "expired")
            assert deadline_s - 0.02 <= took <= deadline_s + 0.25


@pytest.mark.parametrize("frees", [True, False], ids=["room in time", "room too late"])
def test_d11_a_large_request_at_the_head(backend: FakeBackend, start_gateway: StartGateway, frees: bool) -> None:
    """D-11: the head needs more tokens than are free, ten small ones wait behind it. The policy (fair-queue.md): whose
    turn it is waits until it fits and is not overtaken; the small ones pass when it starts, or at its deadline."""
    gateway = start_gateway(
        config_for(
            backend, slots=20, wait_budget_ms=600,
            engine={"concurrency": {"kind": "fixed", "limit": 20, "tokens": 1000}},
        )
    )  # fmt: skip
    running, large = marker(), marker()
    gate, later = scripts.Gate(scripts.says()), scripts.Gate(scripts.says())
    backend.by_marker.update({running: gate, large: later})
    with Crowd(gateway.port, 12) as crowd:
        crowd.send(0, wire(chat(running, max_tokens=900)))
        eventually(lambda: gateway.gauges() == (1, 0))
        crowd.send(1, wire(chat(large, max_tokens=500)))
        eventually(lambda: gateway.gauges() == (1, 1))
        for number in range(2, 12):
            crowd.read(0.01)
            crowd.send(number, wire(chat(max_tokens=5)))
        eventually(lambda: gateway.gauges() == (1, 11))
        if frees:
            gate.open(backend)
        crowd.read(1.5, until=11)
        small = [crowd.heads[number].status for number in range(2, 12)]
        assert small == [200] * 10, "the small ones pass"
        order = [call.marker for call in backend.calls]
        if frees:
            assert order[1] == large, "and not before it"
            later.open(backend)
        else:
            assert crowd.heads[1].get("x-forebay-reason") == "expired"
            assert large not in order
            assert max(crowd.took(number) for number in range(2, 12)) <= 0.6 + 0.25, "its deadline is the bound"
            gate.open(backend)
        crowd.read(3.0)
        assert len(crowd.heads) == 12
    gateway.settles()


def test_d12_no_hidden_cap_on_connections(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-12: S=300: 300 requests are at the backend within a second, none is said to have waited, and the connections
    are there for those that come after."""
    gateway = start_gateway(config_for(backend, slots=300))
    gate = backend.script = scripts.Gate(scripts.says())
    with Crowd(gateway.port, 300) as crowd:
        began = time.monotonic()
        for number in range(300):
            crowd.send(number, wire(chat()))
        eventually(lambda: backend.open_calls == 300, 5)
        arrived = max(call.arrived for call in backend.calls)
        assert arrived - began < 1.0
        assert backend.high_water == 300
        assert gateway.gauges() == (300, 0)
        gate.open(backend)
        crowd.read(10.0)
        assert len(crowd.with_status(200)) == 300
    gateway.settles()
    gate = backend.script = scripts.Gate(scripts.says())
    with Crowd(gateway.port, 150) as crowd:
        for number in range(150):
            crowd.send(number, wire(chat()))
        eventually(lambda: backend.open_calls == 150, 5)
        gate.open(backend)
        crowd.read(10.0)
        assert len(crowd.with_status(200)) == 150
    assert gateway.metric("forebay_queue_wait_seconds_sum") == 0
    assert backend.accepted - len(backend.probes) <= 300 + 5, "connections are used again"
    gateway.settles()


def test_d01_order_of_those_that_wait(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """D-01: nobody who waits is lost, and one key's requests leave in the order in which they came."""
    gateway = start_gateway(config_for(backend, slots=1, places=8, **PATIENT))
    marks = [marker() for _ in range(8)]
    with occupied(gateway, backend) as gate, Crowd(gateway.port, 8) as waiting:
        for number, mark in enumerate(marks):
            waiting.send(number, wire(chat(mark)))
            eventually(lambda number=number: gateway.gauges() == (1, number + 1))
        gate.open(backend)
        waiting.read(5.0)
        assert len(waiting.with_status(200)) == 8
    assert [call.marker for call in backend.calls[1:]] == marks
    with RawClient(gateway.port) as client:
        client.request(chat())
        assert client.read_answer().status == 200
