"""The access log: a line per end and refusal, bounded, without secrets, and never in the way."""

from __future__ import annotations

import io
import json
import logging
from random import Random
from threading import Event
from typing import Any

import pytest

from forebay.core.events import EngineUp, Finished, FirstToken
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode, Refusal, Request, Usage
from forebay.core.outcome import ShedReason
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.telemetry.lines import CHUNK_BYTES, CHUNKS_MAX
from forebay.telemetry.log import AccessLog, configure


class Sink(io.BytesIO):
    """A file that waits until it is let go, and fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = Event()
        self.go = Event()
        self.go.set()
        self.fault: OSError | None = None

    def write(self, data: Any) -> int:
        self.entered.set()
        assert self.go.wait(5)
        if self.fault is not None:
            raise self.fault
        return super().write(data)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


def access_log(sink: Sink) -> AccessLog:
    return AccessLog(sink, identify=lambda request: f"id-{request.owner}", wall=lambda: 12.5)


def test_a_completion_and_an_eviction_are_one_line_each() -> None:
    sink = Sink()
    log = access_log(sink)
    pool = PoolConfig("a", ("a/0",), mode=Mode.BACKPRESSURE, limit=FixedConfig(limit=1), hold_ns=50 * MILLISECOND)
    pipeline = Pipeline(PipelineConfig((pool,)), Random(1), log)
    pipeline.report(EngineUp("a/0"), 0)
    (dispatch,) = pipeline.offer(Request(key="team-a", model="m", owner=7, counted_tokens=4), SECOND)
    lease = dispatch.leases[0]  # type: ignore[union-attr]
    pipeline.offer(Request(key="team-b", model="n" * 500, owner=8), SECOND)
    pipeline.poll(SECOND + 50 * MILLISECOND)
    pipeline.report(FirstToken(lease), SECOND + 60 * MILLISECOND)
    pipeline.report(Finished(lease, Usage(4, 9)), SECOND + 90 * MILLISECOND)
    log.close()
    evicted, completed = sink.lines()
    assert completed == {
        "time": 12.5, "id": "id-7", "key": "team-a", "route": "chat", "class": "default", "model": "m",
        "stream": False, "outcome": "completed", "reason": None, "engine": "a/0", "queue_wait_ms": 0.0,
        "duration_ms": 90.0, "ttft_ms": 60.0, "estimated_tokens": 260, "input_tokens": 4, "output_tokens": 9,
    }  # fmt: skip
    assert (evicted["outcome"], evicted["reason"], evicted["engine"]) == ("evicted", "expired", None)
    assert (evicted["queue_wait_ms"], evicted["limit_ms"]) == (50.0, 50.0)
    assert len(evicted["model"]) == 128


def test_a_refusal_says_which_limit_and_what_stood_against_it() -> None:
    sink = Sink()
    log = access_log(sink)
    refusal = Refusal(ShedReason.QUEUE_WAIT, 2 * SECOND, 50, 80, "ms of predicted wait")
    log.shed(Request(key="k", owner=1), refusal, 80 * MILLISECOND)
    log.rejected(401, "invalid_key", "r-1", "no such key")
    log.close()
    shed, rejected = sink.lines()
    assert (shed["outcome"], shed["reason"]) == ("shed", "queue_wait")
    assert (shed["limit"], shed["actual"], shed["unit"]) == (50, 80, "ms of predicted wait")
    assert (shed["retry_after_ms"], shed["predicted_wait_ms"]) == (2000.0, 80.0)
    assert rejected == {
        "time": 12.5, "id": "r-1", "outcome": "rejected", "reason": "invalid_key", "status": 401,
        "detail": "no such key",
    }  # fmt: skip


def test_hostile_names_stay_on_their_line() -> None:
    sink = Sink()
    log = access_log(sink)
    log.shed(Request(key="k", model='x"\n{"outcome":"completed"}'), Refusal(ShedReason.DRAINING, SECOND), 0)
    log.close()
    (line,) = sink.lines()
    assert line["model"] == 'x"\n{"outcome":"completed"}'


def test_a_sink_that_hangs_costs_lines_not_time_and_the_loss_is_told() -> None:
    sink = Sink()
    sink.go.clear()
    log = access_log(sink)
    log.rejected(400, "malformed")
    log.flush()
    assert sink.entered.wait(5)
    chunk = "d" * 100
    while not log.dropped:
        log.rejected(400, "malformed", detail=chunk)
    dropped = log.dropped
    assert log.degraded == f"{dropped} lines of the access log were dropped"
    assert len(log._lines) * 100 < CHUNK_BYTES
    sink.go.set()
    log._chunks.put(b"", timeout=5)
    log.rejected(400, "malformed", detail="after")
    log.close(5)
    lines = sink.lines()
    assert lines[-1] == {"time": 12.5, "dropped_lines": dropped}
    assert lines[-2]["detail"] == "after"
    assert len(sink.getvalue()) < (CHUNKS_MAX + 3) * (CHUNK_BYTES + 1000)


def test_a_sink_that_fails_is_a_stated_degradation_and_may_recover(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    sink.fault = OSError(28, "No space left on device")
    log = access_log(sink)
    log.rejected(400, "malformed")
    log.close()
    assert log.degraded == "the access log cannot be written: [Errno 28] No space left on device"
    assert "cannot be written" in caplog.text


def test_the_log_of_the_process_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger("forebay")
    before = (root.handlers[:], root.level, root.propagate)
    try:
        configure("warning")
        logging.getLogger("forebay.part").info("quiet")
        logging.getLogger("forebay.part").warning("loud %d", 3)
    finally:
        root.handlers[:], root.level, root.propagate = before
    text = capsys.readouterr().err
    assert "WARNING forebay.part: loud 3" in text
    assert "quiet" not in text
