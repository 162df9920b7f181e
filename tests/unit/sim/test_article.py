"""The article's experiment: its figures, its settings, and the search, on runs of a fraction of a second."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from forebay.cli.article import print_tables
from forebay.sim import article
from forebay.sim.article import APPROACHES, CLAIMS, Claim, Gate, Load, Reading, misfit
from forebay.sim.sweep import sweep


def runner(scenarios):  # type: ignore[no-untyped-def]
    return sweep(scenarios, processes=1)


def test_the_rows_imply_one_engine() -> None:
    """Requests per second over utilization: what the GPU would make if it were fully used."""
    implied = [claim.served_per_s / claim.utilization for claim in CLAIMS.values()]
    assert all(0.89 < rate / article.PEAK_PER_S < 1.04 for rate in implied)


def test_a_misfit_is_the_worst_factor_either_way() -> None:
    claim = Claim(100.0, 0.5, 1000.0)
    assert misfit(claim, claim) == 1.0
    assert misfit(Claim(100.0, 0.25, 1100.0), claim) == pytest.approx(2.0)
    assert misfit(Claim(150.0, 0.5, 1000.0), claim) == pytest.approx(1.5)


@pytest.mark.parametrize("approach", APPROACHES)
def test_every_setting_that_is_tried_is_a_configuration(approach: article.Approach) -> None:
    gates = [*article.GATES[approach], article.AS_WRITTEN[approach], article.SINGLE[approach][1]]
    gates += [fit.gates[approach] for fit in article.NEAREST.values()]
    for gate in gates:
        config = article.scenario(Load(100.0, "poisson"), gate, 1).loaded()
        assert config.admission.mode.value == approach == gate.mode
        assert config.engines[0].concurrency.limit == gate.in_flight


def test_the_search_finds_the_nearest_of_what_it_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = Load(1500.0, "poisson"), Load(50.0, "poisson")
    monkeypatch.setattr(article, "LOADS", (far, near))
    monkeypatch.setattr(article, "GATES", {a: (Gate(a, 1, 1), Gate(a, 32, 32)) for a in APPROACHES})
    fits = article.search(runner, duration_s=0.3)
    assert [(fit.served, fit.utilization) for fit in fits] == [tuple(reading) for reading in article.READINGS]
    assert all(fit.load == near and set(fit.gates) == set(APPROACHES) for fit in fits)
    alone = article.search(runner, duration_s=0.3, shared=False)
    assert len(alone) == len(APPROACHES) * len(article.READINGS)
    for fit in fits:
        singles = [one.worst for one in alone if (one.served, one.utilization) == (fit.served, fit.utilization)]
        assert fit.worst >= max(singles) > 1.0


def test_the_experiment_has_every_row_beside_its_claim() -> None:
    found = article.experiment(runner, seeds=(1, 2), duration_s=0.4)
    assert len(found.tables) == len(article.NEAREST) + 2
    for table in found.tables:
        assert [row.name for row in table.rows[:3]] == list(APPROACHES)
        assert [row.claim for row in table.rows[:3]] == list(CLAIMS.values())
        assert all(row.misfit is not None and row.misfit > 1.0 for row in table.rows[:3])
    assert found.tables[0].rows[3].name == article.DEFAULTS
    assert [row.claim for row in found.tables[0].rows[3:]] == [None, None]
    out = io.StringIO()
    print_tables(Console(file=out, width=200), found)
    assert "842 → " in out.getvalue()
    assert article.DEFAULTS in out.getvalue()
    assert msgspec.json.decode(found.to_json(), type=article.Experiment) == found
    page = article.page(found)
    assert "uPlot" in page
    assert "2100 requests/s, gamma gaps of CV 12" in page


def test_a_reading_says_what_was_counted() -> None:
    outcome = runner([article.scenario(Load(800.0, "poisson"), Gate("hybrid", 64, 32), 1, duration_s=0.5)])
    measured = article.Measured.of(outcome)
    busy = measured.read(Reading("completed", "busy"))
    share = measured.read(Reading("in time", "share of peak"))
    assert busy.utilization > share.utilization == pytest.approx(measured.served_per_s / article.PEAK_PER_S)
    assert share.served_per_s == measured.goodput_per_s <= busy.served_per_s
