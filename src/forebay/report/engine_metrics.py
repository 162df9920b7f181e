"""Reads an engine's own counters from its Prometheus text, whichever engine it is."""

from __future__ import annotations

import math

from forebay.report.records import EngineSample

# Figure -> the names it goes by, the first present wins. Label sets are summed: an engine may publish one per model.
FIGURES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"),
    "busy_s": ("forebay_engine_busy_seconds_total",),
    "steps": ("forebay_engine_steps_total",),
    "batch_seqs": ("forebay_engine_batch_seqs_total",),
    "max_batch": ("forebay_engine_max_batch",),
    "generated_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
}
_WANTED = frozenset(name for names in FIGURES.values() for name in names)


def engine_sample(text: str, at_ns: int) -> EngineSample:
    """The figures of one scrape; what the engine does not publish, or publishes as NaN, is None."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name, value = _name_and_value(line)
        if name in _WANTED and value is not None:
            sums[name] = sums.get(name, 0.0) + value
    found = {figure: next((sums[name] for name in names if name in sums), None) for figure, names in FIGURES.items()}
    return EngineSample(at_ns=at_ns, **found)


def _name_and_value(line: str) -> tuple[str, float | None]:
    if not line or line[0] == "#":
        return "", None
    brace = line.find("{")
    name, rest = (line[:brace], line[line.rfind("}") + 1 :]) if brace >= 0 else line.partition(" ")[::2]
    try:
        value = float(rest.split()[0])
    except (ValueError, IndexError):
        return "", None
    return name, value if math.isfinite(value) else None
