"""Sizes are what their text says."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

from forebay.errors import UsageError
from forebay.workload.sizes import Sizes


@pytest.mark.parametrize(
    ("text", "low", "high"), [("128", 128, 128), ("64-256", 64, 256), ("~300", 1, 6000), ("~20/0.5", 1, 400)]
)
def test_sizes_are_read(text: str, low: int, high: int) -> None:
    sizes = Sizes.parse(text)
    rng = Random(1)
    drawn = [sizes.draw(rng) for _ in range(3000)]
    assert min(drawn) >= low
    assert max(drawn) <= high
    if sizes.mean is not None:
        assert fmean(drawn) == pytest.approx(sizes.mean, rel=0.1)


@pytest.mark.parametrize("text", ["0", "9-3", "", "x", "-5", "~0", "~5/0", "9999999", "1.5"])
def test_sizes_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        Sizes.parse(text)
