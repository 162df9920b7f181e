"""Least squares without negative coefficients, against what defines them."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.sim.squares import gram, inverse_diagonal, solve, solve_nonnegative


def products(columns: list[list[float]], target: list[float]) -> tuple[list[list[float]], list[float], float]:
    ones = [1.0] * len(target)
    moments = [sum(x * y for x, y in zip(column, target, strict=True)) for column in columns]
    return gram(columns, ones), moments, sum(y * y for y in target)


def test_what_made_the_target_is_found_again() -> None:
    rng = Random(1)
    columns = [[rng.random() for _ in range(40)] for _ in range(5)]
    truth = [3.0, 0.0, 0.25, 0.0, 7.0]
    target = [sum(c * column[row] for c, column in zip(truth, columns, strict=True)) for row in range(40)]
    found = solve_nonnegative(*products(columns, target))
    assert found.values == pytest.approx(truth, abs=1e-6)
    assert found.squares == pytest.approx(0.0, abs=1e-9)


def test_a_column_that_would_be_negative_is_left_out() -> None:
    columns = [[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]]
    found = solve_nonnegative(*products(columns, [3.0, 2.0, 1.0]))
    assert found.values == pytest.approx([2.0, 0.0])
    assert found.squares == pytest.approx(2.0)


def test_columns_that_say_the_same_share_one_part() -> None:
    column = [1.0, 2.0, 3.0]
    found = solve_nonnegative(*products([column, column], [2.0, 4.0, 6.0]))
    assert sum(found.values) == pytest.approx(2.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10_000))
def test_no_direction_that_is_allowed_improves(count: int, seed: int) -> None:
    rng = Random(seed)
    columns = [[rng.uniform(-1, 1) for _ in range(12)] for _ in range(count)]
    target = [rng.uniform(-1, 1) for _ in range(12)]
    a, b, square = products(columns, target)
    found = solve_nonnegative(a, b, square).values
    for i in range(count):
        slope = b[i] - sum(a[i][j] * found[j] for j in range(count))
        assert found[i] >= 0
        assert slope <= 1e-6
        assert found[i] == 0 or abs(slope) <= 1e-6


def test_a_singular_system_has_no_solution_and_no_errors() -> None:
    singular = [[1.0, 2.0], [2.0, 4.0]]
    assert solve(singular, [1.0, 2.0]) is None
    assert inverse_diagonal(singular) is None
    assert inverse_diagonal([[4.0, 0.0], [0.0, 0.5]]) == pytest.approx([0.25, 2.0])
