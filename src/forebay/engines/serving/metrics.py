"""What an engine tells Prometheus: vLLM's names, and the busy and batch counters that the reports read."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

# The bucket borders are vLLM's own, so that dashboards made for it fit.
TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip


class Histogram:
    """Counts per bucket; cheap enough for every token."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str, labels: str) -> list[str]:
        """Exposition lines; `labels` is `a="b",c="d"`."""
        lines = [f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
        lines += [f"{name}_count{{{labels}}} {total}", f"{name}_sum{{{labels}}} {self._sum:.9g}"]
        return lines


class EngineMetrics:
    """Running totals of one engine. All times are wall-clock seconds, as a client would measure them."""

    def __init__(self, model_name: str) -> None:
        self._labels = f'engine="0",model_name="{_escape(model_name)}"'
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0})
        self.rejections: Counter[str] = Counter({"max_num_queued_reqs": 0})
        self.busy_s = 0.0
        self.steps = 0
        self.batch_seqs = 0
        self.ttft_s = Histogram(TTFT_BOUNDS)
        self.itl_s = Histogram(ITL_BOUNDS)
        self.queue_s = Histogram(LATENCY_BOUNDS)
        self.e2e_s = Histogram(LATENCY_BOUNDS)

    def stepped(self, took_s: float, sequences: int) -> None:
        """One step of the engine has ended."""
        self.busy_s += took_s
        self.steps += 1
        self.batch_seqs += sequences

    def text(self, *, running: int, waiting: int, kv_usage: float, max_batch: int, cache_config: dict[str, str]) -> str:
        """Prometheus text. `kv_usage` is a share, 0 to 1; `max_batch` the most sequences one step can hold."""
        labels = self._labels
        config = ",".join(f'{name}="{_escape(value)}"' for name, value in cache_config.items())
        lines = [
            *self._one("vllm:num_requests_running", "gauge", running),
            *self._one("vllm:num_requests_waiting", "gauge", waiting),
            *self._one("vllm:kv_cache_usage_perc", "gauge", round(kv_usage, 6)),
            *self._one("vllm:num_preemptions_total", "counter", self.preemptions),
            *self._one("vllm:prompt_tokens_total", "counter", self.prompt_tokens),
            *self._one("vllm:generation_tokens_total", "counter", self.generation_tokens),
            "# TYPE vllm:request_success_total counter",
            *(
                f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}'
                for reason, count in sorted(self.finished.items())
            ),
            "# TYPE vllm:admission_rejections_total counter",
            *(
                f'vllm:admission_rejections_total{{{labels},reason="{reason}"}} {count}'
                for reason, count in sorted(self.rejections.items())
            ),
            "# TYPE vllm:cache_config_info gauge",
            f"vllm:cache_config_info{{{config}{',' if config else ''}{labels}}} 1",
            *self.ttft_s.lines("vllm:time_to_first_token_seconds", labels),
            *self.itl_s.lines("vllm:inter_token_latency_seconds", labels),
            *self.queue_s.lines("vllm:request_queue_time_seconds", labels),
            *self.e2e_s.lines("vllm:e2e_request_latency_seconds", labels),
            *self._one("forebay_engine_busy_seconds_total", "counter", round(self.busy_s, 6)),
            *self._one("forebay_engine_steps_total", "counter", self.steps),
            *self._one("forebay_engine_batch_seqs_total", "counter", self.batch_seqs),
            *self._one("forebay_engine_max_batch", "gauge", max_batch),
        ]
        return "\n".join(lines) + "\n"

    def _one(self, name: str, kind: str, value: float) -> tuple[str, str]:
        return f"# TYPE {name} {kind}", f"{name}{{{self._labels}}} {value}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
