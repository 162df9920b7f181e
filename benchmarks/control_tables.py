"""The tables of the control benchmark, as Markdown: means over the seeds with their bounds at 95 %."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.control_cases import A100, H100, PHASES
from benchmarks.control_policies import FOREBAY
from benchmarks.control_rows import Row, rows, select, shown
from benchmarks.control_statistics import paired
from benchmarks.control_targets import targets
from benchmarks.tables import table

SHORT = {A100: "A100", H100: "H100"}


def _goodput(result: Mapping[str, Any]) -> list[str]:
    found = rows(result, "goodput")
    chat = select(found, profile=A100, mix="chat")
    loads = (1.2, 2.0, 5.0, 10.0)
    lines: list[str] = []
    for figure, title in (
        ("requests", "good requests"),
        ("weighted", "their tokens (a prompt token for a quarter)"),
        ("tokens", "their output tokens"),
    ):
        body = []
        for policy in dict.fromkeys(row.policy for row in chat):
            by_load = {row.load: row for row in select(chat, policy=policy)}
            if any(load in by_load for load in loads):
                body.append([policy, *(by_load[load].cell(figure) if load in by_load else "–" for load in loads)])
        lines += [f"Chat on 4 A100, {title}, % of the fluid bound of the same requests, at so many times the load:", ""]
        lines += [*table(["policy", *(f"{load:g}x" for load in loads)], body), ""]
    lines += _elsewhere(found)
    lines += _against_static(chat)
    return lines + _sizes(chat)


def _elsewhere(found: list[Row]) -> list[str]:
    body = [
        [f"{SHORT[row.profile]}, {row.mix}, {row.load:g}x: {row.policy}"]
        + [row.cell(figure) for figure in ("requests", "tokens", "weighted", "kept")]
        for row in found
        if (row.profile, row.mix) != (A100, "chat")
        and row.load in {2.0, 10.0}
        and row.values.get("bound_requests_per_s")
    ]
    head = ["engines, mix, load: policy", "good requests", "output tokens", "weighted tokens", "of served, within SLO"]
    return ["Other mixes, and other engines, % of the fluid bound:", "", *table(head, body), ""] if body else []


def _against_static(chat: list[Row]) -> list[str]:
    body = []
    for ours in select(chat, policy=FOREBAY):
        for static in chat:
            if static.load == ours.load and static.policy.startswith("fixed"):
                ratio = paired(
                    [value or 0.0 for value in ours.values["weighted"]],
                    [value or 0.0 for value in static.values["weighted"]],
                    lambda one, other: one - other,
                )
                body.append([f"{ours.load:g}x, less {static.policy}", shown(ratio)])
    head = ["Forebay at", "points of weighted tokens, paired by seed"]
    return [*table(head, body), ""] if body else []


def _sizes(chat: list[Row]) -> list[str]:
    classes = ("shed_from_0", "shed_from_256", "shed_from_1024", "shed_from_4096")
    body = [
        [f"{row.policy} at {row.load:g}x", *(row.cell(name) for name in classes)]
        for row in chat
        if row.load in {2.0, 10.0} and (row.policy == FOREBAY or row.policy.startswith(("fixed", "llm-d", "vllm")))
    ]
    head = ["refused, % by prompt and output tokens", "under 256", "256 to 1,023", "1,024 to 4,095", "4,096 and more"]
    return table(head, body)


def _waits(result: Mapping[str, Any]) -> list[str]:
    body = []
    for row in sorted(rows(result, "goodput"), key=lambda row: row.load):
        if row.policy == FOREBAY and (row.profile, row.mix) == (A100, "chat"):
            waits = [row.cell(name, percent=False) for name in ("wait_p50_ms", "wait_p99_ms")]
            shares = [row.cell("wait_p99_of_budget", 0), row.cell("late", 2), row.cell("displaced", 2)]
            body.append([f"{row.load:g}x", *waits, *shares])
    head = ["load", "p50 wait ms", "p99 wait ms", "p99, % of its own budget", "late evicted %", "displaced %"]
    return table(head, body) if body else []


def _plain(
    case: str, named: str, columns: Sequence[tuple[str, str, int, bool]]
) -> Callable[[Mapping[str, Any]], list[str]]:
    def lines(result: Mapping[str, Any]) -> list[str]:
        body = [
            [f"{row.policy}, {row.load:g}"]
            + [row.cell(figure, digits, percent=percent) for figure, _, digits, percent in columns]
            for row in rows(result, case)
        ]
        return table([named, *(title for _, title, _, _ in columns)], body) if body else []

    return lines


_spike = _plain(
    "spike",
    "policy, base load",
    (
        ("recovery_s", "recovery s", 1, False),
        ("recovered", "recovered, % of seeds", 0, True),
        ("before", "first attempts good before, %", 1, True),
        ("after", "in the 120 s after, %", 1, True),
        ("worst_later", "worst 3 s after recovery, %", 1, True),
        ("at_the_end", "in the last 30 s, %", 1, True),
        ("spike_served", "spike served in 120 s, %", 1, True),
        ("spike_bound", "most that can be, %", 1, True),
        ("attempts", "attempts per request", 2, False),
    ),
)
_flood = _plain(
    "flood",
    "policy, load of each other key",
    (
        ("jain", "Jain", 4, False),
        ("flood_share", "flood's share of the work, %", 1, True),
        ("others_served", "others served, %", 1, True),
        ("others_good", "within the objective, %", 1, True),
        ("worst_served", "the worst of them, %", 1, True),
        ("requests", "goodput, requests %", 1, True),
        ("weighted", "goodput, weighted %", 1, True),
    ),
)
_critical = _plain(
    "critical",
    "policy, load of the rest",
    (
        ("critical_served", "critical served, %", 2, True),
        ("critical_good", "within the objective, %", 2, True),
        ("requests", "goodput, requests %", 1, True),
        ("weighted", "goodput, weighted %", 1, True),
        ("late", "late evicted %", 2, True),
    ),
)
_hang_ups = _plain(
    "hang-ups",
    "policy, load",
    (
        ("hung_up", "callers left in mid-answer", 0, False),
        ("abort_ms", "ms until the engine was told", 3, False),
        ("made_for_the_gone", "tokens made for them until then, %", 2, True),
        ("made_late", "tokens of answers out of time, %", 2, True),
        ("weighted", "goodput, weighted %", 1, True),
    ),
)


def _shift(result: Mapping[str, Any]) -> list[str]:
    found = sorted(rows(result, "shift"), key=lambda row: -(row.mean("mean") or 0.0))
    names = [f"{number + 1} {mix}" for number, mix in enumerate(PHASES)]
    if not found:
        return []
    body = [[row.policy, *(row.cell(f"{name}: whole") for name in names), row.cell("mean"), row.cell("worst")]
            for row in found]  # fmt: skip
    lines = ["Good work, % of each phase's own bound, whole phases with their beginnings:", ""]
    lines += [*table(["policy", *names, "mean", "worst phase"], body), ""]
    ours = select(found, policy=FOREBAY)
    body = [
        [f"{row.policy}, {name}", row.cell(f"{name}: first 5 s"), row.cell(f"{name}: from 5 s on"),
         row.cell(f"{name}: settled after s", percent=False)]
        for row in ours for name in names
    ]  # fmt: skip
    lines += table(["policy, phase", "first 5 s, %", "from 5 s on, %", "first 5 s window at 95 %, after s"], body)
    static = next((row for row in found if row.policy.startswith("fixed")), None)
    if static is not None and ours:
        ratio = paired(
            [value or 0.0 for value in ours[0].values["mean"]],
            [value or 0.0 for value in static.values["mean"]],
            lambda one, other: one / other - 1.0,
        )
        lines += [
            "",
            f"Against the best single window ({static.policy}): {shown(ratio)} % more good work, paired by seed.",
        ]
    return lines


def _chosen(result: Mapping[str, Any]) -> list[str]:
    body = []
    for profile, mixes in result["bounds"].items():
        for mix, one in mixes.items():
            best = result["chosen"]["windows"].get(profile, {}).get(mix)
            body.append(
                [
                    f"{SHORT[profile]}, {mix}",
                    f"{one['fluid_per_s']:.1f}",
                    f"{one['fluid_batch']:.0f}, {one['limited_by']}",
                    f"{one['saturation_per_s']:.1f}",
                    f"{one['closed_loop_per_s']:.1f} at {one['closed_loop_in_flight']:.0f}",
                    f"{100 * float(one['closed_loop_per_s']) / float(one['fluid_per_s']):.1f}",
                    "–" if best is None else f"{best}",
                ]
            )
    head = ["engines, mix", "fluid bound /s", "its batch, limited by", "endless backlog, no objective /s",
            "most within the objective, constant in flight /s", "% of fluid", "best window of the sweep"]  # fmt: skip
    lines = [*table(head, body), "", f"Best single window over the three mixes: {result['chosen']['single']}."]
    signals = ", ".join(f"{kind}: {signal}" for kind, signal in result["chosen"]["signals"].items())
    return [*lines, f"Most favourable signals: {signals}."]


BRIEF = (
    (FOREBAY, "Forebay"), ("fixed", "best fixed window"), ("gradient2", "Gradient2"), ("aimd", "AIMD"),
    ("vegas", "Vegas"), ("envoy", "Envoy's gradient"), ("llm-d gate", "llm-d's gate"), ("vllm caps", "vLLM's caps"),
    ("none", "no gateway"),
)  # fmt: skip


def brief(result: Mapping[str, Any]) -> str:
    """The few figures of the README: good work, tokens weighted, at two loads; empty when the results lack them."""
    chat = select(rows(result, "goodput"), profile=A100, mix="chat")
    body = []
    for load in (2.0, 10.0):
        means = [
            row.mean("weighted")
            for name, _ in BRIEF
            for row in select(chat, load=load)
            if row.policy == name or row.policy.startswith(f"{name} ")
        ]
        body.append([f"{load:g}x", *(f"{100.0 * mean:.1f}" for mean in means if mean is not None)])
    if any(len(line) != 1 + len(BRIEF) for line in body):
        return ""
    return "\n".join(table(["offered load", *(title for _, title in BRIEF)], body)) + "\n"


SECTIONS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "targets": targets,
    "bounds": _chosen,
    "goodput": _goodput,
    "waits": _waits,
    "spike": _spike,
    "flood": _flood,
    "shift": _shift,
    "critical": _critical,
    "hang-ups": _hang_ups,
}


def section(name: str, result: Mapping[str, Any]) -> str:
    """A generated section of the page; empty when the results hold nothing for it."""
    lines = SECTIONS[name](result)
    if not lines:
        return ""
    env = result["environment"]
    dirty = " with changes not yet committed" if env["dirty"] else ""
    how = f"{result['rounds_run']} seeds; mean (bounds at 95 %, bootstrap over the seeds)."
    origin = (
        f"Simulated {env['at']} at commit `{env['commit']}`{dirty} on {env['machine']}, {env['cpus']} cores, by "
        f"`{result['command']}` in {result['wall_s']:.0f} s, {how}"
    )
    return "\n".join([origin, "", *lines]) + "\n"
