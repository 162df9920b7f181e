"""The generated sections of ``docs/admission-study.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks import tables
from benchmarks.admission_trials import COUNTED, PAIRS, SIZE_BOUNDS, VARIANT_LOAD, VARIANTS

TITLES: Final = {
    "requests": "requests in flight",
    "tokens": "tokens in flight",
    "tokens, blind": "tokens in flight, blind at the door",
    "guarded": "guarded window",
    "requests per key": "requests/min per key",
    "tokens per key": "tokens/min per key",
}
METRICS: Final = {"ttft": "first token", "latency": "whole answer"}
CLAIMED: Final = 0.4
OBJECTIVE_MS: Final = 1000.0

Result = Mapping[str, Any]
Comparison = Mapping[str, Any]


def _cases(result: Result, variant: str = "") -> list[Mapping[str, Any]]:
    return [case for case in result["cases"] if case["variant"] == variant]


def _of(case: Mapping[str, Any], pair: tuple[str, str]) -> Iterator[Comparison]:
    for one in case["comparisons"]:
        if (one["by_count"], one["by_tokens"]) == pair:
            yield one


def _whole(value: float) -> int:
    return round(100 * value)


def _signed(value: float) -> str:
    return f"{_whole(value):+d}".replace("-", "−")


def _range(figure: Mapping[str, float]) -> str:
    """In percent, with its bounds."""
    plain = [f"{_whole(figure[name])}".replace("-", "−") for name in ("value", "low", "high")]
    return f"{plain[0]} ({plain[1]} to {plain[2]})"


def _signed_range(figure: Mapping[str, float]) -> str:
    return f"{_signed(figure['value'])} ({_signed(figure['low'])} to {_signed(figure['high'])})"


def provenance(result: Result) -> list[str]:
    """When, from which commit and by which command."""
    env = result["environment"]
    dirty = " with changes not yet committed" if env["dirty"] else ""
    place = f"{result['wall_s']:.0f} s on {env['cpus']} cores of {env['machine']}"
    made = f"Simulated {env['at']} at commit `{env['commit']}`{dirty} by `{result['command']}`"
    bounds = f"In brackets: 95 %, by resampling {result['blocks']} blocks of each trace."
    return [f"{made}: {result['runs']} runs in {place}.", bounds, ""]


def summary(result: Result) -> str:
    """Each pair over all traces, loads and targets."""
    rows = []
    for pair in PAIRS:
        found = [one for case in _cases(result) for one in _of(case, pair)]
        if not found:
            continue
        fewer, tokens = ([one[name] for one in found] for name in ("fewer", "tokens_more"))
        rows.append([
            f"{TITLES[pair[1]]}, against {TITLES[pair[0]]}",
            f"{len(found)}",
            _spread([one["value"] for one in fewer], "{}"),
            f"{sum(one['low'] > 0 for one in fewer)} / {sum(one['high'] < 0 for one in fewer)}",
            f"{sum(one['value'] >= CLAIMED for one in fewer)}",
            _spread([one["value"] for one in tokens], "{:+}"),
        ])  # fmt: skip
    head = ["", "comparisons", "fewer refused %, median (range)", "surely fewer / more", "40 % or more",
            "tokens served %, median (range)"]  # fmt: skip
    return "\n".join([*provenance(result), *tables.table(head, rows)]) + "\n"


def _spread(values: Sequence[float], form: str) -> str:
    low, middle, high = (
        form.format(_whole(one)).replace("-", "−") for one in (min(values), median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def detail(result: Result) -> str:
    """Of every trace: each load and target, by requests and by the rules that count tokens."""
    lines: list[str] = []
    pairs = [pair for pair in PAIRS if pair[0] == COUNTED]
    for trace in dict.fromkeys(case["trace"] for case in result["cases"]):
        cases = [case for case in _cases(result) if case["trace"] == trace]
        lines += [f"### {trace}", ""]
        lines += [f"Capacity within the objective: {cases[0]['capacity_requests_per_s']:.1f} requests/s.", ""]
        head = ["load", "p99 of", "within s", "by requests: refused %"]
        head += [f"{TITLES[pair[1]]}: {what}" for pair in pairs for what in ("fewer %", "tokens served %")]
        rows = []
        for case in cases:
            by_target: dict[tuple[str, float], dict[tuple[str, str], Comparison]] = {}
            for pair in pairs:
                for one in _of(case, pair):
                    by_target.setdefault((one["metric"], one["target_ms"]), {})[pair] = one
            for (metric, target), found in sorted(by_target.items(), key=lambda one: (one[0][0] != "ttft", one[0][1])):
                counted = next(iter(found.values()))["counted"]["refused"]
                cells = [f"{case['load']:g}", METRICS[metric], f"{target / 1000:g}", f"{100 * counted:.1f}"]
                for pair in pairs:
                    other = found.get(pair)
                    cells += (
                        ["–", "–"] if other is None else [_range(other["fewer"]), _signed_range(other["tokens_more"])]
                    )
                rows.append(cells)
        lines += [*tables.table(head, rows), ""]
    return "\n".join(lines)


def envelopes(result: Result) -> str:
    """The limits per key."""
    pair = PAIRS[-1]
    rows = [
        [
            case["trace"],
            f"{case['keys']}",
            f"{case['load']:g}",
            f"{METRICS[one['metric']]} {one['target_ms'] / 1000:g}",
            f"{100 * one['counted']['refused']:.1f}",
            f"{100 * one['weighed']['refused']:.1f}",
            _range(one["fewer"]),
            _signed_range(one["tokens_more"]),
        ]
        for case in _cases(result)
        for one in _of(case, pair)
        if one["target_ms"] == OBJECTIVE_MS or one["metric"] == "latency"
    ]
    head = ["trace", "keys", "load", "p99 within s", "refused %, by requests/min", "by tokens/min", "fewer %",
            "tokens served %"]  # fmt: skip
    return "\n".join(tables.table(head, rows)) + "\n"


def sizes(result: Result) -> str:
    """Who is refused, at the objective."""
    edges = ["0", *map(str, SIZE_BOUNDS)]
    names = [f"{low}–{int(high) - 1}" for low, high in pairwise(edges)] + [f"{edges[-1]}–"]
    rows = []
    for case in _cases(result):
        if case["load"] != VARIANT_LOAD:
            continue
        offered = next(iter(case["policies"].values()))[0]["offered_by_size"]
        parts = (f"{100 * number / sum(offered):.0f}" for number in offered)
        rows.append([f"{case['trace']}, of all requests", *parts, "100", "", "", ""])
        for name, place in _places(case):
            mixed = _mixed(case, name, place)
            shares = (f"{100 * refused / number:.0f}" for refused, number in zip(mixed.by_size, offered, strict=True))
            rows.append([
                f"refused by {TITLES[name]}",
                *shares,
                f"{100 * place['refused']:.0f}",
                f"{100 * place['tokens_refused']:.0f}",
                f"{mixed.good_tokens_per_s:,.0f}",
                f"{mixed.setting:,.3g}" if mixed.setting < 1 else f"{mixed.setting:,.0f}",
            ])  # fmt: skip
    head = ["%", *(f"{name} tokens" for name in names), "all", "of the tokens", "good tokens/s", "setting"]
    return "\n".join(tables.table(head, rows)) + "\n"


class _Mix(NamedTuple):
    """The figures of a place on a frontier."""

    by_size: list[float]  # refused
    good_tokens_per_s: float
    setting: float


def _mixed(case: Mapping[str, Any], name: str, place: Mapping[str, Any]) -> _Mix:
    points = {one["setting"]: one for one in case["policies"][name]}
    low, high = points[place["low"]], points[place["high"]]
    part: float = place["part"]

    def between(one: float, other: float) -> float:
        return one + part * (other - one)

    return _Mix(
        [between(*pair) for pair in zip(low["refused_by_size"], high["refused_by_size"], strict=True)],
        between(low["good_tokens_per_s"], high["good_tokens_per_s"]),
        between(place["low"], place["high"]),
    )


def _places(case: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where each policy stands at the objective for the first token; each once."""
    seen = set()
    for one in case["comparisons"]:
        if one["metric"] != "ttft" or one["target_ms"] != OBJECTIVE_MS:
            continue
        for name, place in ((one["by_count"], one["counted"]), (one["by_tokens"], one["weighed"])):
            if name not in seen:
                seen.add(name)
                yield name, place


def best(result: Result) -> str:
    """The setting of each policy that makes most tokens of good answers."""
    names = [name for name in TITLES if any(name in case["policies"] for case in _cases(result))]
    rows = []
    for case in _cases(result):
        cells = [case["trace"], f"{case['load']:g}"]
        for name in names:
            most = max(case["policies"][name], key=lambda one: one["good_tokens_per_s"])
            cells.append(f"{most['good_tokens_per_s']:,.0f} ({100 * most['refused']:.0f})")
        rows.append(cells)
    return "\n".join(tables.table(["trace", "load", *(TITLES[name] for name in names)], rows)) + "\n"


def variants(result: Result) -> str:
    """The first pair under other conditions, at one load."""
    rows = []
    for variant, title in {"": "as above", **VARIANTS}.items():
        for case in _cases(result, variant):
            if case["load"] != VARIANT_LOAD:
                continue
            for one in _of(case, PAIRS[0]):
                if one["metric"] == "ttft" and one["target_ms"] == OBJECTIVE_MS:
                    shares = [f"{100 * one[side]['refused']:.1f}" for side in ("counted", "weighed")]
                    rows.append(
                        [title, case["trace"], *shares, _range(one["fewer"]), _signed_range(one["tokens_more"])]
                    )
    head = ["", "trace", "by requests: refused %", "by tokens", "fewer %", "tokens served %"]
    return "\n".join(tables.table(head, rows)) + "\n"


SECTIONS: Final[dict[str, Callable[[Result], str]]] = {
    "summary": summary,
    "sizes": sizes,
    "best": best,
    "envelopes": envelopes,
    "variants": variants,
    "detail": detail,
}
