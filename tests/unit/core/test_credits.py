"""Prepaid tokens: every one that was leased is held, spent or left, and none is spent that was not leased."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.events import Finished
from forebay.core.instant import FOREVER, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Usage
from forebay.core.outcome import ShedReason
from forebay.core.pool import PoolConfig
from forebay.core.quota.credits import CreditLine
from forebay.core.quota.path import FRAME_EVENTS, TOP_UP_NS
from forebay.core.quota.terms import KeyLimits, KeyTerms

SETTINGS = settings(max_examples=100, derandomize=True, deadline=None, database=None)
POOL = PoolConfig(name="p", engines=("e",), limit=FixedConfig(limit=500))
PREPAID = {"k": KeyTerms(prepaid=True)}


@SETTINGS
@given(
    st.lists(
        st.tuples(st.sampled_from(["lease", "hold", "end", "back", "cover"]), st.integers(0, 500), st.integers(0, 700))
    )
)
def test_every_token_is_in_one_place(steps: list[tuple[str, int, int]]) -> None:
    line, leased, returned, used, open_holds = CreditLine(), 0, 0, 0, []
    for what, tokens, really in steps:
        if what == "lease":
            line.lease(tokens)
            leased += tokens
        elif what == "hold" and tokens <= line.left:
            line.hold(tokens)
            open_holds.append(tokens)
        elif what == "end" and open_holds:
            line.capture(open_holds.pop(), really)
            used += really
        elif what == "back":
            returned += line.give_back()
        elif what == "cover":
            beyond = line.beyond
            line.cover(tokens)
            leased += min(tokens, beyond)
            assert line.beyond == beyond - min(tokens, beyond)
        assert line.leased == leased - returned == line.held + line.spent + line.left
        assert line.spent <= line.leased
        assert line.spent + line.owed == used
        assert not (line.owed and line.left), "what is owed is paid first"


@pytest.mark.parametrize("hears_first", [True, False])
def test_what_the_account_paid_beyond_a_lease_is_not_paid_again(hears_first: bool) -> None:
    """Whether it hears of that before or after the next lease: then all of that lease can be spent, or given back."""
    line = CreditLine()
    line.lease(100)
    line.hold(90)
    line.capture(90, 130)
    assert (line.spent, line.owed, line.left) == (100, 30, 0)
    line.cover(30) if hears_first else line.lease(50)
    line.lease(50) if hears_first else line.cover(30)
    assert (line.spent, line.owed, line.left) == (130, 0, 50)
    line.cover(30)
    assert line.left == 50, "it was owed once"
    assert line.give_back() == 50


def test_a_key_spends_what_was_leased_and_then_is_refused(bench: Any, leases: Any, refusals: Any) -> None:
    b = bench(POOL, keys=PREPAID)
    assert [r.reason for r in refusals(b.offer(tokens=10))] == [ShedReason.KEY_CREDITS], "nothing is leased yet"
    b.pipeline.quota.lease_credit("k", 100)
    (first,) = leases(b.offer(tokens=60))
    (refused,) = refusals(b.offer(tokens=60))
    assert (refused.reason, refused.actual, refused.limit) == (ShedReason.KEY_CREDITS, 60, 40)
    assert refused.retry_after_ns is not None, "more may be leased"
    b.report(Finished(first, Usage(20, 10)))
    credit = b.pipeline.budget("k").credit
    assert (credit.leased, credit.held, credit.spent, credit.left) == (100, 0, 30, 70)
    assert leases(b.offer(tokens=60))
    b.pipeline.quota.lease_credit("k", 0, last=True)
    (last,) = refusals(b.offer(tokens=60))
    assert last.retry_after_ns is None, "there is no more"
    assert b.pipeline.quota.return_credit("k") == 10
    with pytest.raises(KeyError):
        b.pipeline.quota.lease_credit("other", 5)


def test_a_request_without_a_cap_holds_no_more_than_is_left(bench: Any, leases: Any) -> None:
    b = bench(POOL, keys=PREPAID)
    b.pipeline.quota.lease_credit("k", 50)
    (lease,) = leases(b.offer(tokens=20, generates=True, stream=True))
    assert lease.ticket.paid_output == 30
    assert b.pipeline.budget("k").credit.left == 0


def test_a_stream_that_outruns_its_credit_waits_for_more_or_ends(bench: Any, leases: Any) -> None:
    b = bench(POOL, keys=PREPAID)
    b.pipeline.quota.lease_credit("k", 50)
    (lease,) = leases(b.offer(tokens=20, generates=True, stream=True))
    lease.generated = 30 + FRAME_EVENTS
    assert b.pipeline.meter(lease, 1) == 0, "all is paid for"
    lease.generated += 5
    assert b.pipeline.meter(lease, 2) == TOP_UP_NS, "the next lease may be on its way"
    b.pipeline.quota.lease_credit("k", 100)
    lease.generated += 5
    assert b.pipeline.meter(lease, 3) == 0
    b.pipeline.quota.lease_credit("k", 0, last=True)
    lease.generated += 200
    assert b.pipeline.meter(lease, 4) == FOREVER
    b.report(Finished(lease, Usage(20, 240)))
    credit = b.pipeline.budget("k").credit
    assert (credit.spent, credit.owed, credit.left) == (150, 110, 0)


def test_credit_comes_before_the_limits_that_a_wait_would_end(bench: Any, refusals: Any) -> None:
    b = bench(POOL, keys={"k": KeyTerms(KeyLimits(requests_per_minute=1), prepaid=True)})
    b.pipeline.quota.lease_credit("k", 15, last=True)
    b.offer(tokens=10)
    assert [r.reason for r in refusals(b.offer(tokens=10))] == [ShedReason.KEY_CREDITS]
    assert [r.reason for r in refusals(b.offer(tokens=5))] == [ShedReason.KEY_REQUESTS]
    b.advance(SECOND)
