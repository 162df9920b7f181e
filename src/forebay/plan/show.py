"""A plan as tables for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forebay.plan.result import CandidateResult, Check, Figures, Fleet, Plan
from forebay.report.table import milliseconds

WIDE = 130
"""Columns of a terminal that hold all of the tables."""

NARROW = frozenset({"GPU", "engine", "$/GPU h", "engines", "$/month", "$/M tok", "$/M out"})


def usd(amount: float) -> str:
    """`$2,826` or `$3.87`."""
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:,.2f}"


def share(value: float) -> str:
    """A percentage with as many digits as decide: `99.4 %`, `0.31 %`."""
    return f"{100 * value:.1f} %" if value >= 0.02 else f"{100 * value:.2f} %"


def counted(fleet: Fleet) -> str:
    """`3 x a100-80g`, or `2 x 4 x h100-80g` for engines that span GPUs."""
    spanning = f"{fleet.gpus_per_engine} x " if fleet.gpus_per_engine > 1 else ""
    return f"{fleet.engines} x {spanning}{fleet.gpu}"


def print_plan(console: Console, plan: Plan) -> None:
    """The answer first, then what it was compared with, then what was assumed."""
    for line in headline(plan):
        console.print(escape(line), highlight=False)
    console.print()
    console.print(candidate_table(plan, console.width))
    for one in plan.candidates:
        if one.why and console.width < WIDE:
            console.print(f"{one.profile}: {escape(one.why)}", highlight=False)
    if plan.comparisons:
        console.print()
        console.print(mode_table(plan, console.width))
    if plan.verdict is not None:
        console.print(escape(plan.verdict.text), highlight=False, width=min(console.width, 110))
    if plan.sensitivity:
        console.print()
        console.print(sensitivity_table(plan))
    console.print()
    for line in plan.assumptions:
        console.print(f"· {escape(line)}", style="dim", highlight=False, width=min(console.width, 110))
    console.print(
        f"· {plan.simulations} simulations, {plan.simulations_reused} of them finished by an earlier run.",
        style="dim",
        highlight=False,
    )


def headline(plan: Plan) -> list[str]:
    """The answer in a few plain lines."""
    answer, cost, traffic = plan.answer, plan.answer.cost, plan.traffic
    window = answer.window
    served = f"{counted(answer)} serves {plan.model} ({plan.dtype}) under {traffic.name}"
    kept = f"{share(window.attainment)} in time, {share(window.shed)} refused{_tails(window)}"
    per_token = f"{usd(cost.per_million_tokens)} per million tokens in and out"
    per_output = f"{usd(cost.per_million_output_tokens)} per million output tokens"
    rates = f"{traffic.requests_per_s:.2f}/s ({traffic.window_requests_per_s:.2f}/s in the window)"
    sizes = f"{traffic.prompt_tokens_mean:.0f} prompt and {traffic.output_tokens_mean:.0f} output tokens on average"
    lines = [
        f"{served} for {usd(cost.per_month)} a month.",
        f"Objective: {plan.objective}. In the window: {kept}.",
        f"Run it as {answer.setup}. {per_token}, {per_output}.",
        f"Traffic: {traffic.requests:,} requests in {traffic.duration_s / 3600:.2f} h, {rates}, {sizes}.",
        f"Prices as of {plan.prices_as_of} ({plan.prices_from}); {plan.hours_per_month:g} hours a month.",
    ]
    if plan.check is not None:
        lines.insert(2, _checked(plan.check))
    return lines


def _checked(check: Check) -> str:
    figures = check.figures
    more = f", after {check.added} engines more" if check.added else ""
    kept = "keeps it" if figures.meets else "MISSES it"
    shares = f"{share(figures.attainment)} in time, {share(figures.shed)} refused"
    return f"Checked on {check.what}{more}: {kept}, {shares}."


def _tails(figures: Figures) -> str:
    tails = {"ttft": figures.ttft_p99, "tpot": figures.tpot_p99, "latency": figures.latency_p99}
    shown = [f"{name} p99 {milliseconds(value)}" for name, value in tails.items() if value is not None]
    return f", {', '.join(shown)}" if shown else ""


def candidate_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the candidates."""
    head = [
        "GPU",
        "engine",
        "$/GPU h",
        "at least",
        "engines",
        "$/month",
        "$/M tok",
        "$/M out",
        "in time",
        "refused",
        "",
    ]
    return head, [_candidate_row(one) for one in plan.candidates]


def _candidate_row(one: CandidateResult) -> list[str]:
    price = one.price
    spread = (
        f"({price.low:.2f}-{price.high:.2f})" if price.quotes > 1 else ("(one quote)" if price.quotes else "(given)")
    )
    kind = "/".join(one.profile.split("/")[3:])
    row = [one.gpu, kind, f"{price.usd_per_hour:.2f} {spread}", str(one.bound_engines or "–")]
    if one.fleet is None:
        return [*row, "–", "–", "–", "–", "–", "–", one.why]
    fleet, cost = one.fleet, one.fleet.cost
    return [
        *row,
        f"{fleet.engines}{'' if one.monotone else ' ~'}",
        usd(cost.per_month),
        usd(cost.per_million_tokens),
        usd(cost.per_million_output_tokens),
        share(fleet.window.attainment),
        share(fleet.window.shed),
        str(fleet.setup),
    ]


def mode_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the three modes."""
    head = ["mode", "cheapest fleet", "$/month", "in time", "refused", "same GPUs carry", ""]
    rows = []
    for one in plan.comparisons:
        carries = "–" if one.sustains is None else f"{one.sustains:.2f} x"
        if one.fleet is None:
            rows.append([one.mode, "none", "–", "–", "–", carries, ""])
            continue
        window = one.fleet.window
        cells = [
            one.mode,
            counted(one.fleet),
            usd(one.fleet.cost.per_month),
            share(window.attainment),
            share(window.shed),
        ]
        rows.append([*cells, carries, str(one.fleet.setup)])
    return head, rows


def sensitivity_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Header and rows of more and less traffic."""
    head = ["traffic", "in time", "refused", "", "it would take", "$/month", "$/M tok"]
    rows = []
    for one in plan.sensitivity:
        kept = "keeps it" if one.unchanged.meets else "misses it"
        row = [f"{100 * (one.factor - 1):+.0f} %", share(one.unchanged.attainment), share(one.unchanged.shed), kept]
        if one.fleet is None:
            rows.append([*row, "none", "–", "–"])
            continue
        cost = one.fleet.cost
        rows.append([*row, counted(one.fleet), usd(cost.per_month), usd(cost.per_million_tokens)])
    return head, rows


def candidate_table(plan: Plan, width: int) -> Table:
    """Every candidate with its least fleet in hybrid mode."""
    head, rows = candidate_rows(plan)
    if width < WIDE:
        # All of them keep the objective: how exactly is what a narrow terminal goes without.
        rows = [[cell for name, cell in zip(head, row, strict=True) if name in NARROW] for row in rows]
        head = [name for name in head if name in NARROW]
    return _table("Candidates (hybrid mode)", head, rows)


def mode_table(plan: Plan, width: int) -> Table:
    """What each mode costs at the same objective."""
    head, rows = mode_rows(plan)
    if width < WIDE:
        head, rows = head[:-1], [row[:-1] for row in rows]
    return _table("The three modes at this objective", head, rows)


def sensitivity_table(plan: Plan) -> Table:
    """More and less traffic."""
    return _table("This fleet under more and less traffic", *sensitivity_rows(plan))


def _table(title: str, head: list[str], rows: list[list[str]]) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1)
    )
    for index, name in enumerate(head):
        text = index == 0 or name == ""
        table.add_column(name, justify="left" if text else "right", no_wrap=name != "" or index < len(head) - 1)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
