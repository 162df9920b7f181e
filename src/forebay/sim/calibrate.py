"""Fits the step model to an engine from what callers saw of it: requests, their first tokens, their ends.

Nobody outside an engine sees its steps. But a replay of the same requests says which steps lie between two moments, and
the time between them is the sum of theirs: linear in the coefficients once the shape of the roofline is given. So the
fit alternates: replay with the coefficients so far, solve least squares over the summed features, until neither moves.
The roofline's shape (its knee and sharpness) is found by trying a grid of them. The time before the scheduler is fitted
along: a constant and a part per prompt token.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from forebay.engines.simulated.fitted import Coefficient, Fitted, FrontEnd, Residuals
from forebay.engines.simulated.model import EngineLimits
from forebay.engines.simulated.profiles import StepProfile
from forebay.errors import UsageError
from forebay.report.records import RequestRecord
from forebay.report.statistics import percentile
from forebay.sim.replay import Offer, Step, replay
from forebay.sim.squares import Matrix, gram, solve_nonnegative, standard_error

COLUMNS = ("c0", "roofline", "e", "seq", "kv", "att", "front", "front_token")
ROOFLINE = COLUMNS.index("roofline")
SHARPNESS = (1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
KNEES = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 512.0, 1024.0)
SCALES = (0.06, 0.02)
"""Relative spread that is expected of first tokens and of the rest."""
MOST_FRONT_TOKEN_MS = 0.02
"""Per prompt token, before the scheduler: slower than any tokenizer. More is a step's work taken for it."""
MOST_ROUNDS = 12
SETTLED = 1e-3
"""Relative change of what is predicted, on average, below which the rounds end."""
MOST_ERROR = 0.3
"""A coefficient is known when its standard error is at most this part of it."""
KNEE_GAIN = 1.1
"""A knee is seen when the best fit without one leaves this many times the squares."""
OUTLIER = 2.5
"""Scaled residual from which a row loses weight (Huber): a stall of the machine is not the engine."""
LEAST_TRUST = 0.05
FEWEST = 8

WANTS = {
    "c0": "answers at several batch sizes",
    "w": "batches on both sides of the knee",
    "r": "large batches or long prompts",
    "p": "batches on both sides of the knee",
    "e": "prompts and answers of many sizes",
    "seq": "many sequences beside few tokens, and few beside many",
    "kv": "answers after long prompts as well as short ones",
    "att": "longer prompts",
    "front": "single short prompts",
    "front_token": "single prompts of several lengths",
}


@dataclass(frozen=True, slots=True)
class Calibration:
    profile: StepProfile
    front: FrontEnd
    coefficients: list[Coefficient]
    residuals: Residuals
    rounds: int


def fitted(calibration: Calibration, limits: EngineLimits, fitted_from: str) -> Fitted:
    """The content of the file of a calibration."""
    return Fitted(
        fitted_from=fitted_from,
        profile=calibration.profile,
        limits=limits,
        front=calibration.front,
        # JSON knows no infinity.
        coefficients=[
            one if math.isfinite(one.error) else Coefficient(one.name, one.value, -1.0, one.known, one.wants)
            for one in calibration.coefficients
        ],
        residuals=calibration.residuals,
    )


class _Row(NamedTuple):
    """A span of simulated time, and how long it really took."""

    run: int
    from_ns: int
    to_ns: int
    seen_ms: float
    prompt_tokens: int
    first: bool
    """Up to the first token (from the arrival, front end included), or from there to the end."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A fitted candidate: the roofline's shape and all column values."""

    knee: float
    sharpness: float
    values: list[float]
    squares: float


def usable(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The completed streams, by the time that they were sent. The others tell nothing of steps."""
    good = [r for r in records if r.outcome == "completed" and r.first_token_ns >= r.sent_ns >= 0 and r.output_tokens]
    return sorted(good, key=lambda record: record.sent_ns)


def offers_of(records: Sequence[RequestRecord]) -> list[Offer]:
    """What was sent, with the sizes that the engine counted."""
    return [Offer(record.sent_ns, max(1, record.prompt_tokens), record.output_tokens) for record in records]


def fit(runs: Sequence[Sequence[RequestRecord]], limits: EngineLimits, like: StepProfile) -> Calibration:
    """The step model of the engine that answered `runs`, each of which began with the engine idle.

    `limits` are the engine's own; names and limits of the fitted profile are those of `like`.

    Raises UsageError when there is too little to fit from, or a request that the limits rule out.
    """
    seen = [usable(records) for records in runs]
    seen = [records for records in seen if records]
    if sum(map(len, seen)) < FEWEST:
        raise UsageError(
            f"too little to fit from: {sum(map(len, seen))} completed streams, at least {FEWEST} are needed "
            "(answers must stream, and tell their usage)"
        )
    search = _Search(seen, like, limits)
    # A delay in front of the scheduler moves arrivals past the steps that would explain it better, so that a wrong one
    # holds itself up: it may explain only what the steps have left.
    search.settle(frozenset(COLUMNS) - {"front_token"})
    plain = search.outcome()
    search.settle(frozenset(COLUMNS))
    if search.front.per_token_ms > MOST_FRONT_TOKEN_MS or search.shape.squares > plain[2].squares:
        search.restore(plain)
    coefficients = search.table.coefficients(search.shape, search.scales)
    profile, front = search.profile, search.front
    residuals = _residuals(_Table(seen, profile, front, limits, follow=False), front)
    profile = replace(profile, confidence=_confidence(residuals, coefficients))
    return Calibration(profile, front, coefficients, residuals, search.rounds)


class _Search:
    """The rounds of replay and least squares."""

    def __init__(self, runs: Sequence[Sequence[RequestRecord]], like: StepProfile, limits: EngineLimits) -> None:
        self._runs, self._like, self._limits = runs, like, limits
        self.rounds = 0
        self.scales = SCALES
        self.profile, self.front = _guess(runs, like), FrontEnd()
        self.table = _Table(runs, self.profile, self.front, limits, follow=True)
        self.shape = _Shape(0.0, 0.0, [0.0] * len(COLUMNS), math.inf)

    def outcome(self) -> tuple[_Table, StepProfile, _Shape, FrontEnd]:
        """What was found so far."""
        return self.table, self.profile, self.shape, self.front

    def restore(self, outcome: tuple[_Table, StepProfile, _Shape, FrontEnd]) -> None:
        """Goes back to what was found before."""
        self.table, self.profile, self.shape, self.front = outcome

    def settle(self, columns: frozenset[str]) -> None:
        """Rounds with these columns until what they make of the requests stands still."""
        for _ in range(MOST_ROUNDS):
            self.rounds += 1
            self.shape = shape = self.table.best(self.scales, columns)
            before = self.table.fitted(shape)
            self.profile, self.front = _with(self._like, shape), _front(shape)
            self.table = _Table(self._runs, self.profile, self.front, self._limits, follow=True)
            self.table.expected = after = self.table.fitted(shape)
            moved = [abs(new / old - 1.0) for old, new in zip(before, after, strict=True) if old > 0]
            if sum(moved) / len(moved) < SETTLED:
                break


def _guess(runs: Sequence[Sequence[RequestRecord]], like: StepProfile) -> StepProfile:
    """Where the rounds start: one constant step and one price per prompt token."""
    gaps = [tpot for run in runs for r in run if (tpot := tpot_ms(r)) is not None]
    step = min(gaps) if gaps else min(ttft_ms(r) for run in runs for r in run)
    rates = [max(0.0, ttft_ms(r) - step) / max(1, r.prompt_tokens) for run in runs for r in run]
    return replace(like, c0=step, w=0.0, r=0.0, p=2.0, e=min(rates), seq=0.0, kv=0.0, att=0.0)


def ttft_ms(record: RequestRecord) -> float:
    """From the writing of the request to its first token."""
    return (record.first_token_ns - record.sent_ns) / 1e6


def tpot_ms(record: RequestRecord) -> float | None:
    """Mean time between tokens; None for an answer of one."""
    if record.output_tokens < 2:
        return None
    return (record.done_ns - record.first_token_ns) / 1e6 / (record.output_tokens - 1)


class _Table:
    """The rows of all runs, with the features of the steps that a replay puts into each."""

    def __init__(
        self,
        runs: Sequence[Sequence[RequestRecord]],
        profile: StepProfile,
        front: FrontEnd,
        limits: EngineLimits,
        *,
        follow: bool,
    ) -> None:
        """`follow`: let the replay keep to the instants that were seen, see `replay`."""
        self.expected: list[float] | None = None
        """What is thought of the rows so far, in ms: those far from it lose weight. None: nothing yet."""
        self.rows: list[_Row] = []
        self._steps: list[list[Step]] = []
        for number, records in enumerate(runs):
            try:
                instants = [(record.first_token_ns, record.done_ns) for record in records] if follow else None
                timings, steps = replay(profile, limits, front, offers_of(records), instants)
            except ValueError as error:
                raise UsageError(f"the requests do not fit the engine's limits as given: {error}") from None
            self._steps.append(steps)
            for record, timing in zip(records, timings, strict=True):
                sizes = record.prompt_tokens
                self.rows.append(_Row(number, timing.queued_ns, timing.first_ns, ttft_ms(record), sizes, True))
                if record.output_tokens > 1:
                    took = (record.done_ns - record.first_token_ns) / 1e6
                    self.rows.append(_Row(number, timing.first_ns, timing.done_ns, max(1e-3, took), sizes, False))
        self._places = [(self._place(row.run, row.from_ns), self._place(row.run, row.to_ns)) for row in self.rows]
        self._fixed = {
            "c0": self._sums([[1.0] * len(steps) for steps in self._steps]),
            "e": self._sums([[float(step.tokens) for step in steps] for steps in self._steps]),
            "seq": self._sums([[float(step.sequences) for step in steps] for steps in self._steps]),
            "kv": self._sums([[step.context / 1e3 for step in steps] for steps in self._steps]),
            "att": self._sums([[step.pairs / 1e6 for step in steps] for steps in self._steps]),
            "front": [1.0 if row.first else 0.0 for row in self.rows],
            "front_token": [float(row.prompt_tokens) if row.first else 0.0 for row in self.rows],
        }

    def _place(self, run: int, at_ns: int) -> tuple[int, float]:
        """Steps begun before a moment, less one, and the part of the last one that is over."""
        steps = self._steps[run]
        index = bisect_right(steps, at_ns, key=lambda step: step.from_ns) - 1
        if index < 0:
            return 0, 0.0
        step = steps[index]
        return index, min(1.0, (at_ns - step.from_ns) / max(1, step.to_ns - step.from_ns))

    def _sums(self, features: Sequence[Sequence[float]]) -> list[float]:
        """Per row, the sum of a feature over the steps in it, parts of steps in proportion."""
        totals = []
        for values in features:
            total, running = [0.0], 0.0
            for value in values:
                running += value
                total.append(running)
            totals.append(total)
        sums = []
        for row, ((first, begun), (last, ended)) in zip(self.rows, self._places, strict=True):
            values, total = features[row.run], totals[row.run]
            sums.append(total[last] + ended * values[last] - total[first] - begun * values[first])
        return sums

    def _roofline(self, knee: float, sharpness: float) -> list[float]:
        """The roofline's column for r = 1: (knee^p + T^p)^(1/p) per step."""
        sizes = {step.tokens for steps in self._steps for step in steps}
        bent = {size: (knee**sharpness + size**sharpness) ** (1.0 / sharpness) for size in sizes}
        return self._sums([[bent[step.tokens] for step in steps] for steps in self._steps])

    def _columns(self, knee: float, sharpness: float) -> list[list[float]]:
        roofline = self._roofline(knee, sharpness) if sharpness else [0.0] * len(self.rows)
        return [roofline if name == "roofline" else self._fixed[name] for name in COLUMNS]

    def _weights(self, scales: tuple[float, float]) -> list[float]:
        """Of squared residuals: relative ones, each kind by its own spread, outliers less."""
        weights = []
        for row, expected in zip(self.rows, self.expected or [row.seen_ms for row in self.rows], strict=True):
            scale = scales[0] if row.first else scales[1]
            residual = abs(expected / row.seen_ms - 1.0) / scale
            trust = 1.0 if residual <= OUTLIER else max(LEAST_TRUST, OUTLIER / residual)
            weights.append(trust / (row.seen_ms * scale) ** 2)
        return weights

    def best(self, scales: tuple[float, float], allowed: frozenset[str]) -> _Shape:
        """The shape and coefficients, of the allowed columns, that leave the least squares."""
        weights = self._weights(scales)
        most = max(step.tokens for steps in self._steps for step in steps)
        shapes = [(0.0, 0.0)]
        shapes += [(knee, sharpness) for knee in KNEES if knee <= 2 * most for sharpness in SHARPNESS]
        columns = self._columns(0.0, 0.0)
        for index, name in enumerate(COLUMNS):
            if name not in allowed:
                columns[index] = [0.0] * len(self.rows)
        products = gram(columns, weights)
        seen = [row.seen_ms for row in self.rows]
        weighted = [w * y for w, y in zip(weights, seen, strict=True)]
        moments = [_dot(column, weighted) for column in columns]
        square = _dot(seen, weighted)
        found: list[_Shape] = []
        for knee, sharpness in shapes:
            if sharpness:
                roofline = self._roofline(knee, sharpness)
                self._put(products, columns, roofline, weights)
                moments[ROOFLINE] = _dot(roofline, weighted)
            solution = solve_nonnegative(products, moments, square)
            found.append(_Shape(knee, sharpness, solution.values, solution.squares))
        # A knee must earn its place: without a gain the plainest shape is taken.
        best = min(found, key=lambda shape: shape.squares)
        return found[0] if found[0].squares <= best.squares * 1.005 else best

    @staticmethod
    def _put(products: Matrix, columns: list[list[float]], roofline: list[float], weights: Sequence[float]) -> None:
        """Replaces the roofline's row and column of the Gram matrix."""
        columns[ROOFLINE] = roofline
        weighted = [w * x for w, x in zip(weights, roofline, strict=True)]
        for index, column in enumerate(columns):
            products[ROOFLINE][index] = products[index][ROOFLINE] = _dot(weighted, column)

    def fitted(self, shape: _Shape) -> list[float]:
        """What the coefficients make of the rows, in ms, with the steps as replayed."""
        columns = self._columns(shape.knee, shape.sharpness)
        pairs = [(value, column) for value, column in zip(shape.values, columns, strict=True) if value]
        return [sum(value * column[index] for value, column in pairs) for index in range(len(self.rows))]

    def scales(self, shape: _Shape) -> tuple[float, float]:
        """Robust spread of the relative residuals: of first tokens, of the rest."""
        spread = []
        fitted = self.fitted(shape)
        for first in (True, False):
            kind = [
                abs(value / row.seen_ms - 1.0)
                for row, value in zip(self.rows, fitted, strict=True)
                if row.first is first
            ]
            spread.append(max(0.002, 1.4826 * median(kind)) if kind else 0.03)
        return spread[0], spread[1]

    def coefficients(self, shape: _Shape, scales: tuple[float, float]) -> list[Coefficient]:
        """Values with their standard errors, by name; roofline split into w, r and p."""
        weights = self._weights(scales)
        columns = self._columns(shape.knee, shape.sharpness)
        products = gram(columns, weights)
        residuals = [y.seen_ms - f for y, f in zip(self.rows, self.fitted(shape), strict=True)]
        variance = _dot([w * r for w, r in zip(weights, residuals, strict=True)], residuals)
        variance /= max(1, len(self.rows) - len(COLUMNS))
        errors = [standard_error(products, shape.values, index, variance) for index in range(len(COLUMNS))]
        found: list[Coefficient] = []
        for name, value, error in zip(COLUMNS, shape.values, errors, strict=True):
            if name != "roofline":
                found.append(_coefficient(name, value, error))
                continue
            bent = shape.sharpness > 0 and value > 0 and self._bends(shape, scales)
            found.append(_coefficient("w", value * shape.knee, error * shape.knee if bent else math.inf))
            found.append(_coefficient("r", value, error))
            found.append(_coefficient("p", shape.sharpness or 2.0, 0.0 if bent else math.inf))
        return found

    def _bends(self, shape: _Shape, scales: tuple[float, float]) -> bool:
        """Whether a fit without a knee would be clearly worse."""
        weights = self._weights(scales)
        columns = self._columns(0.0, 0.0)
        weighted = [w * row.seen_ms for w, row in zip(weights, self.rows, strict=True)]
        moments = [_dot(column, weighted) for column in columns]
        square = _dot([row.seen_ms for row in self.rows], weighted)
        straight = solve_nonnegative(gram(columns, weights), moments, square).squares
        residuals = [row.seen_ms - f for row, f in zip(self.rows, self.fitted(shape), strict=True)]
        return straight > KNEE_GAIN * _dot([w * r for w, r in zip(weights, residuals, strict=True)], residuals)


def _coefficient(name: str, value: float, error: float) -> Coefficient:
    known = value > 0 and error <= MOST_ERROR * value
    return Coefficient(name, value, error, known, "" if known else WANTS[name])


def _with(like: StepProfile, shape: _Shape) -> StepProfile:
    by_name = dict(zip(COLUMNS, shape.values, strict=True))
    slope = by_name["roofline"]
    return rates(
        replace(
            like,
            c0=by_name["c0"],
            w=slope * shape.knee,
            r=slope,
            p=shape.sharpness or 2.0,
            e=by_name["e"],
            seq=by_name["seq"],
            kv=by_name["kv"],
            att=by_name["att"],
        )
    )


def rates(profile: StepProfile) -> StepProfile:
    """The profile with the rates that its coefficients give."""
    batches = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= profile.max_num_seqs]
    prompts = [size for size in (128, 512, 1024, 2048, 4096, 8192) if size <= profile.max_num_batched_tokens]
    return replace(
        profile,
        decode_tokens_per_s={n: n / profile.step_ms(n, n, 1024 * n, 0.0) * 1e3 for n in batches},
        prefill_tokens_per_s={n: n / profile.step_ms(n, 1, 0, n * n / 2) * 1e3 for n in prompts},
    )


def _front(shape: _Shape) -> FrontEnd:
    by_name = dict(zip(COLUMNS, shape.values, strict=True))
    return FrontEnd(by_name["front"], by_name["front_token"])


def _residuals(table: _Table, front: FrontEnd) -> Residuals:
    off: dict[bool, list[float]] = {True: [], False: []}
    for row in table.rows:
        took = (row.to_ns - row.from_ns) / 1e6 + (front.delay_ns(row.prompt_tokens) / 1e6 if row.first else 0.0)
        off[row.first].append(abs(took / row.seen_ms - 1.0))
    first, rest = sorted(off[True]), sorted(off[False])
    return Residuals(
        requests=len(first),
        ttft_p50=percentile(first, 0.5),
        ttft_p90=percentile(first, 0.9),
        tpot_p50=percentile(rest, 0.5),
        tpot_p90=percentile(rest, 0.9),
    )


def _confidence(residuals: Residuals, coefficients: Sequence[Coefficient]) -> str:
    """high, medium or low, by what the fit leaves unexplained."""
    unknown = [one.name for one in coefficients if not one.known]
    first, rest = residuals.ttft_p50 or 0.0, residuals.tpot_p50 or 0.0
    if rest <= 0.03 and first <= 0.08:
        level = "high"
    elif rest <= 0.08 and first <= 0.2:
        level = "medium"
    else:
        level = "low"
    return f"{level}; not identified: {', '.join(unknown)}" if unknown else level


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))
