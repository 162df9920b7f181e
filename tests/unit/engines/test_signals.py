"""What engines say of themselves: pages of real engines in short, and pages that make no sense."""

from __future__ import annotations

import asyncio

import pytest

from forebay.core.model import EngineSignal
from forebay.engines.openai import OpenAIEngine
from forebay.engines.serving.metrics import EngineMetrics
from forebay.engines.signals import SignalReader, read_signal

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 12.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 700.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m"} 5.0
sglang:num_queue_reqs{model_name="m"} 0.0
sglang:token_usage{model_name="m"} 0.5
sglang:max_total_num_tokens{model_name="m"} 4096.0
"""


def test_vllm() -> None:
    assert read_signal(VLLM) == EngineSignal(15, 2, 0.75, 16_000, 4)


def test_sglang() -> None:
    assert read_signal(SGLANG) == EngineSignal(5, 0, 0.5, 4096, None)


def test_our_own_engines() -> None:
    page = EngineMetrics('odd "name"').text(
        running=7, waiting=1, kv_usage=0.5, max_batch=64,
        cache_config={"block_size": "16", "num_gpu_blocks": "10", "kv_cache_size_tokens": "165"},
    )  # fmt: skip
    assert read_signal(page) == EngineSignal(7, 1, 0.5, 165, 0)


@pytest.mark.parametrize(
    "value", ["NaN", "-1", "+Inf", "soon", "", "1e999"], ids=["nan", "negative", "inf", "text", "nothing", "overflow"]
)
def test_a_figure_that_is_none_is_left_out(value: str) -> None:
    """F-05: missing, NaN, negative or text; the others count all the same."""
    page = f'vllm:num_requests_running{{engine="0"}} {value}\nvllm:num_requests_waiting 3\n'
    assert read_signal(page) == EngineSignal(waiting=3)


@pytest.mark.parametrize("page", ["", "<html>not found</html>", "vllm:e2e_request_latency_seconds_sum 3\n", "{" * 10])
def test_a_page_that_says_nothing(page: str) -> None:
    assert read_signal(page) is None


def test_a_share_beyond_the_whole_is_the_whole() -> None:
    assert read_signal('vllm:kv_cache_usage_perc{engine="0"} 97\n') == EngineSignal(kv_share=1.0)


async def read_from(answer: bytes) -> tuple[EngineSignal | None, list[EngineSignal], bytes]:
    asked = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    engine = OpenAIEngine(
        "e", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asyncio.get_running_loop(), api_key="secret"
    )
    told: list[EngineSignal] = []
    reader = SignalReader(engine, lambda _, signal: told.append(signal))
    try:
        return await reader.once(), told, asked
    finally:
        engine.close()
        server.close()


def test_the_page_is_read_and_told() -> None:
    answer = b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\n" + VLLM.encode()
    signal, told, asked = asyncio.run(read_from(answer))
    assert told == [signal]
    assert signal is not None
    assert signal.kv_tokens == 16_000
    assert asked.startswith(b"GET /metrics HTTP/1.0\r\n")
    assert b"authorization: Bearer secret\r\n" in asked


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.0 404 x\r\n\r\n" + VLLM.encode(), b"\xff\xfe" * 50])
def test_no_page_is_no_news(answer: bytes) -> None:
    assert asyncio.run(read_from(answer))[:2] == (None, [])
