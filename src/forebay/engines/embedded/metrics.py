"""The engine's Prometheus metrics, under the names that vLLM gave them, and a few of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

_TTFT_BUCKETS_S: Final = (
    0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_TOKEN_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST_BUCKETS_S: Final = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0)


@dataclass(frozen=True, slots=True)
class Observed:
    """What the worker's thread counted, as of its last step."""

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    steps: int = 0
    sequences: int = 0
    """Batch sizes summed over the steps."""


class Metrics:
    """Belongs to the event loop's thread."""

    def __init__(self, model_id: str, slots: int) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._steps = _Steps(model_id, slots)
        self._registry.register(self._steps)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)
            return made.labels(model_id)

        self._first = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS_S)
        self._between = histogram("vllm:inter_token_latency_seconds", "Between tokens.", _TOKEN_BUCKETS_S)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", _REQUEST_BUCKETS_S)
        self._ended = Counter(
            "vllm:request_success", "Requests that ended.", ["model_name", "finished_reason"], registry=self._registry
        )
        for reason in ("stop", "length", "abort"):
            self._ended.labels(model_id, reason)
        self._model_id = model_id

    def token(self, seconds: float, *, first: bool) -> None:
        """A token came, so long after the arrival (`first`) or the token before."""
        (self._first if first else self._between).observe(seconds)

    def finished(self, reason: str, seconds: float | None = None) -> None:
        """A request ended; `seconds` since its arrival unless it was aborted."""
        self._ended.labels(self._model_id, reason).inc()
        if seconds is not None:
            self._whole.observe(seconds)

    def render(self, observed: Observed) -> str:
        """Prometheus text."""
        self._steps.observed = observed
        return generate_latest(self._registry).decode()


class _Steps(Collector):
    """Turns the worker's counts into metrics at scrape time."""

    def __init__(self, model_id: str, slots: int) -> None:
        self.observed = Observed()
        self._model_id = model_id
        self._slots = slots

    def collect(self) -> Iterator[Metric]:
        seen = self.observed
        gauges = (
            ("vllm:num_requests_running", "Requests in the batch.", seen.running),
            ("vllm:num_requests_waiting", "Requests that wait for a slot.", seen.waiting),
            ("vllm:kv_cache_usage_perc", "Used part of the KV cache, 0 to 1.", seen.cache_usage),
            ("forebay_engine_max_batch", "Most requests in a batch.", self._slots),
        )
        counters = (
            ("vllm:prompt_tokens", "Prompt tokens computed.", seen.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", seen.generated_tokens),
            ("forebay_engine_busy_seconds", "Time spent in steps.", seen.busy_s),
            ("forebay_engine_steps", "Steps of the model.", seen.steps),
            ("forebay_engine_batch_seqs", "Batch sizes, summed over the steps.", seen.sequences),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_id], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_id], value)
            yield counter
