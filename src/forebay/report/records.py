"""The flat records of a run, as JSON lines: one `run` line, then `request` and `engine` lines in the order they end.

Times are nanoseconds from the start of the run. `-1` stands for "did not happen".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from forebay.errors import UsageError

OutcomeName = Literal["completed", "shed", "evicted", "cancelled", "failed"]
OUTCOMES: tuple[OutcomeName, ...] = ("completed", "shed", "evicted", "cancelled", "failed")

EVICT_REASONS = frozenset({"expired", "displaced"})
NEVER = -1


class PhaseBounds(msgspec.Struct, frozen=True):
    """A named stretch of the run, in seconds from its start."""

    name: str
    from_s: float
    to_s: float


class Objective(msgspec.Struct, frozen=True):
    """What counts as served in time; None sets no bound. A completion within all bounds is goodput."""

    ttft_ms: float | None = None
    latency_ms: float | None = None


class RunHeader(msgspec.Struct, frozen=True, tag="run", kw_only=True):
    """What was run: the first line of a records file."""

    mode: str
    policy: str
    workload: str
    seed: int
    phases: list[PhaseBounds]
    offered_load: float | None = None
    objective: Objective = Objective()


class RequestRecord(msgspec.Struct, frozen=True, tag="request", kw_only=True):
    """One offered request, all its attempts together, with exactly one outcome.

    `sent_ns` is when the first attempt was written; latency counts from `intended_ns`, so a late client hides nothing.
    `first_token_ns` is set for streams only. `queue_wait_ms` is what the gateway reported of itself, None if nothing.
    `output_tokens` counts what the client received, also of answers it abandoned.
    """

    index: int
    phase: str
    key: str
    outcome: OutcomeName
    intended_ns: int
    sent_ns: int
    first_token_ns: int
    done_ns: int
    status: int
    attempts: int
    reason: str = ""
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    queue_wait_ms: float | None = None


class EngineSample(msgspec.Struct, frozen=True, tag="engine", kw_only=True):
    """The engine's own counters at one moment. None: the engine does not publish the figure."""

    at_ns: int
    running: float | None = None
    waiting: float | None = None
    busy_s: float | None = None
    steps: float | None = None
    batch_seqs: float | None = None
    max_batch: float | None = None
    generated_tokens: float | None = None


Line = RunHeader | RequestRecord | EngineSample


class RunRecords(msgspec.Struct):
    """Everything recorded about one run."""

    header: RunHeader
    requests: list[RequestRecord]
    samples: list[EngineSample]


def classify(status: int, reason: str, *, complete: bool, left: bool) -> OutcomeName:
    """The outcome of a request from its last answer.

    `complete`: a 2xx answer ended as its protocol says; `left`: the client's patience ended first.
    A refusal is known by the gateway's reason header, so that an engine's own 503 stays a failure.
    """
    if left:
        return "cancelled"
    if complete and 200 <= status < 300:
        return "completed"
    if reason and status in {413, 429, 503, 529}:
        return "evicted" if reason in EVICT_REASONS else "shed"
    return "failed"


class RecordWriter:
    """Appends lines to a records file; buffered, so call `flush` or `close`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=1 << 18)
        self._encoder = msgspec.json.Encoder()

    def write(self, line: Line) -> None:
        self._file.write(self._encoder.encode(line))
        self._file.write(b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a records file; UsageError names the line that cannot be read."""
    decoder = msgspec.json.Decoder(Line)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield decoder.decode(line)
                except msgspec.DecodeError as error:
                    raise UsageError(f"{path}, line {number}: not a record: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_run(path: Path) -> RunRecords:
    """One run from a records file, requests in intended order."""
    header: RunHeader | None = None
    requests: list[RequestRecord] = []
    samples: list[EngineSample] = []
    for line in read_lines(path):
        if isinstance(line, RequestRecord):
            requests.append(line)
        elif isinstance(line, EngineSample):
            samples.append(line)
        else:
            header = line
    if header is None:
        raise UsageError(f"{path}: no `run` line: this is not a records file")
    requests.sort(key=lambda record: record.intended_ns)
    samples.sort(key=lambda sample: sample.at_ns)
    return RunRecords(header=header, requests=requests, samples=samples)


def stitch(parts: Sequence[RunRecords], starts_s: Sequence[float]) -> RunRecords:
    """One run from stretches that were run apart, each put at its start in seconds.

    The engine's counters are made to continue from one stretch to the next, whatever else the engine did in between.
    """
    phases: list[PhaseBounds] = []
    requests: list[RequestRecord] = []
    samples: list[EngineSample] = []
    for part, start_s in zip(parts, starts_s, strict=True):
        shift_ns = int(start_s * 1e9)
        phases += [PhaseBounds(p.name, p.from_s + start_s, p.to_s + start_s) for p in part.header.phases]
        first_index = len(requests)
        requests += [_shifted(record, shift_ns, first_index) for record in part.requests]
        samples += _continued(part.samples, samples[-1] if samples else None, shift_ns)
    return RunRecords(msgspec.structs.replace(parts[0].header, phases=phases), requests, samples)


def _shifted(record: RequestRecord, shift_ns: int, first_index: int) -> RequestRecord:
    return msgspec.structs.replace(
        record,
        index=record.index + first_index,
        intended_ns=record.intended_ns + shift_ns,
        sent_ns=record.sent_ns if record.sent_ns < 0 else record.sent_ns + shift_ns,
        first_token_ns=record.first_token_ns if record.first_token_ns < 0 else record.first_token_ns + shift_ns,
        done_ns=record.done_ns + shift_ns,
    )


def _continued(samples: Sequence[EngineSample], last: EngineSample | None, shift_ns: int) -> list[EngineSample]:
    offsets: dict[str, float] = {}
    if samples:
        for name in ("busy_s", "steps", "batch_seqs", "generated_tokens"):
            was = getattr(last, name, None)
            begins = getattr(samples[0], name)
            offsets[name] = 0.0 if was is None or begins is None else was - begins
    return [
        msgspec.structs.replace(
            sample,
            at_ns=sample.at_ns + shift_ns,
            **{name: None if (value := getattr(sample, name)) is None else value + by for name, by in offsets.items()},
        )
        for sample in samples
    ]
