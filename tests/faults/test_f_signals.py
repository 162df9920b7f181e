"""F. Automatic tuning, second part: a real gateway, and engines that tell nothing, nonsense, or each their own tale."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .rig import scripts
from .rig.backend import Call, FakeBackend, Script
from .rig.client import chat, wire
from .rig.crowd import Crowd
from .rig.gateway import GatewayProcess, StartGateway, config_for
from .rig.scripts import Do
from .rig.waiting import eventually

GUARDED = {"kind": "guarded", "limit": 4, "least": 2, "most": 64}
BRISK_S, SLUGGISH_S = 0.005, 0.12
"""Between two tokens: well under, and well over, the objective of 50 ms."""


def says_of_itself(page: Script) -> Script:
    """A healthy engine with a metrics page of its own."""

    async def script(call: Call) -> None:
        await (page if call.target == "/metrics" else scripts.healthy)(call)

    return script


def told(body: bytes) -> Script:
    """A whole answer; it is asked for in HTTP/1.0, which ends with the connection."""
    return scripts.steps(scripts.answer(200, body), Do.CLOSE)


def page(kv_share: str, *, running: str = "1", waiting: str = "0") -> Script:
    """vLLM's metrics."""
    lines = [
        f"vllm:num_requests_running {running}",
        f"vllm:num_requests_waiting {waiting}",
        f"vllm:kv_cache_usage_perc {kv_share}",
    ]
    return told("\n".join(lines).encode())


def streaming(every_s: float) -> Script:
    return scripts.streams(scripts.deltas(2000), every=every_s)


@contextmanager
def load(gateway: GatewayProcess, streams: int) -> Iterator[Crowd]:
    """So many streams that nobody reads to the end; what does not fit waits."""
    with Crowd(gateway.port, streams) as crowd:
        for number in range(streams):
            crowd.send(number, wire(chat(stream=True)))
        yield crowd
    gateway.settles()


def limits(gateway: GatewayProcess) -> list[int]:
    return [engine["concurrency_limit"] for engine in gateway.engines()]


NONSENSE = {
    "nan and text": told(b"vllm:num_requests_waiting NaN\nvllm:kv_cache_usage_perc lots\nvllm:num_requests_running"),
    "negative": page("-1", running="-3", waiting="-2"),
    "infinite": page("+Inf", running="+Inf", waiting="+Inf"),
    "error": scripts.refuses(500),
    "reset": scripts.steps(Do.RESET),
    "not text": told(bytes(range(256)) * 40),
}


def test_f05_a_metrics_page_of_nonsense(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """F-05: the engine's figures turn to nonsense: nobody is hurt, the age of the last good ones is shown, tuning by
    what the gateway counts itself goes on, and good figures are taken again."""
    turn: Iterator[Script] = itertools.chain(NONSENSE.values(), itertools.repeat(scripts.refuses(404)))
    backend.probe = says_of_itself(page("0.2"))
    gateway = start_gateway(config_for(backend, mode="backpressure", engine={"concurrency": GUARDED}))

    def age() -> float:
        return gateway.metric("forebay_signal_age_seconds", signal="metrics:fb/0")

    eventually(lambda: 0 < age() < 1.5)

    async def next_page(call: Call) -> None:
        await next(turn)(call)

    backend.probe = says_of_itself(next_page)
    before = sum(call.target == "/metrics" for call in backend.probes)
    backend.script = streaming(BRISK_S)
    with load(gateway, 12):
        eventually(lambda: limits(gateway)[0] >= 8, 5, "it grows while the page is nonsense")
    eventually(lambda: sum(call.target == "/metrics" for call in backend.probes) >= before + 3, 6)
    assert age() > 1.8
    assert limits(gateway)[0] >= 8, "held"
    backend.probe = says_of_itself(page("0.2"))
    eventually(lambda: age() < 1.5, 4)
    assert "Traceback" not in gateway.stderr
    assert len(gateway.stderr) < 2000, "and no line for each"


@pytest.mark.soak
def test_f05_every_kind_of_nonsense(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """F-05 with each kind for some seconds, and a page that never ends."""
    backend.probe = says_of_itself(page("0.2"))
    gateway = start_gateway(config_for(backend, mode="backpressure", engine={"concurrency": GUARDED}))
    backend.script = streaming(BRISK_S)
    with load(gateway, 12):
        eventually(lambda: limits(gateway)[0] >= 8, 5)
    for bad in [*NONSENSE.values(), scripts.steps(scripts.head(200), b"vllm:num", Do.HOLD)]:
        backend.probe = says_of_itself(bad)
        eventually(lambda: gateway.metric("forebay_signal_age_seconds", signal="metrics:fb/0") > 3.5, 8)
        assert limits(gateway)[0] >= 8
        backend.probe = says_of_itself(page("0.2"))
        eventually(lambda: gateway.metric("forebay_signal_age_seconds", signal="metrics:fb/0") < 1.5, 8)


def test_f05_usage_of_nonsense(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """F-05: answers whose usage is no number, or missing: the limit holds or follows the pace, and goes on."""
    gateway = start_gateway(config_for(backend, mode="backpressure", engine={"concurrency": GUARDED}))
    for usage in [b'"lots"', b"-5", b"null", b"1e999", b"{}"] * 6:
        last = b'data: {"choices":[],"usage":{"prompt_tokens":%b,"completion_tokens":%b}}\n\n' % (usage, usage)
        backend.plan.append(scripts.streams([*scripts.deltas(30), last], every=BRISK_S))
    with Crowd(gateway.port, 30) as crowd:
        for number in range(30):
            crowd.send(number, wire(chat(stream=True)))
        crowd.read(10)
        assert len(crowd.with_status(200)) == 30
        eventually(lambda: limits(gateway)[0] > 4, 2)
        eventually(lambda: gateway.gauges() == (0, 0), 5)
    backend.script = streaming(SLUGGISH_S)
    high = limits(gateway)[0]
    with load(gateway, high):
        eventually(lambda: limits(gateway)[0] < high, 5, "still ticking")


def test_f08_each_engine_has_its_own_figures(
    backend: FakeBackend, other_backend: FakeBackend, start_gateway: StartGateway
) -> None:
    """F-08: two engines of one entry: one says that its memory is 99 % used, the other 1 %. Only the second one's limit
    grows. Then the first stops saying anything: that is "unknown" after three seconds, and not "full" for ever."""
    backend.probe, other_backend.probe = says_of_itself(page("0.99")), says_of_itself(page("0.01"))
    backend.script = other_backend.script = streaming(BRISK_S)
    gateway = start_gateway(
        config_for(backend, other_backend, mode="backpressure", engine={"concurrency": GUARDED})
    )  # fmt: skip
    for number in range(2):
        eventually(
            lambda number=number: gateway.metric("forebay_signal_age_seconds", signal=f"metrics:fb/{number}") > 0
        )
    with load(gateway, 24):
        eventually(lambda: limits(gateway)[1] >= 10, 5)
        assert limits(gateway)[0] == 4
        assert backend.open_calls == 4
        assert other_backend.open_calls >= 10
        backend.probe = scripts.healthy
        eventually(lambda: limits(gateway)[0] > 4, 6, "no longer held against it")
        assert gateway.metric("forebay_signal_age_seconds", signal="metrics:fb/0") > 2.9
        assert gateway.metric("forebay_signal_age_seconds", signal="metrics:fb/1") < 1.5


def test_f08_each_engine_has_its_own_pace(
    backend: FakeBackend, other_backend: FakeBackend, start_gateway: StartGateway
) -> None:
    """F-08 by the gateway's own counters: a slow engine and a fast one share a queue, and not a limit. The slow one
    falls silent: nothing is known of it, so its limit stays where it was."""
    backend.script, other_backend.script = streaming(SLUGGISH_S), streaming(BRISK_S)
    gateway = start_gateway(config_for(backend, other_backend, mode="backpressure", engine={"concurrency": GUARDED}))
    with load(gateway, 24):
        eventually(lambda: limits(gateway)[0] == 2 and limits(gateway)[1] >= 10, 8)
        slow, fast = (engine["gap_ns"] / 1e9 for engine in gateway.engines())
        assert 0.6 * SLUGGISH_S < slow < 3 * SLUGGISH_S
        assert fast < 0.05
