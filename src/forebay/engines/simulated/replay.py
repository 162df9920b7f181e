"""Drives one engine model with nothing in front of it: arrivals at given times, or so many clients in a closed loop."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from forebay.engines.simulated.model import EngineModel
from forebay.engines.simulated.stretch import Stretch


class Work(NamedTuple):
    """A request as the engine sees it. `cached_tokens` and `session`: see `EngineModel.submit`."""

    at_ns: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    session: str = ""


class Timeline(NamedTuple):
    """What became of each request, in order of submission; instants in ns on the clock of `Work.at_ns`."""

    submitted_ns: Sequence[int]
    first_ns: Sequence[int]
    finished_ns: Sequence[int]
    output_tokens: Sequence[int]
    end_ns: int
    """When the engine fell idle for good."""
    steps: int
    """Forward passes."""
    stretches: int
    """Calls of `EngineModel.leap` that it took."""
    busy_ns: int

    def ttft_ms(self) -> list[float]:
        """Times to first token, in order of submission."""
        return [(first - at) / 1e6 for first, at in zip(self.first_ns, self.submitted_ns, strict=True)]

    def tpot_ms(self) -> list[float]:
        """Times per output token after the first, in order of submission; answers of one token have none."""
        columns = zip(self.finished_ns, self.first_ns, self.output_tokens, strict=True)
        return [(end - first) / 1e6 / (tokens - 1) for end, first, tokens in columns if tokens > 1]

    def output_tokens_per_s(self) -> float:
        """Output tokens of all requests, over the span from the first arrival until the engine fell idle."""
        return sum(self.output_tokens) * 1e9 / (self.end_ns - self.submitted_ns[0])


class _Drive:
    """An engine that is driven, and the record of it. Ids are positions in the record."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.stretch: Stretch | None = None
        self.now = 0
        self._stretches = self._busy_ns = 0
        self._submitted, self._first = array("q"), array("q")
        self._finished, self._outputs = array("q"), array("q")

    def submit(self, work: Work) -> None:
        at, prompt_tokens, output_tokens, cached_tokens, session = work
        id_ = str(len(self._submitted))
        self.model.submit(id_, prompt_tokens, output_tokens, at, cached_tokens=cached_tokens, session=session)
        self._submitted.append(at)
        self._outputs.append(output_tokens)
        self._first.append(-1)
        self._finished.append(-1)

    def end_stretch(self, stretch: Stretch) -> None:
        self.now = end = stretch.end
        self._stretches += 1
        self._busy_ns += end - stretch.start
        for id_ in stretch.first:
            self._first[int(id_)] = end
        for id_ in stretch.finished:
            self._finished[int(id_)] = end

    def run_until(self, instant: int) -> None:
        """End the stretches that are over by then."""
        while self.stretch is not None and self.stretch.end <= instant:
            self.end_stretch(self.stretch)
            self.stretch = self.model.leap(self.now)

    def timeline(self) -> Timeline:
        return Timeline(
            self._submitted,
            self._first,
            self._finished,
            self._outputs,
            self.now,
            self.model.steps,
            self._stretches,
            self._busy_ns,
        )


def replay(model: EngineModel, work: Iterable[Work]) -> Timeline:
    """Submit `work`, in order of time, to an idle engine, and run it until it is idle again.

    What comes to an idle engine at one instant shares its first step. Raises ValueError for work that can never fit
    the engine, or goes back in time.
    """
    drive = _Drive(model)
    last = None
    for one in work:
        if last is not None and one.at_ns < last:
            raise ValueError(f"the work goes back in time: {one.at_ns} ns after {last} ns")
        if last is not None and one.at_ns > last:
            if drive.stretch is None:
                drive.stretch = model.leap(last)
            drive.run_until(one.at_ns)
        drive.submit(one)
        last = one.at_ns
    if drive.stretch is None:
        drive.stretch = model.leap(last or 0)
    while drive.stretch is not None:
        drive.run_until(drive.stretch.end)
    return drive.timeline()


def closed_loop(model: EngineModel, sizes: Sequence[tuple[int, int]], concurrency: int) -> Timeline:
    """Serve `sizes`, (prompt tokens, output tokens), in order to `concurrency` clients, from an idle engine on.

    All clients begin at 0; each sends its next request when its last one ends.
    """
    drive = _Drive(model)
    for size in sizes[:concurrency]:
        drive.submit(Work(0, *size))
    sent = min(concurrency, len(sizes))
    stretch = model.leap(0)
    while stretch is not None:
        drive.end_stretch(stretch)
        for size in sizes[sent : sent + len(stretch.finished)]:
            drive.submit(Work(drive.now, *size))
        sent += len(stretch.finished)
        stretch = model.leap(drive.now)
    return drive.timeline()
