"""What engines say of themselves: pages of real engines in short, and pages that make no sense."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.model import EngineSignal
from forebay.engines.openai import OpenAIEngine
from forebay.engines.serving.metrics import EngineMetrics
from forebay.engines.signals import Reading, SignalReader, Totals, read_page, since

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
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 9.0
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 10.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 2.5
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"} 5.0
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="-1",tp_rank="0"} 2.0
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="0",tp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="1"} 5.0
sglang:num_running_reqs{dp_rank="1",model_name="m",pp_rank="0",tp_rank="0"} 4.0
sglang:num_queue_reqs{model_name="m"} 0.0
sglang:token_usage{model_name="m"} 0.5
sglang:max_total_num_tokens{model_name="m"} 4096.0
sglang:queue_time_seconds_sum{model_name="m"} 0.75
sglang:queue_time_seconds_count{model_name="m"} 6.0
"""
TRTLLM_SERVE = """\
# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{model_name="llama",engine_type="trtllm"} 3.0
trtllm_num_requests_waiting{model_name="llama",engine_type="trtllm"} 1.0
trtllm_kv_cache_utilization{model_name="llama",engine_type="trtllm"} 0.62
trtllm_request_queue_time_seconds_sum{model_name="llama",engine_type="trtllm"} 0.5
trtllm_request_queue_time_seconds_count{model_name="llama",engine_type="trtllm"} 4.0
"""
TRTLLM_TRITON = """\
# HELP nv_trt_llm_request_metrics TRT LLM request metrics
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 4
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 7
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.6
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 2000
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 4000
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 6239
nv_inference_request_success{model="tensorrt_llm",version="1"} 10
nv_inference_queue_duration_us{model="tensorrt_llm",version="1"} 500
nv_inference_compute_infer_duration_us{model="tensorrt_llm",version="1"} 90000000
nv_inference_pending_request_count{model="tensorrt_llm",version="1"} 0
"""
TRITON = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="scorer",version="1"} 2000
nv_inference_request_success{model="minilm",version="1"} 100
# HELP nv_inference_request_duration_us Cumulative inference request duration in microseconds (includes cached requests)
# TYPE nv_inference_request_duration_us counter
nv_inference_request_duration_us{model="scorer",version="1"} 99000000
# HELP nv_inference_queue_duration_us Cumulative inference queuing duration in microseconds (includes cached requests)
# TYPE nv_inference_queue_duration_us counter
nv_inference_queue_duration_us{model="scorer",version="1"} 80000000
nv_inference_queue_duration_us{model="minilm",version="1"} 1000000
# HELP nv_inference_compute_input_duration_us Cumulative compute input duration in microseconds
# TYPE nv_inference_compute_input_duration_us counter
nv_inference_compute_input_duration_us{model="scorer",version="1"} 1000000
nv_inference_compute_infer_duration_us{model="scorer",version="1"} 17000000
nv_inference_compute_infer_duration_us{model="minilm",version="1"} 500000
nv_inference_compute_output_duration_us{model="scorer",version="1"} 2000000
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="scorer",version="1"} 11
nv_inference_pending_request_count{model="minilm",version="1"} 3
# TYPE nv_cpu_utilization gauge
nv_cpu_utilization 0.02255639097744361
"""
TGI = "tgi_queue_size 7\ntgi_batch_current_size 5\ntgi_request_count 150\n"
LLAMA_CPP = "llamacpp:requests_processing 8\nllamacpp:requests_deferred 3\nllamacpp:prompt_tokens_total 900\n"


def signal_of(page: str, *models: str) -> EngineSignal | None:
    reading = read_page(page, models)
    return None if reading is None else reading.signal


@pytest.mark.parametrize(
    ("page", "signal", "totals"),
    [
        (VLLM, EngineSignal(15, 2, 0.75, 16_000, 4), Totals(5 * SECOND // 2, None, 10)),
        (SGLANG, EngineSignal(9, 0, 0.5, 4096, None), Totals(750 * MILLISECOND, None, 6)),
        (TRTLLM_SERVE, EngineSignal(3, 1, 0.62, None, None), Totals(SECOND // 2, None, 4)),
        (TRTLLM_TRITON, EngineSignal(4, 3, 0.6, 6239 * 64, None), None),
        (TRITON, EngineSignal(None, 14), Totals(81 * SECOND, 20 * SECOND + SECOND // 2, 2100)),
        (TGI, EngineSignal(5, 7), None),
        (LLAMA_CPP, EngineSignal(8, 3), None),
    ],
    ids=["vllm", "sglang", "trtllm-serve", "trtllm-triton", "triton", "tgi", "llama.cpp"],
)
def test_engines(page: str, signal: EngineSignal, totals: Totals | None) -> None:
    assert read_page(page) == Reading(signal, totals)


def test_of_a_server_with_several_models_those_that_are_ours_count() -> None:
    assert read_page(TRITON, ("scorer",)) == Reading(EngineSignal(None, 11), Totals(80 * SECOND, 20 * SECOND, 2000))
    assert signal_of(TRITON, "known by another name there") == EngineSignal(None, 14)
    assert signal_of(VLLM, "m") == signal_of(VLLM)


def test_our_own_engines() -> None:
    page = EngineMetrics('odd "name"').text(
        running=7, waiting=1, kv_usage=0.5, max_batch=64,
        cache_config={"block_size": "16", "num_gpu_blocks": "10", "kv_cache_size_tokens": "165"},
    )  # fmt: skip
    assert read_page(page) == Reading(EngineSignal(7, 1, 0.5, 165, 0), Totals(0, None, 0))


@pytest.mark.parametrize(
    "value", ["NaN", "-1", "+Inf", "soon", "", "1e999"], ids=["nan", "negative", "inf", "text", "nothing", "overflow"]
)
def test_a_figure_that_is_none_is_left_out(value: str) -> None:
    """F-05: missing, NaN, negative or text; the others count all the same."""
    page = f'vllm:num_requests_running{{engine="0"}} {value}\nvllm:num_requests_waiting 3\n'
    assert signal_of(page) == EngineSignal(waiting=3)


@pytest.mark.parametrize("page", ["", "<html>not found</html>", "vllm:e2e_request_latency_seconds_sum 3\n", "{" * 10])
def test_a_page_that_says_nothing(page: str) -> None:
    assert read_page(page) is None


@given(st.text(st.sampled_from('vllm:num_requests_running{}="0,1.e+ \n\\#'), max_size=200))
def test_no_page_breaks_it(page: str) -> None:
    reading = read_page("vllm:num_requests_running{" + page)
    assert reading is None or reading.signal.running is None or reading.signal.running >= 0


def test_a_share_beyond_the_whole_is_the_whole() -> None:
    assert signal_of('vllm:kv_cache_usage_perc{engine="0"} 97\n') == EngineSignal(kv_share=1.0)


# ---- between two pages ----------------------------------------------------------------------------------------


def test_waiting_and_working_are_told_apart_between_two_pages() -> None:
    before, now = Totals(10 * SECOND, 5 * SECOND, 100), Totals(12 * SECOND, 6 * SECOND, 120)
    assert since(now, before) == (100 * MILLISECOND, 50 * MILLISECOND)
    assert since(now._replace(service_ns=None), before) == (100 * MILLISECOND, None)


@pytest.mark.parametrize(
    ("now", "before"),
    [
        (None, Totals(0, 0, 1)),
        (Totals(0, 0, 1), None),
        (Totals(1, 1, 5), Totals(1, 1, 5)),  # nothing was answered
        (Totals(1, 1, 2), Totals(9, 9, 9)),  # it started anew
        (Totals(1, 1, 12), Totals(9, 9, 9)),
    ],
)
def test_what_lies_between_is_not_always_known(now: Totals | None, before: Totals | None) -> None:
    assert since(now, before) == (None, None)


# ---- the reader -----------------------------------------------------------------------------------------------


async def read_from(*answers: bytes, port: bool = False) -> tuple[list[EngineSignal | None], list[EngineSignal], bytes]:
    asked, left = b"", list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    number = server.sockets[0].getsockname()[1]
    engine = OpenAIEngine(
        "e", f"http://127.0.0.1:{1 if port else number}", asyncio.get_running_loop(), api_key="secret"
    )
    told: list[EngineSignal] = []
    reader = SignalReader(engine, lambda _, signal: told.append(signal), port=number if port else None)
    try:
        return [await reader.once() for _ in answers], told, asked
    finally:
        engine.close()
        server.close()


OK = b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\n"


def test_the_page_is_read_and_told() -> None:
    (signal,), told, asked = asyncio.run(read_from(OK + VLLM.encode()))
    assert told == [signal]
    assert signal is not None
    assert signal.kv_tokens == 16_000
    assert signal.queue_wait_ns is None, "the first page has none before it"
    assert asked.startswith(b"GET /metrics HTTP/1.0\r\n")
    assert b"authorization: Bearer secret\r\n" in asked


def test_a_page_on_a_port_of_its_own_gets_no_credential() -> None:
    (signal,), _, asked = asyncio.run(read_from(OK + TRITON.encode(), port=True))
    assert signal == EngineSignal(None, 14)
    assert b"authorization" not in asked


def test_the_second_page_tells_what_was_between() -> None:
    later = TRITON.replace("} 2000\n", "} 2010\n").replace("} 80000000\n", "} 80200000\n")
    later = later.replace("} 17000000\n", "} 17100000\n")
    (_, signal), _, _ = asyncio.run(read_from(OK + TRITON.encode(), OK + later.encode()))
    assert signal is not None
    assert (signal.queue_wait_ns, signal.service_ns) == (20 * MILLISECOND, 10 * MILLISECOND)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.0 404 x\r\n\r\n" + VLLM.encode(), b"\xff\xfe" * 50])
def test_no_page_is_no_news(answer: bytes) -> None:
    assert asyncio.run(read_from(answer))[:2] == ([None], [])
