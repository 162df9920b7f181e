"""Rounds of the proxies' metrics -> their spreads, ratios against the targets, and the Markdown that shows them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from benchmarks.tables import Spread, cell, provenance, table

if TYPE_CHECKING:
    from collections.abc import Mapping

Rounds = list[dict[str, dict[str, float]]]
"""Per round, per proxy, per metric."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A ratio of two figures of the same round: ``metric`` of ``subject`` over ``base_metric`` of ``base``."""

    title: str
    subject: str
    metric: str
    base: str
    base_metric: str
    target: float | None = None


_REQUEST: Final = "request_cpu_us"
_CHUNK: Final = "chunk_cpu_us"
_REFUSAL: Final = "refusal_cpu_us"

COMPARISONS: Final = (
    Comparison("CPU per request, over Envoy with filters", "forebay", _REQUEST, "envoy-filters", _REQUEST, 0.85),
    Comparison("CPU per request, over vllm-router", "forebay", _REQUEST, "vllm-router", _REQUEST, 0.45),
    Comparison("CPU per request, over sglang-router", "forebay", _REQUEST, "sglang-router", _REQUEST, 0.45),
    Comparison("CPU per request, over nginx", "forebay", _REQUEST, "nginx", _REQUEST),
    Comparison("CPU per request without keys, over bare Envoy", "forebay-bare", _REQUEST, "envoy", _REQUEST),
    Comparison("CPU per SSE chunk, over nginx", "forebay", _CHUNK, "nginx", _CHUNK, 1.4),
    Comparison("CPU per SSE chunk, over bare Envoy", "forebay", _CHUNK, "envoy", _CHUNK, 0.85),
    Comparison("CPU per refusal, over its own proxied request", "forebay", _REFUSAL, "forebay", _REQUEST, 0.5),
)


def summarize(rounds: Rounds) -> dict[str, dict[str, Spread]]:
    """The spread of every metric of every proxy."""
    summary: dict[str, dict[str, Spread]] = {}
    for name in dict.fromkeys(name for proxies in rounds for name in proxies):
        metrics = dict.fromkeys(metric for proxies in rounds for metric in proxies.get(name, {}))
        for metric in metrics:
            spread = Spread.of(p[name][metric] for p in rounds if metric in p.get(name, {}))
            if spread is not None:
                summary.setdefault(name, {})[metric] = spread
    return summary


def compare(rounds: Rounds) -> list[dict[str, Any]]:
    """Every comparison that the rounds hold both sides of, with ``met`` saying whether its target is."""
    found = []
    for comparison in COMPARISONS:
        ratios = []
        for proxies in rounds:
            subject = proxies.get(comparison.subject, {}).get(comparison.metric)
            base = proxies.get(comparison.base, {}).get(comparison.base_metric)
            if subject is not None and base:
                ratios.append(subject / base)
        spread = Spread.of(ratios)
        if spread is not None:
            met = None if comparison.target is None else spread.median <= comparison.target
            found.append({**asdict(comparison), **asdict(spread), "met": met})
    return found


_COLUMNS: Final = (
    ("CPU µs / request", "request_cpu_us", 1),
    ("CPU µs / SSE chunk", "chunk_cpu_us", 1),
    ("CPU µs / refusal", "refusal_cpu_us", 1),
    ("added p50 µs", "added_p50_us", 0),
    ("added p99 µs", "added_p99_us", 0),
)


def markdown(result: Mapping[str, Any]) -> str:
    """The generated section of ``docs/benchmarks.md``: environment, table, ratios, memory, what failed."""
    load, summary = result["parameters"], result["summary"]
    titles = {**result["titles"], "direct": "direct, no proxy"}
    lines = [*provenance(result), ""]
    lines += table(
        ["proxy", "version", *(title for title, _, _ in _COLUMNS)],
        [
            [
                titles[name],
                result["versions"].get(name, "–"),
                *(cell(summary[name].get(key), digits) for _, key, digits in _COLUMNS),
            ]
            for name in titles
            if name in summary and name != "direct"
        ],
    )
    direct = summary.get("direct", {})
    if "latency_p50_us" in direct:
        latencies = [cell(direct[f"latency_{share}_us"], 0) for share in ("p50", "p99")]
        costs = [cell(direct.get(f"{unit}_upstream_cpu_us"), 1) for unit in ("request", "chunk")]
        lines += [
            "",
            f"Without a proxy, at {load['paced_per_s']:g}/s: p50 {latencies[0]} µs, p99 {latencies[1]} µs.",
            f"The upstream itself spends {costs[0]} µs of CPU per request and {costs[1]} per chunk, in no row.",
        ]
    if result["comparisons"]:
        lines += ["", "Ratios, each taken within a round:", ""]
        verdict = {True: "met", False: "**missed**", None: "–"}
        lines += table(
            ["Forebay", "ratio", "target", ""],
            [
                [c["title"], cell(c, 2), f"≤ {c['target']:g}" if c["target"] is not None else "–", verdict[c["met"]]]
                for c in result["comparisons"]
            ],
        )
    if result["memory"]:
        lines += ["", "Resident memory, on a freshly started process:", ""]
        lines += table(
            ["proxy", "KiB / idle connection", "KiB / queued request with its connection"],
            [
                [titles[name], *(_kib(metrics.get(key)) for key in ("idle_connection_bytes", "queued_request_bytes"))]
                for name, metrics in result["memory"].items()
            ],
        )
    if result["failures"]:
        lines += ["", "Not measured:", "", *(f"- {failure}" for failure in result["failures"])]
    return "\n".join(lines) + "\n"


def _kib(value: float | None) -> str:
    return "–" if value is None else f"{value / 1024:.1f}"
