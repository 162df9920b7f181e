"""Replays arrivals straight into an engine model, with nothing in front of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
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

    submitted_ns: array[int]
    first_ns: array[int]
    finished_ns: array[int]
    output_tokens: array[int]
    end_ns: int
    """When the engine fell idle."""
    steps: int
    """Forward passes."""
    stretches: int
    """Calls of `leap` that it took."""
    busy_ns: int

    def ttft_ms(self) -> list[float]:
        """Times to first token, ascending."""
        return sorted((first - at) / 1e6 for first, at in zip(self.first_ns, self.submitted_ns, strict=True))

    def tpot_ms(self) -> list[float]:
        """Times per output token after the first, ascending; answers of one token have none."""
        columns = zip(self.finished_ns, self.first_ns, self.output_tokens, strict=True)
        return sorted((end - first) / 1e6 / (tokens - 1) for end, first, tokens in columns if tokens > 1)

    def output_tokens_per_s(self) -> float:
        """Output tokens of all requests over the span from the first arrival until the engine fell idle."""
        return sum(self.output_tokens) * 1e9 / (self.end_ns - self.submitted_ns[0])


def replay(model: EngineModel, work: Iterable[Work]) -> Timeline:
    """Submit `work`, in order of time, to an idle engine, and run it until it is idle again.

    Raises ValueError for work that can never fit the engine, or goes back in time.
    """
    first, finished = array("q"), array("q")
    submitted, outputs = array("q"), array("q")
    stretch: Stretch | None = None
    now = stretches = busy_ns = 0

    def run(until: int | None) -> None:
        """End the stretches that are over by `until`."""
        nonlocal stretch, now, stretches, busy_ns
        while stretch is not None:
            end = stretch.end
            if until is not None and end > until:
                return
            stretches += 1
            busy_ns += end - stretch.start
            now = end
            for id_ in stretch.first:
                first[int(id_)] = end
            for id_ in stretch.finished:
                finished[int(id_)] = end
            stretch = model.leap(end)

    pending_at = -1
    for count, (at, prompt_tokens, output_tokens, cached_tokens, session) in enumerate(work):
        if at < pending_at:
            raise ValueError(f"the work goes back in time: {at} ns after {pending_at} ns")
        if at > pending_at:
            if stretch is None and count:
                stretch = model.leap(pending_at)  # what came at one instant to an idle engine shares its first step
            run(at)
            pending_at = at
        model.submit(str(count), prompt_tokens, output_tokens, at, cached_tokens=cached_tokens, session=session)
        submitted.append(at)
        outputs.append(output_tokens)
        first.append(-1)
        finished.append(-1)
    if stretch is None and submitted:
        stretch = model.leap(pending_at)
    run(None)
    return Timeline(submitted, first, finished, outputs, now, model.steps, stretches, busy_ns)
