"""What an engine says of itself on its metrics page: how much runs and waits there, and how full its memory is.

Read every so often on a connection of its own, and bounded in time and size. These figures correct what the gateway
knows from its own counters, which are never stale; they never replace them. A page that cannot be had, or says nothing
of use, is no failure of the engine: the last figures simply grow old, and what is old is not known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from forebay.core.instant import SECOND
from forebay.core.model import EngineSignal
from forebay.engines.openai import OpenAIEngine
from forebay.engines.prometheus import Sample, fetch_page, samples
from forebay.engines.watching import Watch

# Names of the same figure in vLLM (V1 and before), SGLang, TensorRT-LLM (its own server; behind Triton), TGI,
# llama.cpp and Triton. The first that a page has counts. `name{label=value}` picks one series of several.
RUNNING = (
    "vllm:num_requests_running", "sglang:num_running_reqs", "trtllm_num_requests_running",
    "nv_trt_llm_request_metrics{request_type=scheduled}", "tgi_batch_current_size", "llamacpp:requests_processing",
)  # fmt: skip
WAITING = (
    "vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm_num_requests_waiting",
    "nv_trt_llm_request_metrics{request_type=waiting}", "tgi_queue_size", "llamacpp:requests_deferred",
    "nv_inference_pending_request_count",
)  # fmt: skip
KV_SHARE = (
    "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "trtllm_kv_cache_utilization",
    "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}",
)  # fmt: skip
KV_TOKENS = ("sglang:max_total_num_tokens",)
KV_BLOCKS = "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}"
BLOCK_TOKENS = "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}"
PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions", "sglang:num_retractions_total")
CACHE_CONFIG = "vllm:cache_config_info"

# Totals since the engine started: time in its own queue, and how many requests that was the time of.
QUEUE_S = ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds", "trtllm_request_queue_time_seconds")
TRITON_QUEUE_US = "nv_inference_queue_duration_us"
TRITON_COMPUTE_US = (
    "nv_inference_compute_input_duration_us", "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
)  # fmt: skip
TRITON_ANSWERED = "nv_inference_request_success"

NAMES = tuple(
    dict.fromkeys(
        name.partition("{")[0]
        for name in (
            *RUNNING, *WAITING, *KV_SHARE, *KV_TOKENS, KV_BLOCKS, *PREEMPTIONS, CACHE_CONFIG,
            *(f"{name}_{part}" for name in QUEUE_S for part in ("sum", "count")),
            TRITON_QUEUE_US, *TRITON_COMPUTE_US, TRITON_ANSWERED,
        )
    )
)  # fmt: skip


class Totals(NamedTuple):
    """What an engine has counted since it started; only differences say something."""

    queue_ns: int
    service_ns: int | None  # None: it does not tell them apart
    requests: int


class Reading(NamedTuple):
    """One page."""

    signal: EngineSignal
    totals: Totals | None


def read_page(page: str, models: Sequence[str] = ()) -> Reading | None:
    """The figures of a page, summed over the engine's own replicas (shares: the fullest); None if it has none of use.

    `models`: of a server with several, those that count, by their names there; if it names none of them, all do.
    """
    found: dict[str, list[Sample]] = {}
    for sample in samples(page, NAMES):
        if _counts(sample.labels):
            found.setdefault(sample.name, []).append(sample)
    if models and any(sample.labels.get("model") in models for many in found.values() for sample in many):
        found = {
            name: kept
            for name, many in found.items()
            if (kept := [sample for sample in many if sample.labels.get("model", models[0]) in models])
        }
    signal = EngineSignal(
        running=_sum(found, RUNNING),
        waiting=_sum(found, WAITING),
        kv_share=_fullest(found),
        kv_tokens=_kv_tokens(found),
        preemptions=_sum(found, PREEMPTIONS),
    )
    totals = _totals(found)
    return None if totals is None and all(figure is None for figure in signal) else Reading(signal, totals)


def _counts(labels: dict[str, str]) -> bool:
    """Ranks that work on the same requests each tell of all of them, and so do buckets beside their sum."""
    return labels.get("tp_rank", "0") == "0" and labels.get("pp_rank", "0") == "0" and not labels.get("priority")


def _values(found: dict[str, list[Sample]], names: Iterable[str]) -> list[float] | None:
    """The values of the first of these figures that the page has."""
    for name in names:
        metric, _, condition = name.partition("{")
        label, _, wanted = condition.rstrip("}").partition("=")
        values = [s.value for s in found.get(metric, ()) if not label or s.labels.get(label) == wanted]
        if values:
            return values
    return None


def _sum(found: dict[str, list[Sample]], names: Iterable[str]) -> int | None:
    values = _values(found, names)
    return None if values is None else int(sum(values))


def _fullest(found: dict[str, list[Sample]]) -> float | None:
    values = _values(found, KV_SHARE)
    return None if values is None else min(1.0, max(values))


def _kv_tokens(found: dict[str, list[Sample]]) -> int | None:
    """Tokens that the KV cache holds: vLLM's own word for it, else blocks times their size; None if not said."""
    if told := sum(_vllm_tokens(sample.labels) for sample in found.get(CACHE_CONFIG, ())):
        return told
    blocks, size = _sum(found, (KV_BLOCKS,)), _values(found, (BLOCK_TOKENS,))
    return (blocks * int(size[0]) if blocks and size else _sum(found, KV_TOKENS)) or None


def _vllm_tokens(labels: dict[str, str]) -> int:
    figures = [labels.get(name, "") for name in ("kv_cache_size_tokens", "num_gpu_blocks", "block_size")]
    whole, blocks, size = (int(figure) if figure.isdigit() else 0 for figure in figures)
    return whole or blocks * size


def _totals(found: dict[str, list[Sample]]) -> Totals | None:
    for name in QUEUE_S:
        seconds, count = _values(found, (f"{name}_sum",)), _sum(found, (f"{name}_count",))
        if seconds is not None and count is not None:
            return Totals(int(sum(seconds) * SECOND), None, count)
    queue_us, count = _sum(found, (TRITON_QUEUE_US,)), _sum(found, (TRITON_ANSWERED,))
    compute_us = [us for name in TRITON_COMPUTE_US if (us := _sum(found, (name,))) is not None]
    if queue_us is None or count is None or not compute_us:
        return None
    # A model that batches in flight counts its queue inside its compute time: it says more of itself elsewhere.
    in_flight = "nv_trt_llm_request_metrics" in found
    return None if in_flight else Totals(queue_us * 1000, sum(compute_us) * 1000, count)


def since(now: Totals | None, before: Totals | None) -> tuple[int | None, int | None]:
    """(wait in the engine's queue, time of the work itself) per request answered between two pages, in ns.

    None for what is not known: there is no page before, nothing was answered, or the engine started anew.
    """
    if now is None or before is None or now.requests <= before.requests or now.queue_ns < before.queue_ns:
        return None, None
    count = now.requests - before.requests
    queue_ns = (now.queue_ns - before.queue_ns) // count
    if now.service_ns is None or before.service_ns is None:
        return queue_ns, None
    return queue_ns, max(0, now.service_ns - before.service_ns) // count


class SignalReader(Watch):
    """Reads one engine's metrics page for ever."""

    def __init__(
        self,
        engine: OpenAIEngine,
        told: Callable[[OpenAIEngine, EngineSignal], None],
        *,
        path: str = "/metrics",
        port: int | None = None,
        models: Sequence[str] = (),
        interval_s: float = 1.0,
    ) -> None:
        """`port`: of the page, where it is not the engine's own. `models`: see `read_page`."""
        self.name = engine.name
        self._engine = engine
        self._told = told
        self._path = path
        self._port = port
        self._models = models
        self._interval_s = interval_s
        self._totals: Totals | None = None
        self.read_at: float | None = None
        """Loop time of the last page that said something; None before the first."""

    async def once(self) -> EngineSignal | None:
        """Read the page now; what it says is told."""
        page = await self._page()
        reading = None if page is None else read_page(page, self._models)
        if reading is None:
            return None
        queue_wait_ns, service_ns = since(reading.totals, self._totals)
        self._totals = reading.totals
        signal = reading.signal._replace(queue_wait_ns=queue_wait_ns, service_ns=service_ns)
        self.read_at = asyncio.get_running_loop().time()
        self._told(self._engine, signal)
        return signal

    async def _run(self) -> None:
        while True:
            await self.once()
            # An engine without such a page is not asked every second for ever.
            await asyncio.sleep(self._interval_s if self.read_at is not None else 10 * self._interval_s)

    async def _page(self) -> str | None:
        engine = self._engine
        if self._port is not None:  # another server on the same machine, which gets no credential
            host = engine.host if ":" not in engine.host else f"[{engine.host}]"
            head = f"GET {self._path} HTTP/1.0\r\nhost: {host}:{self._port}\r\n".encode()
            return await fetch_page(engine.host, self._port, head)
        head = engine.head(b"GET", self._path.encode()).replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)
        return await fetch_page(engine.host, engine.port, head, engine.tls)
