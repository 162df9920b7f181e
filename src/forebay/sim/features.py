"""What a fit has of each request: how long its parts took, and the features of the steps that lie in them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from forebay.engines.simulated.fitted import FrontEnd
from forebay.engines.simulated.model import EngineLimits
from forebay.engines.simulated.profile import StepProfile
from forebay.errors import UsageError
from forebay.report.records import RequestRecord
from forebay.sim.replay import Offer, Step, replay

OUTLIER = 2.5
"""Scaled residual from which a row loses weight (Huber): a stall of the machine is not the engine."""
LEAST_TRUST = 0.05


class Column(NamedTuple):
    """A feature. `roofline`: (a^b + T^b)^(1/b) of a step of T tokens; `ramp`: 0 up to a, 1 from b on, straight between;
    `slope`: tokens beyond a; the others are named after their coefficient and have no parameters."""

    name: str
    a: float = 0.0
    b: float = 0.0


class Row(NamedTuple):
    """A span of simulated time, and how long it really took."""

    run: int
    from_ns: int
    to_ns: int
    seen_ms: float
    prompt_tokens: int
    first: bool
    """Up to the first token (from the arrival, front end included), or from there to the end."""


def offers_of(records: Sequence[RequestRecord]) -> list[Offer]:
    """What was sent, with the sizes that the engine counted."""
    return [Offer(record.sent_ns, max(1, record.prompt_tokens), record.output_tokens) for record in records]


def ttft_ms(record: RequestRecord) -> float:
    """From the writing of the request to its first token."""
    return (record.first_token_ns - record.sent_ns) / 1e6


def tpot_ms(record: RequestRecord) -> float | None:
    """Mean time between tokens; None for an answer of one."""
    if record.output_tokens < 2:
        return None
    return (record.done_ns - record.first_token_ns) / 1e6 / (record.output_tokens - 1)


class Rows:
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
        """`follow`: let the replay keep to the instants that were seen, see `replay`.

        Raises UsageError when a request does not fit the limits.
        """
        self.expected: list[float] | None = None
        """What is thought of the rows so far, in ms: those far from it lose weight. None: nothing yet."""
        self.rows: list[Row] = []
        self._steps: list[list[Step]] = []
        for number, records in enumerate(runs):
            try:
                instants = [(record.first_token_ns, record.done_ns) for record in records] if follow else None
                timings, steps = replay(profile, limits, front, offers_of(records), instants)
            except ValueError as error:
                raise UsageError(f"the requests do not fit the engine's limits as given: {error}") from None
            self._steps.append(steps)
            for record, timing in zip(records, timings, strict=True):
                size = record.prompt_tokens
                self.rows.append(Row(number, timing.queued_ns, timing.first_ns, ttft_ms(record), size, True))
                if record.output_tokens > 1:
                    took = (record.done_ns - record.first_token_ns) / 1e6
                    self.rows.append(Row(number, timing.first_ns, timing.done_ns, max(1e-3, took), size, False))
        self.seen = [row.seen_ms for row in self.rows]
        self.most_tokens = max(step.tokens for steps in self._steps for step in steps)
        self._places = [(self._place(row.run, row.from_ns), self._place(row.run, row.to_ns)) for row in self.rows]
        self._columns: dict[Column, list[float]] = {}

    def column(self, column: Column) -> list[float]:
        """The feature of each row."""
        found = self._columns.get(column)
        if found is None:
            found = self._columns[column] = self._made(column)
        return found

    def _made(self, column: Column) -> list[float]:
        name, a, b = column
        match name:
            case "front":
                return [1.0 if row.first else 0.0 for row in self.rows]
            case "front_token":
                return [float(row.prompt_tokens) if row.first else 0.0 for row in self.rows]
            case "c0":
                return self._sums(lambda _: 1.0)
            case "e":
                return self._sums(lambda step: float(step.tokens))
            case "seq":
                return self._sums(lambda step: float(step.sequences))
            case "kv":
                return self._sums(lambda step: step.context / 1e3)
            case "att":
                return self._sums(lambda step: step.pairs / 1e6)
            case "roofline":
                sizes = {step.tokens for steps in self._steps for step in steps}
                bent = {size: float((a**b + size**b) ** (1.0 / b)) for size in sizes}
                return self._sums(lambda step: bent[step.tokens])
            case "ramp":
                return self._sums(lambda step: min(1.0, max(0.0, (step.tokens - a) / (b - a))))
            case "slope":
                return self._sums(lambda step: max(0.0, step.tokens - a))
        raise AssertionError(f"there is no feature {name}")

    def _place(self, run: int, at_ns: int) -> tuple[int, float]:
        """Steps begun before a moment, less one, and the part of the last one that is over."""
        steps = self._steps[run]
        index = bisect_right(steps, at_ns, key=lambda step: step.from_ns) - 1
        if index < 0:
            return 0, 0.0
        step = steps[index]
        return index, min(1.0, (at_ns - step.from_ns) / max(1, step.to_ns - step.from_ns))

    def _sums(self, feature: Callable[[Step], float]) -> list[float]:
        """Per row, the sum of a feature over the steps in it, parts of steps in proportion."""
        values = [[feature(step) for step in steps] for steps in self._steps]
        totals = []
        for run in values:
            total, running = [0.0], 0.0
            for value in run:
                running += value
                total.append(running)
            totals.append(total)
        sums = []
        for row, ((first, begun), (last, ended)) in zip(self.rows, self._places, strict=True):
            run, total = values[row.run], totals[row.run]
            sums.append(total[last] + ended * run[last] - total[first] - begun * run[first])
        return sums

    def weights(self, scales: tuple[float, float]) -> list[float]:
        """Of squared residuals: relative ones, first tokens and the rest by their own spread, outliers less."""
        weights = []
        for row, expected in zip(self.rows, self.expected or self.seen, strict=True):
            scale = scales[0] if row.first else scales[1]
            residual = abs(expected / row.seen_ms - 1.0) / scale
            trust = 1.0 if residual <= OUTLIER else max(LEAST_TRUST, OUTLIER / residual)
            weights.append(trust / (row.seen_ms * scale) ** 2)
        return weights
