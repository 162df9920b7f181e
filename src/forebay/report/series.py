"""Records over time: the curves that the page draws, in bins small enough to see a burst."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from forebay.report.records import EngineSample, RunRecords
from forebay.report.results import latency_ms, ttft_ms
from forebay.report.statistics import interpolate, percentile

TARGET_BINS = 240
BIN_WIDTHS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
ENGINE_WINDOW_S = 1.0

Curve = list[float | None]


class Series(msgspec.Struct):
    """Curves of one run over `at_s` (the middle of each bin). A gap is None: nothing to measure in that bin.

    Latency and queue wait (ms) belong to the time the request was meant to be sent, rates (per second) to the time of
    the event; `in_flight` is the mean number of requests sent and not answered; busy and batch are shares of 1.
    """

    bin_s: float
    at_s: list[float]
    latency_p50: Curve
    latency_p99: Curve
    ttft_p50: Curve
    ttft_p99: Curve
    queue_p50: Curve
    queue_p99: Curve
    in_flight: Curve
    offered: Curve
    completed: Curve
    refused: Curve
    lost: Curve
    busy: Curve
    batch: Curve
    batch_size: Curve


def bin_width_s(duration_s: float) -> float:
    """The narrowest width that needs no more than TARGET_BINS bins."""
    return next((width for width in BIN_WIDTHS_S if duration_s / width <= TARGET_BINS), BIN_WIDTHS_S[-1])


def series(run: RunRecords, until_s: float | None = None) -> Series:
    """The curves of a run from its start to its last event, or to `until_s`, so that several runs share one axis."""
    end_s = until_s if until_s is not None else last_event_s(run)
    width = bin_width_s(end_s)
    bins = max(1, math.ceil(end_s / width))
    latency: list[list[float]] = [[] for _ in range(bins)]
    ttft: list[list[float]] = [[] for _ in range(bins)]
    queue: list[list[float]] = [[] for _ in range(bins)]
    offered, completed, refused, lost = ([0] * bins for _ in range(4))
    for record in run.requests:
        meant = min(bins - 1, int(record.intended_ns / 1e9 / width))
        ended = min(bins - 1, int(record.done_ns / 1e9 / width))
        offered[meant] += 1
        if record.outcome == "completed":
            completed[ended] += 1
            latency[meant].append(latency_ms(record))
            first = ttft_ms(record)
            if first is not None:
                ttft[meant].append(first)
            if record.queue_wait_ms is not None:
                queue[meant].append(record.queue_wait_ms)
        elif record.outcome in {"shed", "evicted"}:
            refused[ended] += 1
        else:
            lost[ended] += 1
    busy, batch, batch_size = _engine_curves(run.samples, bins, width)
    return Series(
        bin_s=width,
        at_s=[round((index + 0.5) * width, 3) for index in range(bins)],
        latency_p50=_percentiles(latency, 0.5),
        latency_p99=_percentiles(latency, 0.99),
        ttft_p50=_percentiles(ttft, 0.5),
        ttft_p99=_percentiles(ttft, 0.99),
        queue_p50=_percentiles(queue, 0.5),
        queue_p99=_percentiles(queue, 0.99),
        in_flight=_in_flight(run, bins, width),
        offered=[number / width for number in offered],
        completed=[number / width for number in completed],
        refused=[number / width for number in refused],
        lost=[number / width for number in lost],
        busy=busy,
        batch=batch,
        batch_size=batch_size,
    )


def last_event_s(run: RunRecords) -> float:
    """When the last request ended or the last phase did."""
    ends = [run.header.phases[-1].to_s]
    if run.requests:
        ends.append(max(record.done_ns for record in run.requests) / 1e9)
    return max(ends)


def _percentiles(bins: Iterable[list[float]], share: float) -> Curve:
    found = (percentile(sorted(values), share) for values in bins)
    return [None if value is None else round(value, 2) for value in found]


def _in_flight(run: RunRecords, bins: int, width: float) -> Curve:
    """Time-weighted mean per bin: every request adds the part of its life that lies in the bin."""
    totals = [0.0] * bins
    for record in run.requests:
        start, end = record.intended_ns / 1e9, record.done_ns / 1e9
        first, last = min(bins - 1, int(start / width)), min(bins - 1, int(end / width))
        for index in range(first, last + 1):
            totals[index] += max(0.0, min(end, (index + 1) * width) - max(start, index * width))
    return [round(total / width, 3) for total in totals]


def _engine_curves(samples: list[EngineSample], bins: int, width: float) -> tuple[Curve, Curve, Curve]:
    """Busy share, batch occupancy and batch size per bin, from the growth of the engine's counters around it.

    A CPU engine may take a tenth of a second per step and counts whole steps: a window of about a second shows its
    state, a shorter one the beat between steps and samples.
    """
    reach = max(width, ENGINE_WINDOW_S) / 2
    busy_s = _counter(samples, "busy_s")
    steps, seqs = _counter(samples, "steps"), _counter(samples, "batch_seqs")
    running = _counter(samples, "running")
    first_s, last_s = (samples[0].at_ns / 1e9, samples[-1].at_ns / 1e9) if samples else (0.0, 0.0)
    seats = next((sample.max_batch for sample in samples if sample.max_batch), None)
    busy: Curve = []
    size: Curve = []
    for index in range(bins):
        middle = (index + 0.5) * width
        # Clipped to what was sampled: beyond it a counter's stillness means nothing.
        from_s, to_s = max(first_s, middle - reach), min(last_s, middle + reach)
        if to_s <= from_s:
            busy.append(None)
            size.append(None)
            continue
        if busy_s:
            grown = _growth(busy_s, from_s, to_s)
            busy.append(None if grown is None else round(min(1.0, grown / (to_s - from_s)), 4))
        else:
            busy.append(_mean([min(1.0, value) for at, value in running if from_s <= at < to_s]))
        stepped, sat = _growth(steps, from_s, to_s), _growth(seqs, from_s, to_s)
        if stepped is None or sat is None:
            size.append(_mean([value for at, value in running if from_s <= at < to_s]) if not steps else None)
        else:
            size.append(round(sat / stepped, 3) if stepped > 0 else 0.0)
    batch: Curve = [None if one is None or not seats else round(one / seats, 4) for one in size]
    return busy, batch, size


def _counter(samples: list[EngineSample], figure: str) -> list[tuple[float, float]]:
    return [(s.at_ns / 1e9, value) for s in samples if (value := getattr(s, figure)) is not None]


def _growth(points: list[tuple[float, float]], from_s: float, to_s: float) -> float | None:
    """How much a counter grew; None without samples of it."""
    start, end = interpolate(points, from_s), interpolate(points, to_s)
    return None if start is None or end is None else end - start


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
