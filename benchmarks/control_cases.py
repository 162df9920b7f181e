"""The scenarios of the control benchmark: what arrives, and what is read from a run. Each gives plain figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from benchmarks.control_policies import KeyClass, policy
from benchmarks.control_statistics import Rates, Served, first_window, rates, share_good, worst_window
from benchmarks.control_world import MIXES, Run, Stream, drawn, fluid, simulate
from forebay.core.instant import SECOND
from forebay.report.records import NEVER
from forebay.report.statistics import jain_index, percentile
from forebay.sim.figures import Judge, size_classes
from forebay.sim.records import CANCELLED, COMPLETED
from forebay.workload.arrival import Arrival

Figures = dict[str, float | None]

A100 = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"
H100 = "h100-80g/llama-3.1-8b/bf16/tp1/trtllm"


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulation to be done. `load` is a multiple of the mix's fluid rate, or whatever the case makes of it."""

    case: str
    policy: str
    seed: int
    load: float
    profile: str = A100
    mix: str = "chat"
    scale: float = 1.0
    """Of all durations."""


def measure(trial: Trial) -> Figures:
    """Simulate, and read the figures."""
    return CASES[trial.case](trial)


def capacity(profile: str, mix: str) -> float:
    """Requests per second: the nominal fluid rate that loads are multiples of."""
    return fluid(profile, drawn([Stream(mix, 100.0, 0.0, 200.0)], 0)).requests_per_s


def served(run: Run) -> list[Served]:
    """The good ones."""
    columns = run.callers.records
    judge = Judge(run.scenario, columns)
    found = []
    for row in range(len(columns)):
        if judge.good(row):
            done, first = columns.done_ns[row], columns.first_token_ns[row]
            first = columns.intended_ns[row] if first == NEVER else first
            found.append(Served(first, done, columns.prompt_tokens[row], columns.asked_tokens[row]))
    return found


def _against(found: Rates, run: Run, arrivals: list[Arrival], profile: str) -> Figures:
    bound = fluid(profile, arrivals)
    count = len(arrivals)
    weighted = sum(0.25 * (one.prompt_tokens or 0) + (one.output_tokens or 0) for one in arrivals) / count
    tokens = sum(one.output_tokens or 0 for one in arrivals) / count
    return {
        "requests": found.requests / bound.requests_per_s,
        "tokens": found.tokens / (bound.requests_per_s * tokens),
        "weighted": found.weighted / (bound.requests_per_s * weighted),
        "requests_per_s": found.requests,
        "tokens_per_s": found.tokens,
        "bound_requests_per_s": bound.requests_per_s,
        **_waits(run),
        "wasted": _wasted(run),
    }


def _waits(run: Run) -> Figures:
    callers = run.callers
    waits = sorted(wait for wait, _ in callers.waits)
    shares = sorted(share for _, share in callers.waits)
    admitted = len(waits) + callers.late + callers.displaced
    return {
        "wait_p50_ms": percentile(waits, 0.5),
        "wait_p99_ms": percentile(waits, 0.99),
        "wait_p99_of_budget": percentile(shares, 0.99),
        "late": callers.late / admitted if admitted else None,
        "displaced": callers.displaced / admitted if admitted else None,
    }


def _wasted(run: Run) -> float | None:
    """Output tokens of requests that were not good, of all that the engines made."""
    made = run.made_tokens
    good = sum(one.output for one in served(run))
    return 1.0 - good / made if made else None


# ---- goodput -------------------------------------------------------------------------------------------------------


SPANS_S = {(A100, "long"): (120.0, 220.0), (H100, "chat"): (80.0, 140.0)}
"""Not counted, and the end. Until the longest answers of an even flow run beside the short ones, an engine computes
fewer prompts than it will, and does more than its bound."""


def goodput(trial: Trial) -> Figures:
    """A steady load; the first part is not counted."""
    warm_s, seconds = (trial.scale * at for at in SPANS_S.get((trial.profile, trial.mix), (40.0, 100.0)))
    stream = Stream(trial.mix, trial.load * capacity(trial.profile, trial.mix), 0.0, seconds)
    arrivals = drawn([stream], trial.seed)
    run = simulate(
        policy(trial.policy), trial.profile, arrivals, seconds=seconds, counted_from_s=warm_s, seed=trial.seed
    )
    good, columns = served(run), run.callers.records
    figures = _against(rates(good, int(warm_s * SECOND), int(seconds * SECOND)), run, arrivals, trial.profile)
    judge = Judge(run.scenario, columns)
    completed = [row for row in range(len(columns)) if columns.outcome[row] == COMPLETED]
    figures["kept"] = fmean(judge.good(row) for row in completed) if completed else None
    for one in size_classes(columns, int(warm_s * SECOND)):
        figures[f"shed_from_{one.from_tokens}"] = one.shed_share
    return figures


# ---- a spike -------------------------------------------------------------------------------------------------------

SPIKE_AT_S, SPIKE_S, AFTER_S, FACTOR = 40.0, 10.0, 120.0, 10.0


def spike(trial: Trial) -> Figures:
    """A base load, ten times as much for ten seconds, callers with an SDK's retries."""
    base = trial.load * capacity(trial.profile, trial.mix)
    from_s = SPIKE_AT_S * max(trial.scale, 0.5)
    to_s, seconds = from_s + SPIKE_S, from_s + SPIKE_S + AFTER_S
    streams = [
        Stream(trial.mix, base, 0.0, seconds),
        Stream(trial.mix, base * (FACTOR - 1.0), from_s, to_s, phase="spike"),
    ]
    arrivals = drawn(streams, trial.seed)
    run = simulate(policy(trial.policy), trial.profile, arrivals, seconds=seconds, seed=trial.seed, retry="sdk")
    columns = run.callers.records
    judge = Judge(run.scenario, columns)
    moments = list(columns.intended_ns)
    at_once = [columns.attempts[row] == 1 and judge.good(row) for row in range(len(columns))]
    from_ns, to_ns, end_ns = (int(at * SECOND) for at in (from_s, to_s, seconds))
    recovered = first_window(moments, at_once, to_ns, window_ns=3 * SECOND, share=0.97, until_ns=end_ns)
    in_spike = [row for row in range(len(columns)) if from_ns <= moments[row] < to_ns]
    worst = worst_window(moments, at_once, to_ns + (recovered or 0), window_ns=3 * SECOND, until_ns=end_ns)
    within = [
        columns.outcome[row] == COMPLETED and columns.done_ns[row] - moments[row] <= 120 * SECOND for row in in_spike
    ]
    return {
        "recovery_s": None if recovered is None else recovered / SECOND,
        "recovered": float(recovered is not None),
        "before": share_good(moments, at_once, from_ns - 10 * SECOND, from_ns),
        "at_the_end": share_good(moments, at_once, end_ns - 30 * SECOND, end_ns),
        "after": share_good(moments, at_once, to_ns, end_ns),
        "spike_served": fmean(within),
        "spike_bound": min(1.0, (SPIKE_S + (1.0 - trial.load) * (120.0 - SPIKE_S)) / (FACTOR * trial.load * SPIKE_S)),
        "attempts": fmean(columns.attempts),
        "attempts_in_spike": fmean(columns.attempts[row] for row in in_spike),
        "worst_later": worst,
    }


# ---- fairness ------------------------------------------------------------------------------------------------------

KEYS = 8


def flood(trial: Trial) -> Figures:
    """Eight keys. One asks for forty times its share, the others for `load` times theirs."""
    warm_s, seconds = 40.0 * trial.scale, 100.0 * trial.scale
    share = capacity(trial.profile, trial.mix) / KEYS
    others = tuple(f"k{number}" for number in range(1, KEYS))
    streams = [
        Stream(trial.mix, 40.0 * share, 0.0, seconds, ("flood",)),
        Stream(trial.mix, trial.load * share * len(others), 0.0, seconds, others),
    ]
    arrivals = drawn(streams, trial.seed)
    classes = (KeyClass("all", ("flood", *others)),)
    run = simulate(policy(trial.policy, classes=classes), trial.profile, arrivals, seconds=seconds, seed=trial.seed)
    figures = _against(rates(served(run), int(warm_s * SECOND), int(seconds * SECOND)), run, arrivals, trial.profile)
    columns = run.callers.records
    judge = Judge(run.scenario, columns)
    work, asked, kept, good = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for row in range(len(columns)):
        if columns.intended_ns[row] < warm_s * SECOND:
            continue
        key = columns.keys[columns.key[row]]
        asked[key] += 1
        if columns.outcome[row] == COMPLETED:
            kept[key] += 1
            good[key] += judge.good(row)
            work[key] += columns.prompt_tokens[row] + 2 * columns.asked_tokens[row]
    total = sum(work.values())
    figures |= {
        "jain": jain_index([work[key] for key in ("flood", *others)]),
        "flood_share": work["flood"] / total if total else None,
        "others_served": sum(kept[key] for key in others) / sum(asked[key] for key in others),
        "others_good": sum(good[key] for key in others) / sum(asked[key] for key in others),
        "worst_served": min(kept[key] / asked[key] for key in others),
    }
    return figures


# ---- changes of mix ------------------------------------------------------------------------------------------------

PHASES = ("chat", "rag", "long", "chat")
PHASE_S = 120.0


def shift(trial: Trial) -> Figures:
    """Chat, long prompts, long answers, chat: each at `load` times its own fluid rate.

    Every good request is worth the engine time that its weighted tokens take at the bound of its own mix, spread from
    its first token to its last; so what is left of the mix before counts for what it is.
    """
    phase_s = PHASE_S * trial.scale
    bounds = {mix: capacity(trial.profile, mix) for mix in MIXES}
    streams = [
        Stream(mix, trial.load * bounds[mix], number * phase_s, (number + 1) * phase_s, phase=f"{number + 1} {mix}")
        for number, mix in enumerate(PHASES)
    ]
    by_phase = [list(stream.arrivals(trial.seed, number)) for number, stream in enumerate(streams)]
    arrivals = [arrival for phase in by_phase for arrival in phase]
    seconds = phase_s * len(PHASES)
    run = simulate(policy(trial.policy), trial.profile, arrivals, seconds=seconds, seed=trial.seed)
    columns = run.callers.records
    judge = Judge(run.scenario, columns)
    worth = []
    for phase in by_phase:
        weighted = sum(0.25 * (one.prompt_tokens or 0) + (one.output_tokens or 0) for one in phase) / len(phase)
        worth.append(fluid(trial.profile, phase).requests_per_s * weighted)
    pieces: list[tuple[Served, float]] = []
    for row in range(len(columns)):
        if judge.good(row):
            number = min(len(PHASES) - 1, int(columns.intended_ns[row] / SECOND / phase_s))
            one = Served(
                columns.first_token_ns[row], columns.done_ns[row], columns.prompt_tokens[row], columns.asked_tokens[row]
            )
            pieces.append((one, one.weighted / worth[number]))
    return _phases(pieces, phase_s, run)


def _phases(pieces: list[tuple[Served, float]], phase_s: float, run: Run) -> Figures:
    """Engine seconds of good work per second: of each whole phase, of its first 5 s, after 20 s; and the time until a
    window of 5 s holds 95 % of the bound."""
    second_of = [0.0] * (int(phase_s * len(PHASES)) + 1)
    for one, worth in pieces:
        first, last = one.from_ns // SECOND, min(one.to_ns // SECOND, len(second_of) - 1)
        for second in range(first, last + 1):
            second_of[second] += worth * one.share_within(second * SECOND, (second + 1) * SECOND)
    figures: Figures = {}
    for number, mix in enumerate(PHASES):
        start, end = int(number * phase_s), int((number + 1) * phase_s)
        name = f"{number + 1} {mix}"
        figures[f"{name}: whole"] = fmean(second_of[start:end])
        figures[f"{name}: first 5 s"] = fmean(second_of[start : start + 5])
        figures[f"{name}: from 5 s on"] = fmean(second_of[start + 5 : end])
        settled = [at for at in range(start, end - 5) if fmean(second_of[at : at + 5]) >= 0.95]
        figures[f"{name}: settled after s"] = settled[0] - start if settled else None
    figures["mean"] = fmean(second_of[: int(phase_s * len(PHASES))])
    figures["worst"] = min(figures[f"{number + 1} {mix}: whole"] or 0.0 for number, mix in enumerate(PHASES))
    figures |= _waits(run)
    return figures


# ---- a critical class ----------------------------------------------------------------------------------------------

CRITICAL_LOAD = 0.3


def critical(trial: Trial) -> Figures:
    """A critical key at 0.3 of what the engines can do, eight others together at `load` times that.

    Policies named `…, classes` are told: priority and weight for the critical class, hold-back for the other.
    """
    warm_s, seconds = 40.0 * trial.scale, 100.0 * trial.scale
    rate = capacity(trial.profile, trial.mix)
    others = tuple(f"k{number}" for number in range(KEYS))
    streams = [
        Stream(trial.mix, CRITICAL_LOAD * rate, 0.0, seconds, ("critical",)),
        Stream(trial.mix, trial.load * rate, 0.0, seconds, others),
    ]
    arrivals = drawn(streams, trial.seed)
    name, _, told = trial.policy.partition(" + ")
    classes = (
        (KeyClass("critical", ("critical",), 10, weight=8.0), KeyClass("rest", others, hold_back=float(told or 0)))
        if told
        else (KeyClass("all", ("critical", *others)),)
    )
    run = simulate(
        policy(name, classes=classes), trial.profile, arrivals, seconds=seconds, counted_from_s=warm_s, seed=trial.seed
    )
    figures = _against(rates(served(run), int(warm_s * SECOND), int(seconds * SECOND)), run, arrivals, trial.profile)
    columns = run.callers.records
    judge = Judge(run.scenario, columns)
    rows = [
        row
        for row in range(len(columns))
        if columns.keys[columns.key[row]] == "critical" and columns.intended_ns[row] >= warm_s * SECOND
    ]
    figures |= {
        "critical_served": fmean(columns.outcome[row] == COMPLETED for row in rows),
        "critical_good": fmean(judge.good(row) for row in rows),
        "critical_requests": float(len(rows)),
    }
    return figures


# ---- wasted work ---------------------------------------------------------------------------------------------------


def hang_ups(trial: Trial) -> Figures:
    """A tenth of the callers leave in mid-answer. Their own tokens, up to then, are counted apart."""
    warm_s, seconds = 40.0 * trial.scale, 100.0 * trial.scale
    stream = Stream(trial.mix, trial.load * capacity(trial.profile, trial.mix), 0.0, seconds)
    arrivals = drawn([stream], trial.seed)
    run = simulate(
        policy(trial.policy),
        trial.profile,
        arrivals,
        seconds=seconds,
        counted_from_s=warm_s,
        seed=trial.seed,
        hang_up_share=0.1,
    )
    columns, made = run.callers.records, run.made_tokens
    left = [row for row in range(len(columns)) if columns.outcome[row] == CANCELLED]
    given_up = sum(columns.output_tokens[row] for row in left)
    found = sum(one.output for one in served(run))
    figures = _against(rates(served(run), int(warm_s * SECOND), int(seconds * SECOND)), run, arrivals, trial.profile)
    figures |= {
        "hung_up": float(len(run.callers.abort_ms)),
        "abort_ms": fmean(run.callers.abort_ms) if run.callers.abort_ms else None,
        "made_for_the_gone": given_up / made if made else None,
        "made_late": (made - found - given_up) / made if made else None,
    }
    return figures


CASES: dict[str, Callable[[Trial], Figures]] = {
    "goodput": goodput,
    "spike": spike,
    "flood": flood,
    "shift": shift,
    "critical": critical,
    "hang-ups": hang_ups,
}
