"""What a live gateway hears of its engines beside their answers: metrics pages, a DCGM exporter, NVIDIA's library."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forebay.core.dispatch.pressure import PressureConfig
from tests.faults.rig import scripts
from tests.faults.rig.backend import FakeBackend
from tests.faults.rig.client import EndedShortError, RawClient, ask, chat, marker
from tests.faults.rig.gateway import GatewayProcess, config_for, serving
from tests.faults.rig.waiting import eventually

from .processes import simulated

GPU = 'gpu="{0}",UUID="GPU-{0}",device="nvidia{0}",modelName="NVIDIA H100 NVL",Hostname="node-1"'


class Exporter:
    """A DCGM exporter's page, its memory as set."""

    def __init__(self) -> None:
        self.used = 50_000
        self._temperature = 40
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = exporter.page().encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/metrics"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def page(self) -> str:
        self._temperature += 1
        lines = []
        for number, used in ((0, self.used), (1, 50_000)):
            labels = GPU.format(number)
            lines += [
                f"DCGM_FI_DEV_GPU_TEMP{{{labels}}} {self._temperature}",
                f"DCGM_FI_DEV_GPU_UTIL{{{labels}}} 80",
                f"DCGM_FI_DEV_FB_USED{{{labels}}} {used}",
                f"DCGM_FI_DEV_FB_FREE{{{labels}}} {100_000 - used}",
            ]
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter()
    yield made
    made.close()


def status(gateway: GatewayProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gateway.admin("/api/v1/status"))
    return found


def test_work_that_others_sent_to_an_engine_is_seen_on_its_page(tmp_path: Path) -> None:
    """Six long streams go to the first engine past the gateway: its own requests go to the second one meanwhile."""
    flags = ("--time-scale", "1", "--model-name", "m")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with ExitStack() as stack:
        one, two = (stack.enter_context(simulated(tmp_path / name, *flags)) for name in ("a", "b"))
        for _ in range(6):
            client = stack.enter_context(RawClient(one.port))
            client.request(chat(stream=True, max_tokens=20_000, ignore_eos=True))
        # Its first page of an engine counts as it is; what comes later is averaged over ten seconds.
        eventually(lambda: one.metric("vllm:num_requests_running") == 6, within=10, what="six streams")
        gateway = stack.enter_context(serving(config_for(one.url, two.url, slots=16), tmp_path / "gateway"))
        eventually(
            lambda: gateway.metric("forebay_others_in_flight", engine="fb/0") == 6, within=30, what="six of others'"
        )
        assert gateway.metric("forebay_others_in_flight", engine="fb/1") == 0
        before = [engine.metric("vllm:request_success_total") for engine in (one, two)]
        assert [ask(gateway.port, chat(max_tokens=4), within=30).status for _ in range(5)] == [200] * 5
        after = [engine.metric("vllm:request_success_total") for engine in (one, two)]
        assert after == [before[0], before[1] + 5]
        ages = status(gateway)["signal_ages_s"]
        assert set(ages) == {"metrics:fb/0", "metrics:fb/1"}
        assert gateway.metric("forebay_signal_age_seconds", signal="metrics:fb/0") >= 0
        two.kill()
        eventually(
            lambda: any("fb/1: its metrics page has said nothing" in line for line in status(gateway)["degraded"]),
            within=30,
            what="a silent page that is said",
        )


def test_a_full_gpu_lowers_the_window_and_a_silent_exporter_does_not(
    tmp_path: Path, exporter: Exporter, backend: FakeBackend
) -> None:
    gpu = {"source": "dcgm", "urls": [exporter.url], "interval_s": 0.1}
    config = config_for(backend, slots=100, engine={"gpus": [["GPU-0"]]}, gpu=gpu)
    window = ("forebay_concurrency_window",)
    with serving(config, tmp_path) as gateway:
        eventually(lambda: status(gateway)["gpus"], within=20, what="GPUs that were read")
        assert status(gateway)["degraded"] == []
        assert {(gpu["uuid"], gpu["memory_share"], gpu["busy_share"]) for gpu in status(gateway)["gpus"]} == {
            ("GPU-0", 0.5, 0.8),
            ("GPU-1", 0.5, 0.8),
        }
        assert gateway.metric(*window, engine="fb/0") == 100
        exporter.used = 98_000
        eventually(lambda: gateway.metric(*window, engine="fb/0") <= 64, within=30, what="a window in two steps down")
        assert gateway.metric("forebay_concurrency_limit", engine="fb/0") == 100
        assert gateway.metric("forebay_gpu_memory_used_ratio", gpu="GPU-0") == pytest.approx(0.98)
        assert ask(gateway.port).status == 200
        exporter.close()
        eventually(lambda: status(gateway)["degraded"], within=30, what="a silent exporter that is said")
        (line,) = status(gateway)["degraded"]
        assert "does not answer" in line
        assert line.endswith("(no window is lowered for it)")
        lowest = 100 * PressureConfig().least
        assert gateway.metric(*window, engine="fb/0") >= lowest
        assert ask(gateway.port).status == 200


def test_without_a_driver_the_gateway_serves_and_says_so(tmp_path: Path, backend: FakeBackend) -> None:
    """NVIDIA's real library, on a machine that has no driver: no figure, no effect, and a reason."""
    config = config_for(backend, slots=7, engine={"gpus": [["0"]]}, gpu={"source": "nvml", "interval_s": 0.1})
    with serving(config, tmp_path) as gateway:
        eventually(lambda: status(gateway)["degraded"] or status(gateway)["gpus"], within=30, what="a first reading")
        answer = status(gateway)
        if answer["gpus"]:
            pytest.skip("this machine has a GPU")
        assert "NVIDIA's driver cannot be asked" in answer["degraded"][0]
        assert gateway.metric("forebay_concurrency_window", engine="fb/0") == 7
        assert ask(gateway.port).status == 200


def test_nothing_is_sent_twice_once_a_byte_of_it_was_taken(tmp_path: Path) -> None:
    """An engine that breaks off, before or after its first byte, has had the request: no other one gets it too."""
    with ExitStack() as stack:
        one, two = FakeBackend(), FakeBackend()
        stack.callback(one.close)
        stack.callback(two.close)
        gateway = stack.enter_context(serving(config_for(one, two, slots=8), tmp_path))
        broken = (
            scripts.steps(scripts.Do.RESET),
            scripts.streams([scripts.delta()], done=False, end=[0.05, scripts.Do.RESET]),
        )
        for script in broken:
            one.plan.append(script)
            two.plan.append(script)
            mark = marker()
            with RawClient(gateway.port) as client:
                client.request(chat(mark, stream=True))
                with suppress(EndedShortError):
                    client.read_answer(within=10)
            seen = [call for backend in (one, two) if (call := backend.call(mark)) is not None]
            assert len(seen) == 1, "one engine had it"
            one.plan.clear()
            two.plan.clear()


def test_equal_beginnings_meet_the_same_engine(tmp_path: Path) -> None:
    with ExitStack() as stack:
        backends = [FakeBackend() for _ in range(3)]
        for backend in backends:
            stack.callback(backend.close)
        config = config_for(*backends, slots=8, engine={"balance": "affinity", "prefix_bytes": 256})
        gateway = stack.enter_context(serving(config, tmp_path))
        homes = set()
        for talk in range(6):
            system = {"role": "system", "content": f"{talk} " + "You are a careful assistant. " * 20}
            marks = [marker() for _ in range(3)]
            for mark in marks:
                messages = {"messages": [system, {"role": "user", "content": mark}], "model": "m", "user": mark}
                assert ask(gateway.port, messages).status == 200
            met = {
                number for number, backend in enumerate(backends) for mark in marks if backend.call(mark) is not None
            }
            assert len(met) == 1, "all turns of one talk"
            homes |= met
        assert len(homes) > 1, "and not all talks"
