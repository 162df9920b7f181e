"""The estimate beside a real tokenizer: the benchmark's goal, on a part of its traffic."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import quicktok

from benchmarks import estimate
from benchmarks.estimate_texts import half_of, texts

KINDS = ("prose", "code", "json", "base64")


def judge(contents: Sequence[str]) -> int:
    count = quicktok.get_encoding("o200k_base").count
    return 3 + sum(4 + count(content) for content in contents)


@pytest.mark.parametrize("mixed", [False, True], ids=["one kind a key", "mixed"])
def test_the_goal_is_met_on_texts_that_the_prices_never_saw(mixed: bool) -> None:
    rng, kinds = Random(11), {name: make for name, make in texts("judge").items() if name in KINDS}
    groups = [kinds] * 3 if mixed else [{name: make} for name, make in kinds.items()]
    keys = [list(estimate._requests(rng, f"k{n}", group, 90)) for n, group in enumerate(groups)]
    ours, theirs = (
        estimate.figures(error for alone in estimate.lone(keys) for _, error in estimate.errors(alone, judge, make))
        for make in (estimate.Gateway, estimate.BytesOver4)
    )
    assert ours["mean"] <= estimate.GOAL_MEAN
    assert ours["p95"] <= estimate.GOAL_P95
    assert ours["mean"] < theirs["mean"] / 2


def test_both_halves_have_documents() -> None:
    assert {half_of(name) for name in ("argparse.py", "json", "a", "b", "c", "d")} == {"fit", "judge"}
