"""Fits the step model to an engine from what callers saw of it: requests, their first tokens, their ends.

Nobody outside an engine sees its steps. But a replay of the same requests says which steps lie between two moments, and
the time between them is the sum of theirs: linear in the coefficients once the shape of the roofline is given. So the
fit alternates: replay with the coefficients so far, solve least squares over the summed features, until neither moves.
The roofline's shape (its knee and sharpness) is found by trying a grid of them. Where a free curve over the tokens of a
step explains clearly more (a CPU's matrix products go by blocks), it takes the roofline's place. The time before the
scheduler is fitted along: a constant and a part per prompt token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from forebay.engines.simulated.fitted import Coefficient, Fitted, FrontEnd, Residuals
from forebay.engines.simulated.model import EngineLimits
from forebay.engines.simulated.profile import StepProfile
from forebay.errors import UsageError
from forebay.report.records import RequestRecord
from forebay.report.statistics import percentile
from forebay.sim.features import Column, Rows, tpot_ms, ttft_ms
from forebay.sim.squares import gram, solve_nonnegative, standard_error

STRAIGHT = tuple(map(Column, ("c0", "e", "seq", "kv", "att", "front", "front_token")))
CURVED = tuple(map(Column, ("c0", "seq", "kv", "att", "front", "front_token")))
FRONT_TOKEN = Column("front_token")
KNOTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
CURVE_GAIN = 10.0
"""By how much the Bayesian information criterion must favour a free curve over the roofline."""
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


@dataclass(frozen=True, slots=True)
class _Shape:
    """A fitted candidate: the value of each of its columns, and the squares that it leaves."""

    values: dict[Column, float]
    squares: float

    def of(self, name: str) -> float:
        """The value of the column of that name, 0 when it has none."""
        return next((value for column, value in self.values.items() if column.name == name), 0.0)

    @property
    def roofline(self) -> Column | None:
        return next((column for column in self.values if column.name == "roofline"), None)

    @property
    def curve(self) -> tuple[tuple[float, float], ...]:
        """Milliseconds at each knot, for one with ramps."""
        points = []
        ms = self.of("c0")
        for column, value in self.values.items():
            if column.name == "ramp":
                points.append((column.a, ms))
                ms += value
            elif column.name == "slope":
                points += [(column.a, ms), (2 * column.a, ms + value * column.a)]
        return tuple(points)


def usable(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The completed streams, by the time that they were sent. The others tell nothing of steps."""
    good = [r for r in records if r.outcome == "completed" and r.first_token_ns >= r.sent_ns >= 0 and r.output_tokens]
    return sorted(good, key=lambda record: record.sent_ns)


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
    search.settle(lambda rows: _best_roofline(rows, _without(STRAIGHT, FRONT_TOKEN)))
    plain = search.state
    search.settle(lambda rows: _best_roofline(rows, STRAIGHT))
    delays = search.front.per_token_ms <= MOST_FRONT_TOKEN_MS and search.shape.squares <= plain.shape.squares
    if not delays:
        search.state = plain
    coefficients = _coefficients(search.rows, search.shape)
    rounded = search.state
    search.settle(lambda rows: _best_curve(rows, CURVED if delays else _without(CURVED, FRONT_TOKEN)))
    gain = _criterion(rounded.rows, rounded.shape) - _criterion(search.rows, search.shape)
    if gain < CURVE_GAIN or search.front.per_token_ms > MOST_FRONT_TOKEN_MS:
        search.state = rounded
    residuals = _residuals(Rows(seen, search.profile, search.front, limits, follow=False), search.front)
    profile = replace(search.profile, confidence=_confidence(residuals, coefficients))
    return Calibration(profile, search.front, coefficients, residuals, search.rounds)


@dataclass(frozen=True, slots=True)
class _State:
    """What a search has found so far."""

    rows: Rows
    profile: StepProfile
    front: FrontEnd
    shape: _Shape


class _Search:
    """The rounds of replay and least squares."""

    def __init__(self, runs: Sequence[Sequence[RequestRecord]], like: StepProfile, limits: EngineLimits) -> None:
        self._runs, self._limits = runs, limits
        self.rounds = 0
        guess, front = _guess(runs, like), FrontEnd()
        self.state = _State(Rows(runs, guess, front, limits, follow=True), guess, front, _Shape({}, math.inf))

    @property
    def rows(self) -> Rows:
        return self.state.rows

    @property
    def profile(self) -> StepProfile:
        return self.state.profile

    @property
    def front(self) -> FrontEnd:
        return self.state.front

    @property
    def shape(self) -> _Shape:
        return self.state.shape

    def settle(self, best: Callable[[Rows], _Shape]) -> None:
        """Rounds of this kind until what they make of the requests stands still."""
        for _ in range(MOST_ROUNDS):
            self.rounds += 1
            shape = best(self.rows)
            before = _fitted(self.rows, shape)
            profile = _with(self.profile, shape)
            front = FrontEnd(shape.of("front"), shape.of("front_token"))
            rows = Rows(self._runs, profile, front, self._limits, follow=True)
            rows.expected = after = _fitted(rows, shape)
            self.state = _State(rows, profile, front, shape)
            moved = [abs(new / old - 1.0) for old, new in zip(before, after, strict=True) if old > 0]
            if sum(moved) / len(moved) < SETTLED:
                break


def _guess(runs: Sequence[Sequence[RequestRecord]], like: StepProfile) -> StepProfile:
    """Where the rounds start: one constant step and one price per prompt token."""
    gaps = [tpot for run in runs for r in run if (tpot := tpot_ms(r)) is not None]
    step = min(gaps) if gaps else min(ttft_ms(r) for run in runs for r in run)
    prices = [max(0.0, ttft_ms(r) - step) / max(1, r.prompt_tokens) for run in runs for r in run]
    return replace(like, c0=step, w=0.0, r=0.0, p=2.0, e=min(prices), seq=0.0, kv=0.0, att=0.0, curve=())


def _without(columns: Iterable[Column], left_out: Column) -> tuple[Column, ...]:
    return tuple(column for column in columns if column != left_out)


def _best_roofline(rows: Rows, columns: Sequence[Column]) -> _Shape:
    """The roofline, or none, that leaves the least squares with these columns beside it."""
    weights = rows.weights(SCALES)
    weighted = [w * y for w, y in zip(weights, rows.seen, strict=True)]
    square = _dot(rows.seen, weighted)
    values = [rows.column(column) for column in columns]
    products = gram(values, weights)
    moments = [_dot(one, weighted) for one in values]
    solution = solve_nonnegative(products, moments, square)
    straight = best = _Shape(dict(zip(columns, solution.values, strict=True)), solution.squares)
    for knee, sharpness in itertools.product(KNEES, SHARPNESS):
        if knee > 2 * rows.most_tokens:
            continue
        roofline = Column("roofline", knee, sharpness)
        bent = rows.column(roofline)
        pulled = [w * x for w, x in zip(weights, bent, strict=True)]
        border = [_dot(pulled, one) for one in values]
        bordered = [[*row, edge] for row, edge in zip(products, border, strict=True)]
        bordered.append([*border, _dot(pulled, bent)])
        solution = solve_nonnegative(bordered, [*moments, _dot(bent, weighted)], square)
        if solution.squares < best.squares:
            best = _Shape(dict(zip((*columns, roofline), solution.values, strict=True)), solution.squares)
    # A knee must earn its place: without a gain the plainest shape is taken.
    return straight if straight.squares <= best.squares * 1.005 else best


def _best_curve(rows: Rows, columns: Sequence[Column]) -> _Shape:
    """Any curve over the tokens of a step that does not fall, straight between the knots."""
    knots = [float(knot) for knot in KNOTS if knot < rows.most_tokens]
    ramps = [Column("ramp", low, high) for low, high in itertools.pairwise(knots)]
    everything = (*columns, *ramps, Column("slope", knots[-1] if knots else 1.0))
    weights = rows.weights(SCALES)
    weighted = [w * y for w, y in zip(weights, rows.seen, strict=True)]
    values = [rows.column(column) for column in everything]
    moments = [_dot(one, weighted) for one in values]
    solution = solve_nonnegative(gram(values, weights), moments, _dot(rows.seen, weighted))
    return _Shape(dict(zip(everything, solution.values, strict=True)), solution.squares)


def _fitted(rows: Rows, shape: _Shape) -> list[float]:
    """What the coefficients make of the rows, in ms, with the steps as replayed."""
    pairs = [(value, rows.column(column)) for column, value in shape.values.items() if value]
    return [sum(value * column[index] for value, column in pairs) for index in range(len(rows.rows))]


def _squares(rows: Rows, shape: _Shape) -> float:
    residuals = [seen - found for seen, found in zip(rows.seen, _fitted(rows, shape), strict=True)]
    return _dot([w * r for w, r in zip(rows.weights(SCALES), residuals, strict=True)], residuals)


def _criterion(rows: Rows, shape: _Shape) -> float:
    """Bayesian information criterion: what is left, and what each coefficient in use must be worth."""
    used = sum(1 for value in shape.values.values() if value > 0) + (2 if shape.roofline else 0)
    count = len(rows.rows)
    return count * math.log(max(1e-12, _squares(rows, shape) / count)) + used * math.log(count)


def _coefficients(rows: Rows, shape: _Shape) -> list[Coefficient]:
    """Values with their standard errors, by name; the roofline split into w, r and p."""
    roofline = shape.roofline or Column("roofline", rows.most_tokens / 2, 2.0)
    columns = [*shape.values, *(() if shape.roofline else (roofline,))]
    columns += [column for column in STRAIGHT if column not in shape.values]
    values = [shape.values.get(column, 0.0) for column in columns]
    products = gram([rows.column(column) for column in columns], rows.weights(SCALES))
    left = _squares(rows, shape)
    variance = left / max(1, len(rows.rows) - len(columns))
    bent = shape.roofline is not None and _squares(rows, _best_straight(rows)) > KNEE_GAIN * left
    found: dict[str, Coefficient] = {}
    for index, (column, value) in enumerate(zip(columns, values, strict=True)):
        error = standard_error(products, values, index, variance)
        if column.name == "roofline":
            found["w"] = _coefficient("w", value * column.a, error * column.a if bent else math.inf)
            found["r"] = _coefficient("r", value, error)
            found["p"] = _coefficient("p", column.b, 0.0 if bent else math.inf)
        else:
            found[column.name] = _coefficient(column.name, value, error)
    return [found[name] for name in WANTS]


def _best_straight(rows: Rows) -> _Shape:
    """Without a knee."""
    weights = rows.weights(SCALES)
    weighted = [w * y for w, y in zip(weights, rows.seen, strict=True)]
    values = [rows.column(column) for column in STRAIGHT]
    moments = [_dot(one, weighted) for one in values]
    solution = solve_nonnegative(gram(values, weights), moments, _dot(rows.seen, weighted))
    return _Shape(dict(zip(STRAIGHT, solution.values, strict=True)), solution.squares)


def _coefficient(name: str, value: float, error: float) -> Coefficient:
    known = value > 0 and error <= MOST_ERROR * value
    return Coefficient(name, value, error, known, "" if known else WANTS[name])


def _with(profile: StepProfile, shape: _Shape) -> StepProfile:
    """The profile with these coefficients. A curve takes the roofline's place, which stays as it was."""
    seq, kv, att = shape.of("seq"), shape.of("kv"), shape.of("att")
    if curve := shape.curve:
        return rates(replace(profile, seq=seq, kv=kv, att=att, curve=curve))
    column = shape.roofline or Column("roofline", 0.0, 2.0)
    slope = shape.of("roofline")
    w, p = slope * column.a, column.b
    bent = replace(profile, c0=shape.of("c0"), w=w, r=slope, p=p, e=shape.of("e"), seq=seq, kv=kv, att=att, curve=())
    return rates(bent)


def rates(profile: StepProfile) -> StepProfile:
    """The profile with the rates that its coefficients give."""
    batches = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= profile.max_num_seqs]
    prompts = [size for size in (128, 512, 1024, 2048, 4096, 8192) if size <= profile.max_num_batched_tokens]
    return replace(
        profile,
        decode_tokens_per_s={n: n / profile.step_ms(n, n, 1024 * n, 0.0) * 1e3 for n in batches},
        prefill_tokens_per_s={n: n / profile.step_ms(n, 1, 0, n * n / 2) * 1e3 for n in prompts},
    )


def _residuals(rows: Rows, front: FrontEnd) -> Residuals:
    off: dict[bool, list[float]] = {True: [], False: []}
    for row in rows.rows:
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
