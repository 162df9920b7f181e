"""Fault injection on a manual clock."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from forebay.engines.simulated.faults import FaultInjector, Faults, faults_endpoint


def injector(**faults: object) -> FaultInjector:
    return FaultInjector(msgspec.convert(faults, Faults), Random(1), now=100.0)


def test_healthy_by_default() -> None:
    healthy = injector()
    assert healthy.ready(100.0)
    assert healthy.stalled_until(100.0) is None
    assert {healthy.verdict(100.0) for _ in range(50)} == {"serve"}
    assert healthy.reported(10, 3) == (10, 3)
    assert not healthy.crash_due


def test_a_cold_start_ends_by_itself() -> None:
    cold = injector(cold_start_s=5)
    assert not cold.ready(104.9)
    assert cold.ready(105.0)


def test_error_and_hang_rates_are_shares_of_requests() -> None:
    some = injector(error_rate=0.3, hang_rate=0.1)
    verdicts = [some.verdict(100.0) for _ in range(5000)]
    assert verdicts.count("hang") / 5000 == pytest.approx(0.1, abs=0.02)
    assert verdicts.count("error") / 5000 == pytest.approx(0.9 * 0.3, abs=0.02)


def test_a_stall_begins_at_once_or_with_a_request() -> None:
    assert injector(stall_s=2).stalled_until(101.0) == 102.0
    later = injector(stall_s=2, stall_after=2)
    later.verdict(103.0)
    assert later.stalled_until(103.0) is None
    later.verdict(104.0)
    assert later.stalled_until(104.0) == 106.0
    assert later.stalled_until(106.0) is None


def test_the_crash_is_due_after_so_many_requests_from_when_it_is_set() -> None:
    doomed = injector()
    doomed.verdict(100.0)
    doomed.apply({"crash_after": 2}, 101.0)
    doomed.verdict(101.0)
    assert not doomed.crash_due
    doomed.verdict(101.0)
    assert doomed.crash_due


def test_usage_can_lie_or_be_missing() -> None:
    assert injector(usage_factor=2.5).reported(10, 4) == (25, 10)
    assert injector(omit_usage=True).reported(10, 4)[0] < 0


def test_the_endpoint_shows_changes_and_heals() -> None:
    target = injector()
    status, body = faults_endpoint(target, "POST", b'{"error_rate": 1, "error_status": 503}', 100.0)
    assert status == 200
    assert msgspec.json.decode(body)["error_status"] == 503
    assert target.verdict(100.0) == "error"
    faults_endpoint(target, "POST", b'{"stall_s": 9}', 100.0)
    assert target.faults.error_rate == 1  # what is not named stays
    assert target.stalled_until(101.0) == 109.0
    assert faults_endpoint(target, "GET", b"", 100.0) == (200, msgspec.json.encode(target.faults))
    faults_endpoint(target, "DELETE", b"", 101.0)
    assert target.faults == Faults()
    assert target.stalled_until(101.0) is None


@pytest.mark.parametrize("body", [b"", b"[]", b'{"eror_rate": 1}', b'{"error_rate": 2}', b'{"error_status": 200}'])
def test_the_endpoint_refuses_what_no_setting_can_be(body: bytes) -> None:
    target = injector(error_rate=0.5)
    status, answer = faults_endpoint(target, "POST", body, 100.0)
    assert status == 400
    assert b"error" in answer
    assert target.faults == Faults(error_rate=0.5)
