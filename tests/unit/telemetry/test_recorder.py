"""The record: a line per request with sizes that say how far they can be trusted, which the importer reads back."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from random import Random

import pytest

from forebay.core.events import EngineUp, Failed, Finished, FirstToken
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Demand, Lease, Mode, Refusal, Request, Usage
from forebay.core.outcome import FailReason, ShedReason
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.errors import ForebayError
from forebay.telemetry.recorder import COLUMNS, HEADER, Recorder, open_record
from forebay.workload.arrival import Arrival
from forebay.workload.trace import load_trace

START_NS = 1_700_000_000 * SECOND


class Rig:
    """A pipeline of one place, in backpressure mode, with a recorder, at an instant that the test sets."""

    def __init__(self) -> None:
        self.now = 5 * SECOND
        self.sink = io.BytesIO()
        self.recorder = Recorder(
            self.sink,
            clock=lambda: self.now,
            estimate=self._estimate,
            unread=lambda request: request.owner == "unread",
            wall_ns=lambda: START_NS + 5 * SECOND,
        )
        pool = PoolConfig("a", ("a/0",), mode=Mode.BACKPRESSURE, limit=FixedConfig(limit=1), hold_ns=50 * MILLISECOND)
        self.pipeline = Pipeline(PipelineConfig((pool,)), Random(1), self.recorder)
        self.pipeline.report(EngineUp("a/0"), 0)

    def _estimate(self, request: Request) -> Demand:
        return self.pipeline.estimator.estimate(request)

    def offer(self, request: Request) -> Lease | None:
        effects = self.pipeline.offer(request, self.now)
        return next((lease for effect in effects for lease in getattr(effect, "leases", ())), None)

    def rows(self) -> list[dict[str, str]]:
        self.recorder.close()
        return list(csv.DictReader(io.StringIO((HEADER + self.sink.getvalue()).decode())))


def test_a_completion_has_the_sizes_that_the_engine_measured() -> None:
    rig = Rig()
    lease = rig.offer(Request(key="team-a", model="m", counted_tokens=40, max_output_tokens=64, stream=True))
    assert lease is not None
    rig.pipeline.report(FirstToken(lease), rig.now + 60 * MILLISECOND)
    rig.pipeline.report(Finished(lease, Usage(42, 9)), rig.now + 90 * MILLISECOND)
    (row,) = rig.rows()
    assert tuple(row) == COLUMNS
    assert row == {
        "arrival_s": "1700000005.000000", "prompt_tokens": "42", "output_tokens": "9", "key_id": "team-a",
        "session_id": "", "sizes": "measured", "outcome": "completed", "reason": "", "queue_wait_ms": "0.000",
        "ttft_ms": "60.000", "latency_ms": "90.000", "model": "m", "route": "chat",
        "estimated_prompt_tokens": "40", "estimated_output_tokens": "64", "max_tokens": "64",
    }  # fmt: skip


def test_every_end_says_how_far_its_sizes_can_be_trusted() -> None:
    rig = Rig()
    lease = rig.offer(Request(key="a", counted_tokens=4))
    assert lease is not None
    rig.offer(Request(key="b", counted_tokens=7, max_output_tokens=20))
    rig.pipeline.poll(rig.now + 50 * MILLISECOND)
    rig.pipeline.report(Finished(lease, Usage(4, 30, exact=False)), rig.now + 60 * MILLISECOND)
    lease = rig.offer(Request(key="c", counted_tokens=5))
    assert lease is not None
    rig.pipeline.cancel(lease.ticket, rig.now + 70 * MILLISECOND, Usage(5, 3))
    lease = rig.offer(Request(key="d", counted_tokens=6, max_output_tokens=8))
    assert lease is not None
    rig.pipeline.report(Failed(lease, FailReason.ENGINE_ERROR), rig.now + 80 * MILLISECOND)
    found = [
        (row["key_id"], row["outcome"], row["reason"], row["sizes"], row["prompt_tokens"], row["output_tokens"])
        for row in rig.rows()
    ]
    assert found == [
        ("b", "evicted", "expired", "estimated", "7", "20"),
        ("a", "completed", "", "counted", "4", "30"),
        ("c", "cancelled", "", "partial", "5", "3"),
        ("d", "failed", "engine_error", "estimated", "6", "8"),
    ]


def test_a_refusal_has_estimates_and_one_before_the_body_was_read_says_so() -> None:
    rig = Rig()
    refusal = Refusal(ShedReason.QUEUE_FULL, SECOND)
    rig.now += 250 * MILLISECOND
    rig.recorder.shed(Request(key="k", text_bytes=4200, body_bytes=4300, max_output_tokens=33), refusal, 0)
    screened = Request(key="k", owner="unread", body_bytes=4264, counted_tokens=1, max_output_tokens=0)
    rig.recorder.shed(screened, refusal, 0)
    read, unread = rig.rows()
    assert (read["sizes"], read["prompt_tokens"], read["output_tokens"], read["max_tokens"]) == (
        *("estimated", "1009", "33", "33"),
    )
    assert (unread["sizes"], unread["prompt_tokens"], unread["output_tokens"], unread["max_tokens"]) == (
        *("unread", "1009", "256", ""),
    )
    assert (read["arrival_s"], read["outcome"], read["reason"]) == ("1700000005.250000", "shed", "queue_full")


def test_a_hostile_model_name_stays_in_its_field() -> None:
    rig = Rig()
    name = 'x",9,9\r\n1.0,1,1,"=cmd()' + "y" * 300
    rig.recorder.shed(Request(key="k", model=name), Refusal(ShedReason.DRAINING, SECOND), 0)
    (row,) = rig.rows()
    assert row["model"].startswith('x",9,9  1.0,1,1,"=cmd()')
    assert len(row["model"]) == 128
    assert row["route"] == "chat"


def test_what_was_recorded_is_a_trace(tmp_path: Path) -> None:
    rig = Rig()
    for number, wait_ms in enumerate((0, 100, 250)):
        rig.now = 5 * SECOND + wait_ms * MILLISECOND
        lease = rig.offer(Request(key=f"k{number}", counted_tokens=10 + number))
        assert lease is not None
        rig.pipeline.report(Finished(lease, Usage(10 + number, 5)), rig.now + 40 * MILLISECOND)
    rig.recorder.close()
    path = tmp_path / "record.csv"
    with open_record(path) as file:
        file.write(rig.sink.getvalue())
    assert load_trace(path) == [
        Arrival(0, "trace", 10, 5, "k0"),
        Arrival(pytest.approx(100 * MILLISECOND, abs=1000), "trace", 11, 5, "k1"),  # type: ignore[arg-type]
        Arrival(pytest.approx(250 * MILLISECOND, abs=1000), "trace", 12, 5, "k2"),  # type: ignore[arg-type]
    ]


# ---- the file ------------------------------------------------------------------------------------------------------


def test_a_record_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "record.csv"
    for line in (b"1,2,3\n", b"4,5,6\n"):
        with open_record(path) as file:
            file.write(line)
    assert path.read_bytes() == HEADER + b"1,2,3\n4,5,6\n"


@pytest.mark.parametrize("cut_short", [b"1,2,3\n4,5,", b"1,2,3\n"])
def test_a_line_that_a_crash_cut_short_is_taken_off(tmp_path: Path, cut_short: bytes) -> None:
    path = tmp_path / "record.csv"
    path.write_bytes(HEADER + cut_short)
    with open_record(path) as file:
        file.write(b"7,8,9\n")
    assert path.read_bytes() == HEADER + b"1,2,3\n7,8,9\n"


@pytest.mark.parametrize("begun", [b"", HEADER[:9]])
def test_a_file_that_was_hardly_begun_gets_its_header(tmp_path: Path, begun: bytes) -> None:
    path = tmp_path / "record.csv"
    path.write_bytes(begun)
    open_record(path).close()
    assert path.read_bytes() == HEADER


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("remember the milk\n")
    with pytest.raises(ForebayError, match=r"record_path .*notes.txt' holds something else"):
        open_record(path)
    assert path.read_text() == "remember the milk\n"
    with pytest.raises(ForebayError, match="cannot be opened: Is a directory"):
        open_record(tmp_path)
