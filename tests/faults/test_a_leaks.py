"""A. Slots and counters that leak; the client goes away.

A counter is raised on one code path and lowered on another, and cancellation takes a third path. Every case ends by
looking at the gauges, at the highest number of requests the backend ever had, and at what the key was charged.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from .rig import scripts
from .rig.backend import FakeBackend, Script
from .rig.client import Answer, EndedShortError, RawClient, ask, chat, marker, wire
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, serving, wait_until
from .rig.scripts import Do
from .rig.waiting import eventually, in_parallel

PATIENT: dict[str, Any] = {"mode": "hybrid", "wait_budget_ms": 30_000}  # whoever fits in the queue waits for a slot


def remaining_tokens(answer: Answer) -> int:
    value = answer.header("x-ratelimit-remaining-tokens")
    assert value is not None, answer.head.raw
    return int(value)


def charged_more(gateway: GatewayProcess, one: str, other: str) -> int:
    """Tokens that the first key was charged beyond the second. Asked by requests that reserve next to nothing: an
    answer's headers are settled when it came in one piece, and show the reservation when it did not."""
    left = [remaining_tokens(ask(gateway.port, chat(max_tokens=1), key=key)) for key in (one, other)]
    return left[1] - left[0]


def peer_closed_after(backend: FakeBackend, mark: str, client: RawClient, within: float) -> None:
    """The backend saw the gateway close within so many seconds of the client's close."""
    call = backend.call(mark)
    assert call is not None
    eventually(lambda: call.peer_closed_at is not None, within, "the backend sees the gateway close")
    assert call.peer_closed_at is not None
    assert client.closed_at is not None
    assert call.peer_closed_at - client.closed_at < within


def test_a01_stream_cancelled_after_first_event(backend: FakeBackend, start_gateway: StartGateway) -> None:
    # 600 tokens a minute refill by ten a second: too slow to hide a reservation that was not given back.
    limits = {"concurrency": 1, "tokens_per_minute": 600}
    gateway = start_gateway(config_for(backend, keys=[key("a", **limits), key("fresh", **limits)]))
    backend.script = scripts.streams(scripts.deltas(200), every=0.05)
    mark = marker()
    with RawClient(gateway.port) as client:
        client.request(chat(mark, stream=True, max_tokens=400), key="sk-a")
        assert client.read_head().status == 200
        assert client.read_event() == scripts.delta("x0")
    gateway.settles(within=1.0)
    peer_closed_after(backend, mark, client, within=1.0)

    backend.script = scripts.ordinary
    second = ask(gateway.port, chat(max_tokens=400), key="sk-a")
    assert second.status == 200
    assert ask(gateway.port, chat(max_tokens=400), key="sk-fresh").status == 200
    charged = charged_more(gateway, "sk-a", "sk-fresh")
    assert 1 <= charged <= 60, "the prompt and the tokens so far, not nothing and not the reservation"


def test_a01_tokens_so_far_are_charged(backend: FakeBackend, start_gateway: StartGateway) -> None:
    limits = {"tokens_per_minute": 600}
    gateway = start_gateway(config_for(backend, keys=[key("a", **limits), key("fresh", **limits)]))
    backend.script = scripts.streams(scripts.deltas(100), end=[Do.HOLD], done=False)
    with RawClient(gateway.port) as client:
        client.request(chat(stream=True, max_tokens=400), key="sk-a")
        assert client.read_head().status == 200
        for _ in range(100):
            client.read_event()
    gateway.settles(within=1.0)
    backend.script = scripts.ordinary
    assert 80 <= charged_more(gateway, "sk-a", "sk-fresh") <= 150


ABANDONED = ("while sending", "before the head", "after the head", "inside an event", "after the terminator")


def leave(gateway: GatewayProcess, at: str, stream: bool, after: float) -> None:
    """One client that closes at a named point."""
    with RawClient(gateway.port) as client:
        request = wire(chat(stream=stream, padding="x" * 2000))
        if at == "while sending":
            client.send(request[:-500])
            time.sleep(after)  # the instant at which this client leaves
            return
        client.send(request)
        if at == "before the head":
            time.sleep(after)  # the instant at which this client leaves
            return
        assert client.read_head(10).status == 200
        if at == "after the head":
            return
        if not stream:
            client.read_piece()
            return
        if at == "inside an event":
            client.read_event()
            client.read_event()
            time.sleep(after / 10)
            return
        while client.read_event() != scripts.DONE:
            pass


def test_a02_two_hundred_cancels_at_random_instants(backend: FakeBackend, start_gateway: StartGateway) -> None:
    slots = 8
    gateway = start_gateway(config_for(backend, slots=slots, places=256, **PATIENT))
    plain = scripts.steps(0.03, scripts.answer(200, scripts.completion())[:-20], 0.02, b" " * 20)
    streamed = scripts.streams(scripts.deltas(5), every=0.01, first_after=0.02)

    async def either(call: Any) -> None:
        await (streamed if b'"stream": true' in call.body else plain)(call)

    backend.script = either
    chance = random.Random(2)
    plans = [(ABANDONED[i % 5], i % 2 == 0, chance.uniform(0, 0.2)) for i in range(200)]
    chance.shuffle(plans)
    in_parallel(lambda plan: leave(gateway, *plan), plans)
    gateway.settles(within=2.0)
    eventually(lambda: backend.open_calls == 0)
    assert backend.high_water <= slots

    backend.forget_high_water()
    backend.script = scripts.says(after=0.3)
    assert [a.status for a in in_parallel(lambda _: ask(gateway.port), range(slots))] == [200] * slots
    assert backend.high_water == slots


# How a backend fails, and what the client is told.
FAILURES: list[tuple[Script, set[int]]] = [
    (scripts.refuses(502), {502}),
    (scripts.refuses(504), {504}),
    (scripts.silent, {504}),
    (scripts.steps(Do.RESET), {502}),
    (scripts.steps(scripts.answer(200, b"{}")[:-1], Do.RESET), {200, 502}),
]


def test_a03_failures_give_the_slot_back(backend: FakeBackend, start_gateway: StartGateway) -> None:
    limited = key("a", concurrency=10)
    gateway = start_gateway(config_for(backend, slots=10, keys=[limited], engine={"timeouts": {"first_byte_s": 0.4}}))

    def fails(failure: tuple[Script, set[int]]) -> None:
        script, expected = failure
        mark = marker()
        backend.by_marker[mark] = script
        assert ask(gateway.port, chat(mark), key="sk-a").status in expected

    # A good answer between pairs keeps the engine from being ejected, which is another matter (next test).
    for start in range(0, 10, 2):
        in_parallel(fails, [FAILURES[i % 5] for i in (start, start + 1)])
        assert ask(gateway.port, key="sk-a").status == 200
    gateway.settles(within=1.0)

    assert ask(gateway.port, key="sk-a").status == 200
    backend.script = scripts.says(after=0.3)
    assert [a.status for a in in_parallel(lambda _: ask(gateway.port, key="sk-a"), range(10))] == [200] * 10


def test_a03_ten_failures_at_once_lock_nobody_out(backend: FakeBackend, start_gateway: StartGateway) -> None:
    limited = key("a", concurrency=10)
    gateway = start_gateway(config_for(backend, slots=10, keys=[limited], engine={"timeouts": {"first_byte_s": 0.4}}))
    backend.plan.extend(FAILURES[i % 5][0] for i in range(10))
    in_parallel(lambda _: ask(gateway.port, key="sk-a"), range(10))
    gateway.settles(within=1.0)
    backend.plan.clear()  # healed

    answer = ask(gateway.port, key="sk-a")
    if answer.status != 200:
        # The engine may be out of rotation for a moment; the key may not be the reason.
        assert (answer.status, answer.reason) == (503, "no_engine")
        assert answer.retry_after <= 5
        wait_until(answer.head.at + answer.retry_after)
        assert ask(gateway.port, key="sk-a").status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a04_client_leaves_before_any_response_byte(
    backend: FakeBackend, start_gateway: StartGateway, stream: bool
) -> None:
    limits = {"concurrency": 1, "tokens_per_minute": 600}
    config = config_for(
        backend,
        slots=1,
        keys=[key("a", **limits), key("fresh", **limits)],
        telemetry={"access_log": True, "log_level": "debug"},
    )
    gateway = start_gateway(config)
    backend.script = scripts.says(after=20)
    mark = marker()
    with RawClient(gateway.port) as client:
        client.request(chat(mark, stream=stream, max_tokens=400), key="sk-a")
        eventually(lambda: backend.call(mark))
        assert gateway.gauges() == (1, 0)
    peer_closed_after(backend, mark, client, within=2.0)
    gateway.settles(within=1.0)
    assert gateway.outcome("cancelled") == 1

    backend.script = scripts.ordinary
    second, fresh = (ask(gateway.port, chat(max_tokens=400), key=k) for k in ("sk-a", "sk-fresh"))
    assert (second.status, fresh.status) == (200, 200)
    assert -10 <= charged_more(gateway, "sk-a", "sk-fresh") <= 40, "at most the prompt is charged"


def test_a04_client_leaves_the_queue(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, slots=1, **PATIENT))
    backend.script = scripts.says(after=20)
    with RawClient(gateway.port) as running:
        running.request(chat())
        eventually(lambda: backend.open_calls == 1)
        with RawClient(gateway.port) as waiting:
            waiting.request(chat())
            eventually(lambda: gateway.gauges() == (1, 1))
        eventually(lambda: gateway.gauges() == (1, 0), 1.0)
    gateway.settles()
    assert len(backend.calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a07_half_closed_client_is_gone(backend: FakeBackend, start_gateway: StartGateway, stream: bool) -> None:
    """A close and a half-close look alike from here. Leaving is what is common, so both are taken for leaving."""
    gateway = start_gateway(config_for(backend))
    backend.script = scripts.streams(scripts.deltas(100), every=0.05) if stream else scripts.says(after=20)
    mark = marker()
    with RawClient(gateway.port) as client:
        client.request(chat(mark, stream=stream))
        eventually(lambda: backend.call(mark))
        if stream:
            assert client.read_head().status == 200
            assert client.read_event() == scripts.delta("x0")
        client.half_close()
        left = time.monotonic()
        read: Callable[[], object] = (lambda: list(client.events(1.0))) if stream else (lambda: client.read_head(1.0))
        with pytest.raises(EndedShortError):
            read()
        assert time.monotonic() - left < 1.0, "a clean close, and no hang"
    gateway.settles(within=1.0)
    assert gateway.outcome("cancelled") == 1
    eventually(lambda: backend.open_calls == 0)


def soak(gateway: GatewayProcess, backend: FakeBackend, until: float, seed: int) -> None:
    """One client's share of the soak: good, bad, oversized, unknown, cancelled, failing."""
    chance = random.Random(seed)

    def scripted(script: Script) -> None:
        mark = marker()
        backend.by_marker[mark] = script
        ask(gateway.port, chat(mark), key="sk-a", within=20)

    def cancelled() -> None:
        with RawClient(gateway.port) as client:
            client.request(chat(stream=chance.random() < 0.5), key="sk-a")
            time.sleep(chance.uniform(0, 0.03))

    def oversized() -> None:
        with RawClient(gateway.port) as client:
            client.send(wire(b"", key="sk-a", headers=[("content-length", "100000000")]))
            assert client.read_head().status == 413

    def good(stream: bool) -> None:
        ask(gateway.port, chat(stream=stream), key="sk-a", within=20)

    acts: list[Callable[[], object]] = [
        *[partial(good, stream) for stream in (False, True) * 10],  # failures stay rare enough to keep the engine in
        lambda: ask(gateway.port, b'{"model": "m", ', key="sk-a"),
        lambda: ask(gateway.port, b"\xff\xfe", key="sk-a"),
        lambda: ask(gateway.port, chat() | {"model": "unknown"}, key="sk-a"),
        lambda: ask(gateway.port, path="/v1/nowhere", key="sk-a"),
        oversized,
        cancelled,
        cancelled,
        partial(scripted, scripts.refuses(500)),
        partial(scripted, scripts.steps(Do.RESET)),
        partial(scripted, scripts.silent),
    ]
    while time.monotonic() < until:
        chance.choice(acts)()


def test_a08_capacity_after_a_soak_is_the_capacity_before(backend: FakeBackend, start_gateway: StartGateway) -> None:
    slots, places = 3, 4
    gateway = start_gateway(
        config_for(
            backend,
            slots=slots,
            places=places,
            keys=[key("a")],
            engine={"models": ["m"], "timeouts": {"first_byte_s": 0.2}},
            **PATIENT,
        )
    )
    until = time.monotonic() + 4
    in_parallel(lambda seed: soak(gateway, backend, until, seed), range(8))
    gateway.settles(within=2.0)
    eventually(lambda: ask(gateway.port, key="sk-a").status == 200, 15, "the engine is back in rotation")
    assert backend.high_water <= slots

    backend.forget_high_water()
    backend.script = scripts.streams(scripts.deltas(2), every=1.0)
    watched = threading.Event()

    def watch() -> None:
        eventually(lambda: gateway.gauges() == (slots, places), 0.9)
        watched.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    answers = in_parallel(lambda _: ask(gateway.port, chat(stream=True), key="sk-a"), range(slots + places + 2))
    watcher.join()
    assert watched.is_set()
    assert sorted(a.status for a in answers) == [200] * (slots + places) + [503] * 2
    assert {a.reason for a in answers if a.status == 503} == {"queue_full"}
    assert backend.high_water == slots


# Bodies that would do harm if their bytes were ever taken for requests.
SMUGGLED = wire(chat("mk-0badbad0"), key="sk-b")
BIG = SMUGGLED * (3_000_000 // len(SMUGGLED))
TOO_BIG = SMUGGLED * (5_000_000 // len(SMUGGLED))


@pytest.fixture(scope="module")
def refusing_gateway(shared_backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    keys = [key("b"), key("used-up", requests_per_minute=0)]
    config = config_for(shared_backend, keys=keys, server={"max_body_bytes": 4_000_000})
    with serving(config, tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("body", "how", "status"),
    [
        (TOO_BIG, {"path": "/v1/nowhere", "key": "sk-b"}, 404),
        (TOO_BIG, {"key": "sk-wrong"}, 401),
        (BIG, {"key": "sk-used-up"}, 429),
        (TOO_BIG, {"key": "sk-b"}, 413),
    ],
    ids=["unknown path", "bad key", "over limit", "too large"],
)
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_a09_early_refusal_with_the_body_unread(
    fresh_backend: FakeBackend,
    refusing_gateway: GatewayProcess,
    body: bytes,
    how: dict[str, Any],
    status: int,
    chunked: bool,
) -> None:
    with RawClient(refusing_gateway.port) as client:
        try:
            client.request(body, chunked=chunked, **how)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the gateway may stop reading; what it said must be there all the same
        first = client.read_answer()
        assert (first.status, first.ended) == (status, "whole")
        mark = marker()
        try:
            client.request(chat(mark), key="sk-b")
            second = client.read_answer(2)
            assert second.status == 200
        except (EndedShortError, BrokenPipeError, ConnectionResetError):
            assert first.header("connection") == "close"
    assert [call.marker for call in fresh_backend.calls] in ([], [mark])
    refusing_gateway.settles()


def test_a10_slot_is_held_to_the_end_of_the_stream(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, slots=1, mode="admission"))
    backend.script = scripts.streams(scripts.deltas(30), every=0.1)
    with RawClient(gateway.port) as client:
        client.request(chat(stream=True))
        assert client.read_head().status == 200
        began = time.monotonic()
        for at in (0.4, 1.2, 2.2):
            wait_until(began + at)
            refused = ask(gateway.port)
            assert (refused.status, refused.reason) == (503, "queue_full")
        assert len(list(client.events())) == 31
    assert backend.high_water == 1
    backend.script = scripts.ordinary
    assert ask(gateway.port).status == 200


ENDINGS: dict[str, Script] = {
    "terminator": scripts.streams([scripts.delta()], end=[scripts.LAST_CHUNK]),
    "terminator, then reset": scripts.streams([scripts.delta()], end=[scripts.LAST_CHUNK, Do.RESET]),
    "reset": scripts.streams([scripts.delta()], done=False, end=[0.004, Do.RESET]),
    "late terminator": scripts.streams(
        [scripts.delta()], done=False, end=[0.004, scripts.chunk(scripts.DONE), scripts.LAST_CHUNK]
    ),
}


def test_a11_nothing_is_released_twice(backend: FakeBackend, start_gateway: StartGateway) -> None:
    slots = 4
    gateway = start_gateway(config_for(backend, slots=slots, **PATIENT))
    over = threading.Event()
    polled: list[tuple[int, int]] = []

    def poll() -> None:
        while not over.is_set():
            polled.append(gateway.gauges())
            time.sleep(0.02)

    def rounds(worker: int) -> int:
        chance = random.Random(worker)
        done = 0
        for i in range(42):
            mark = marker()
            backend.by_marker[mark] = list(ENDINGS.values())[(worker + i) % 4]
            with RawClient(gateway.port) as client:
                client.request(chat(mark, stream=True))
                try:
                    head = client.read_head()
                    if head.status == 503:  # three resets in a row took the engine out of rotation for a moment
                        client.close()
                        time.sleep(0.2)
                        continue
                    if head.status == 200:
                        client.read_event()
                    time.sleep(chance.uniform(0.0, 0.008))
                    if chance.random() < 0.5:
                        client.reset()
                except EndedShortError:
                    pass
            done += 1
        return done

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        done = sum(in_parallel(rounds, range(12)))
    finally:
        over.set()
        poller.join()
    assert done >= 250
    assert len(polled) > 10
    assert max(in_flight for in_flight, _ in polled) <= slots
    assert backend.high_water <= slots
    gateway.settles()
    snapshot = gateway.snapshot()
    assert snapshot["offered"] == sum(snapshot["outcomes"].values())


def test_a12_two_signs_of_leaving_count_as_one(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """The part without a shared store: the client half-closes, and 100 ms later resets."""
    gateway = start_gateway(config_for(backend, slots=2, keys=[key("a", concurrency=2)]))
    backend.script = scripts.says(after=20)
    marks = [marker(), marker()]
    clients = [RawClient(gateway.port) for _ in marks]
    for client, mark in zip(clients, marks, strict=True):
        client.request(chat(mark), key="sk-a")
        eventually(partial(backend.call, mark))
        client.half_close()
    time.sleep(0.1)
    for client, mark in zip(clients, marks, strict=True):
        client.reset()
        peer_closed_after(backend, mark, client, within=1.0)
    gateway.settles(within=1.0)
    assert gateway.outcome("cancelled") == 2
    backend.script = scripts.says(after=0.2)
    assert [a.status for a in in_parallel(lambda _: ask(gateway.port, key="sk-a"), range(2))] == [200, 200]


def test_a13_health_probes_do_not_pile_up(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, slots=2, engine={"probe": {"interval_s": 0.1, "timeout_s": 0.3}}))
    backend.script = scripts.streams(scripts.deltas(30), every=0.1)
    with RawClient(gateway.port) as client:
        client.request(chat(stream=True))
        assert client.read_head().status == 200
        backend.probe = scripts.silent
        hung_from = len(backend.probes)
        assert len(list(client.events())) == 31
    hung = [probe for probe in backend.probes[hung_from + 1 :] if time.monotonic() - probe.arrived > 0.8]
    assert len(hung) >= 4, "probing goes on"
    assert backend.probe_high_water <= 2
    for probe in hung:
        assert probe.peer_closed_at is not None, "a timed-out probe is closed, not abandoned"
        assert probe.peer_closed_at - probe.arrived < 0.6
    assert gateway.gauges() == (0, 0)
    backend.probe = scripts.healthy
    eventually(gateway.ready, 2.0)
    backend.script = scripts.ordinary
    assert ask(gateway.port, chat(stream=True)).status == 200
