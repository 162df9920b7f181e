"""Least squares with coefficients that cannot be negative, for a handful of columns and any number of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Matrix = list[list[float]]

TOLERANCE = 1e-10
"""Relative size below which a pivot counts as zero: the column adds nothing to those before it."""


MAX_EXCHANGES = 10
"""Per column. Rounding can make columns swap places for ever; the solution is good long before."""


@dataclass(frozen=True, slots=True)
class Solution:
    """`values` in the columns' order; `squares` is the sum of squared residuals."""

    values: list[float]
    squares: float


def gram(columns: Sequence[Sequence[float]], weights: Sequence[float]) -> Matrix:
    """Weighted inner products of all pairs of columns."""
    weighted = [[w * x for w, x in zip(weights, column, strict=True)] for column in columns]
    return [[_dot(left, right) for right in columns] for left in weighted]


def solve_nonnegative(products: Matrix, moments: Sequence[float], target_square: float) -> Solution:
    """Lawson and Hanson's method on normal equations.

    `products` is the Gram matrix of the columns, `moments` their inner products with the target, `target_square` that
    of the target with itself.
    """
    count = len(moments)
    scale = [math.sqrt(products[i][i]) or 1.0 for i in range(count)]
    a = [[products[i][j] / (scale[i] * scale[j]) for j in range(count)] for i in range(count)]
    b = [moments[i] / scale[i] for i in range(count)]
    x = [0.0] * count
    active: list[int] = []
    barred: set[int] = set()
    edge = TOLERANCE * max(1.0, math.sqrt(target_square))
    for _ in range(MAX_EXCHANGES * count):
        slope = [b[i] - sum(a[i][j] * x[j] for j in active) for i in range(count)]
        free = [i for i in range(count) if i not in active and i not in barred and slope[i] > edge]
        if not free:
            break
        entering = max(free, key=slope.__getitem__)
        active.append(entering)
        if not _settle(a, b, x, active, entering):
            barred.add(entering)
        elif entering in active:
            barred.clear()
    values = [x[i] / scale[i] for i in range(count)]
    fitted = sum(2.0 * x[i] * b[i] for i in active)
    own = sum(x[i] * a[i][j] * x[j] for i in active for j in active)
    return Solution(values, max(0.0, target_square - fitted + own))


def _settle(a: Matrix, b: Sequence[float], x: list[float], active: list[int], entering: int) -> bool:
    """Solves for the active columns, dropping those that would turn negative; false when `entering` cannot stay."""
    while active:
        found = solve([[a[i][j] for j in active] for i in active], [b[i] for i in active])
        if found is None or (entering in active and found[active.index(entering)] <= 0):
            active.remove(entering)
            x[entering] = 0.0
            return False
        if min(found) > 0:
            for i, value in zip(active, found, strict=True):
                x[i] = value
            return True
        # Go from x towards the solution until the first coefficient is zero, and leave that one out.
        step = min(x[i] / (x[i] - value) for i, value in zip(active, found, strict=True) if value <= 0)
        for i, value in zip(list(active), found, strict=True):
            x[i] += step * (value - x[i])
            if value <= 0 and x[i] <= TOLERANCE:
                x[i] = 0.0
                active.remove(i)
    return False


def solve(matrix: Matrix, right: Sequence[float]) -> list[float] | None:
    """The solution of a symmetric system with positive diagonal; None when it is singular."""
    lower = _cholesky(matrix)
    if lower is None:
        return None
    count = len(right)
    y = [0.0] * count
    for i in range(count):
        y[i] = (right[i] - sum(lower[i][k] * y[k] for k in range(i))) / lower[i][i]
    x = [0.0] * count
    for i in reversed(range(count)):
        x[i] = (y[i] - sum(lower[k][i] * x[k] for k in range(i + 1, count))) / lower[i][i]
    return x


def inverse_diagonal(matrix: Matrix) -> list[float] | None:
    """Diagonal of the inverse, by which a coefficient's variance grows; None when the matrix is singular."""
    count = len(matrix)
    diagonal = []
    for i in range(count):
        column = solve(matrix, [1.0 if j == i else 0.0 for j in range(count)])
        if column is None:
            return None
        diagonal.append(max(0.0, column[i]))
    return diagonal


def standard_error(products: Matrix, values: Sequence[float], index: int, variance: float) -> float:
    """Of one coefficient, beside those in use and, at the worst, one more that was left out but might share its part.

    inf when another could have all of it. `variance` is that of a row of weight 1.
    """
    if products[index][index] <= 0:
        return math.inf
    used = {i for i, value in enumerate(values) if value > 0} | {index}
    worst = 0.0
    for other in {-1} | {i for i in range(len(values)) if i not in used and products[i][i] > 0}:
        columns = sorted(used | {other} - {-1})
        diagonal = inverse_diagonal([[products[i][j] for j in columns] for i in columns])
        if diagonal is None:
            return math.inf
        worst = max(worst, math.sqrt(variance * diagonal[columns.index(index)]))
    return worst


def _cholesky(matrix: Matrix) -> Matrix | None:
    count = len(matrix)
    lower = [[0.0] * count for _ in range(count)]
    for i in range(count):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            if i != j:
                lower[i][j] = rest / lower[j][j]
            elif rest <= TOLERANCE * matrix[i][i]:
                return None
            else:
                lower[i][i] = math.sqrt(rest)
    return lower


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))
