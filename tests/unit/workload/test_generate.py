"""Generated arrivals have the rate, the burstiness and the shape that was asked for, and the same seed repeats them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from itertools import pairwise
from random import Random
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.workload import generate
from forebay.workload.arrival import NS_PER_S, Arrival
from forebay.workload.generate import RETRY_STORM, SHAPES, check_arrivals
from forebay.workload.pacer import Diurnal, Spike, Table
from forebay.workload.population import Quantiles, measured_rates, models, population
from forebay.workload.retry import CLIENTS, client_model
from forebay.workload.trace import shipped_folder, sizes_of


def moments(kind: str, *, rate: float, duration_s: float, cv: float = 3.0, seed: int = 0) -> list[Arrival]:
    return list(generate.moments(kind, rate=rate, duration_s=duration_s, cv=cv, seed=seed))


KINDS = [*SHAPES, "clients:model=m-small"]


def counts(arrivals: list[Arrival], bin_s: float, duration_s: float) -> list[int]:
    bins = [0] * round(duration_s / bin_s)
    for arrival in arrivals:
        bins[int(arrival.at_ns / NS_PER_S / bin_s)] += 1
    return bins


def rate_within(arrivals: list[Arrival], from_s: float, to_s: float) -> float:
    return sum(from_s <= arrival.at_ns / NS_PER_S < to_s for arrival in arrivals) / (to_s - from_s)


def dispersion(arrivals: list[Arrival], bin_s: float, duration_s: float) -> float:
    bins = counts(arrivals, bin_s, duration_s)
    return pstdev(bins) ** 2 / fmean(bins)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(rate=st.floats(0.5, 30), duration_s=st.floats(0.1, 40), seed=st.integers(0, 99))
def test_arrivals_ascend_within_the_duration_and_repeat(kind: str, rate: float, duration_s: float, seed: int) -> None:
    arrivals = moments(kind, rate=rate, duration_s=duration_s, seed=seed)
    times = [arrival.at_ns for arrival in arrivals]
    assert times == sorted(times)
    assert not times or (times[0] >= 0 and times[-1] < duration_s * NS_PER_S)
    assert arrivals == moments(kind, rate=rate, duration_s=duration_s, seed=seed)


@pytest.mark.parametrize("kind", ["poisson", "constant", "gamma", "mmpp", "clumps", "diurnal:period=100", "measured"])
def test_the_mean_rate_is_the_one_asked_for(kind: str) -> None:
    duration_s = 14 * 86_400 if kind == "measured" else 4000
    rate = 0.02 if kind == "measured" else 5.0
    found = [len(moments(kind, rate=rate, duration_s=duration_s, seed=seed)) / duration_s for seed in range(3)]
    assert fmean(found) == pytest.approx(rate, rel=0.03)


@pytest.mark.parametrize(("cv", "within"), [(0.3, 0.1), (1.0, 0.1), (3.0, 0.15)])
def test_gaps_vary_as_asked(cv: float, within: float) -> None:
    arrivals = moments("gamma", rate=10, duration_s=3000, cv=cv, seed=2)
    gaps = [(after.at_ns - before.at_ns) / NS_PER_S for before, after in pairwise(arrivals)]
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=within)
    # Over long bins the counts of a renewal process vary as the squared variation of its gaps.
    assert dispersion(arrivals, 10, 3000) == pytest.approx(cv * cv, rel=0.35)


def test_a_day_has_its_peak_and_its_trough() -> None:
    arrivals = moments("diurnal:peak=5,period=1000", rate=20, duration_s=10_000, seed=3)
    folded = [Arrival(arrival.at_ns % (1000 * NS_PER_S), "x") for arrival in arrivals]
    trough = (rate_within(folded, 0, 20) + rate_within(folded, 980, 1000)) / 20
    peak = rate_within(folded, 480, 520) / 10
    assert peak / trough == pytest.approx(5, rel=0.1)
    assert (peak + trough) / 2 == pytest.approx(20, rel=0.05)


def test_a_spike_is_where_it_was_put_and_as_high() -> None:
    arrivals = moments("spike:factor=4,at=300,for=100", rate=10, duration_s=1000, seed=4)
    assert rate_within(arrivals, 300, 400) == pytest.approx(40, rel=0.06)
    assert rate_within(arrivals, 0, 300) == pytest.approx(10, rel=0.06)
    assert rate_within(arrivals, 400, 1000) == pytest.approx(10, rel=0.06)
    silence = moments("spike:factor=0,at=300,for=100", rate=10, duration_s=1000, seed=4)
    assert rate_within(silence, 300, 400) == 0


def test_a_retry_storm_is_a_spike_sent_by_an_sdk() -> None:
    assert moments("retry-storm", rate=10, duration_s=60) == moments("spike", rate=10, duration_s=60)
    assert RETRY_STORM.retry in CLIENTS
    assert client_model(RETRY_STORM.retry, RETRY_STORM.patience_s).delay_s is not None


def test_a_measured_curve_is_followed_from_the_hour_asked_for() -> None:
    hours = 24
    rates = measured_rates("m-large")
    day = moments("measured:from_h=48", rate=2, duration_s=hours * 3600, seed=5)
    measured = rates[48 * 6 : (48 + hours) * 6]
    hourly = [fmean(measured[hour * 6 : hour * 6 + 6]) for hour in range(hours)]
    found = [count / 3600 for count in counts(day, 3600, hours * 3600)]
    scale = 2 / fmean(rates)
    for hour in range(hours):
        assert found[hour] == pytest.approx(hourly[hour] * scale, abs=5 * (hourly[hour] * scale / 3600) ** 0.5)


def test_a_bursty_process_does_not_begin_with_a_burst() -> None:
    firsts = [len(list(Table((1.0,), 60, 10.0, cv=6.0).offsets_s(Random(f"{seed}")))) for seed in range(600)]
    assert fmean(firsts) == pytest.approx(10, rel=0.3)


def test_sizes_and_keys_are_filled_in() -> None:
    arrivals = list(
        generate.stream(
            "poisson", rate=50, duration_s=60, prompt_tokens="100-200", output_tokens="7", keys=4, key_skew=1.0
        )
    )
    assert {arrival.output_tokens for arrival in arrivals} == {7}
    assert fmean(arrival.prompt_tokens or 0 for arrival in arrivals) == pytest.approx(150, rel=0.03)
    shares = [sum(arrival.key == f"k{key}" for arrival in arrivals) / len(arrivals) for key in range(4)]
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.03)
    assert {arrival.key for arrival in generate.stream(rate=9, duration_s=9)} == {""}


def test_sizes_come_in_the_pairs_of_a_trace() -> None:
    name = "lengths_arxiv_summarization"
    pairs = set(sizes_of(name))
    arrivals = list(generate.stream(rate=20, duration_s=20, sizes_from=name))
    assert {(arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals} <= pairs


# ---- callers -------------------------------------------------------------------------------------------------------


def test_callers_keep_their_shares_and_sizes() -> None:
    callers = population("deepseek-r1").scaled(30)
    assert callers.rate == pytest.approx(30)
    arrivals = list(generate.stream("clients:model=deepseek-r1", rate=30, duration_s=1500, seed=7))
    assert len(arrivals) / 1500 == pytest.approx(30, rel=0.1)
    first = max(callers.clients, key=lambda client: client.rate)
    mine = [arrival for arrival in arrivals if arrival.key == first.name]
    assert len(mine) / len(arrivals) == pytest.approx(first.rate / 30, rel=0.15)
    assert fmean(arrival.output_tokens or 0 for arrival in mine) == pytest.approx(first.output_tokens.mean, rel=0.05)
    assert fmean(arrival.prompt_tokens or 0 for arrival in mine) == pytest.approx(first.prompt_tokens.mean, rel=0.1)
    assert dispersion(mine, 10, 1500) == pytest.approx(first.cv**2, rel=0.5)


def test_leaving_one_caller_out_changes_no_other() -> None:
    callers = population("mm-image").scaled(10)
    fewer = type(callers)(callers.clients[1:])
    gone = callers.clients[0].name
    assert list(fewer.stream(100, 3)) == [arrival for arrival in list(callers.stream(100, 3)) if arrival.key != gone]


def test_pausing_callers_are_silent_for_whole_windows_and_keep_their_rate() -> None:
    callers = population("m-small").scaled(0.5)
    client = next(client for client in callers.clients if 0.2 < client.active_share < 0.8)
    alone = type(callers)((client,))
    alone = alone.scaled(0.05)
    days = 86_400 * 20
    windows = counts(list(alone.stream(days, 3, pauses=True)), 600, days)
    assert sum(count > 0 for count in windows) / len(windows) == pytest.approx(client.active_share, abs=0.08)
    assert sum(windows) / days == pytest.approx(0.05, rel=0.2)
    assert fmean(count == 0 for count in counts(list(alone.stream(86_400, 3)), 600, 86_400)) < 0.2


def test_the_table_of_callers_is_read_whole() -> None:
    with (shipped_folder() / "servegen_clients.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if float(row["mean_rps"]) > 0]
    assert sum(len(population(model).clients) for model in models()) == len(rows)
    shares = sorted((client.rate for client in population("m-mid").clients), reverse=True)
    assert shares[0] / sum(shares) == pytest.approx(0.52, abs=0.01)


def test_quantiles_are_kept_and_the_mean_is_near() -> None:
    close = 0
    with (shipped_folder() / "servegen_clients.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["prompt_mean"]]
    for row in rows:
        mean, p50, p90, p99 = (float(row[f"prompt_{name}"]) for name in ("mean", "p50", "p90", "p99"))
        sizes = Quantiles.fitted(mean, p50, p90, p99)
        assert (sizes.p50, sizes.p90, sizes.p99) == (max(1, p50), max(1, p50, p90), max(1, p50, p90, p99))
        close += abs(sizes.mean / mean - 1) < 0.1
    assert close / len(rows) > 0.8


# ---- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poison", "no arrivals 'poison': is poisson meant"),
        ("", "no arrivals '': use poisson, constant"),
        ("spike:factor", "'factor' is not SETTING=VALUE"),
        ("spike:factor=x", "factor=x is no number within 0 and 1000"),
        ("spike:hight=3", "no setting hight; it knows factor=4, at, for"),
        ("poisson:cv=3", "no setting cv; it knows none"),
        ("gamma:cv=0", "cv=0 is no number within 0.01 and 100"),
        ("mmpp:ratio=nan", "ratio=nan is no number"),
        ("diurnal:peak=0.5", "peak=0.5 is no number within 1"),
        ("clients:model=gpt", "no callers of a model 'gpt' were measured: deepseek-r1, m-large"),
        ("measured:model=gpt", "no rates of a model 'gpt'"),
        ("clients:pauses=2", "pauses=2 is no number within 0 and 1"),
    ],
)
def test_a_text_that_says_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        moments(text, rate=1, duration_s=1)
    with pytest.raises(UsageError, match=message):
        check_arrivals(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_is_one_passes_the_check(kind: str) -> None:
    check_arrivals(kind)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"rate": 0.0}, "above 0, not 0 per second"),
        ({"rate": float("nan")}, "above 0, not nan"),
        ({"duration_s": float("inf")}, "for inf s"),
        ({"keys": 0}, "at least 1 key"),
        ({"key_skew": -1.0}, "with a skew"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(how: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generate.stream(**({"rate": 1.0, "duration_s": 1.0} | how))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Table((), 60, 10),
        lambda: Table((0.0, 0.0), 60, 10),
        lambda: Table((1.0, -1.0), 60, 10),
        lambda: Table((1.0,), 0, 10),
        lambda: Diurnal(1.0, 0.5, 86_400, 10),
        lambda: Diurnal(1.0, 2.0, 0, 10),
        lambda: Spike(1.0, -1.0, 1, 1, 10),
        lambda: Spike(1.0, 2.0, -1, 1, 10),
    ],
)
def test_a_process_that_cannot_be_is_refused_when_it_is_made(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match=r"needs a|a spike begins"):
        make()
