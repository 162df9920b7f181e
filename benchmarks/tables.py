"""Rounds of metrics -> medians with their spread, ratios against the targets, and the Markdown that shows them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.peers import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Rounds = list[dict[str, dict[str, float]]]
"""Per round, per proxy, per metric."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds."""

    median: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The spread of ``values``, or None when there are none."""
        kept = list(values)
        return cls(median(kept), min(kept), max(kept), len(kept)) if kept else None


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


def cell(spread: Mapping[str, Any] | None, digits: int) -> str:
    """A spread as it stands in a table: median, and the range when there is one."""
    if spread is None:
        return "–"
    low, high = f"{spread['min']:,.{digits}f}", f"{spread['max']:,.{digits}f}"
    middle = f"{spread['median']:,.{digits}f}"
    return middle if spread["n"] == 1 or low == high else f"{middle} ({low}–{high})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table: the first column text, the others figures."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


_COLUMNS: Final = (
    ("CPU µs / request", "request_cpu_us", 1),
    ("CPU µs / SSE chunk", "chunk_cpu_us", 1),
    ("CPU µs / refusal", "refusal_cpu_us", 1),
    ("added p50 µs", "added_p50_us", 0),
    ("added p99 µs", "added_p99_us", 0),
)


def provenance(result: Mapping[str, Any]) -> list[str]:
    """Two lines that say when, where, from which commit and by which command the figures came."""
    env = result["environment"]
    dirty = " with changes not yet committed" if env["dirty"] else ""
    place = f"{env['machine']}, {env['cpus']} cores, {env['system']}, Python {env['python']}"
    return [
        f"Measured {env['at']} at commit `{env['commit']}`{dirty} on {place}, by `{result['command']}`.",
        f"{result['rounds_run']} rounds, interleaved; median (lowest–highest round).",
        f"Load average before the run: {env['load_before']:g}.",
    ]


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


def replace_section(text: str, name: str, body: str) -> str:
    """``text`` with what stands between the markers of ``name`` replaced by ``body``.

    Raises:
        ValueError: the markers are missing.
    """
    begin, end = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"the text holds no section between {begin.strip()!r} and {end!r}")
    return f"{before}{begin}\n{body}\n{end}{after}"


def write_section(name: str, body: str) -> None:
    """Put ``body`` into the section ``name`` of ``docs/benchmarks.md``."""
    page = ROOT / "docs" / "benchmarks.md"
    page.write_text(replace_section(page.read_text(), name, body))
