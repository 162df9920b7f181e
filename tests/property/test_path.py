"""A path spells the arithmetic of its buckets out: it says and does what a bucket asked by itself would."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.instant import SECOND
from forebay.core.model import Usage
from forebay.core.quota.bucket import Bucket
from forebay.core.quota.budget import Quota
from forebay.core.quota.path import Prices
from forebay.core.quota.terms import REQUESTS, KeyLimits, KeyTerms, windows

AMOUNTS = st.none() | st.integers(0, 300)
LIMITS = st.fixed_dictionaries(
    {
        "requests_per_minute": AMOUNTS,
        "tokens_per_minute": AMOUNTS,
        "tokens_per_second": AMOUNTS,
        "burst_s": st.sampled_from([0.0, 0.5, 2.0]),
        "input_tokens_per_minute": AMOUNTS,
        "output_tokens_per_minute": AMOUNTS,
        "weighted_tokens_per_minute": AMOUNTS,
    }
)
TOKENS_EACH_WAY = st.integers(0, 120)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 40 * SECOND),  # time that passes
        TOKENS_EACH_WAY,  # reserved
        TOKENS_EACH_WAY,
        st.none() | st.tuples(TOKENS_EACH_WAY, st.integers(-5, 1_000_000)),  # used
        st.booleans(),  # did it reach an engine?
    ),
    max_size=30,
)


def prices_of(tokens_in: int, tokens_out: int, requests: int = 1) -> Prices:
    return requests, tokens_in + tokens_out, tokens_in, tokens_out, tokens_in + 2 * tokens_out


@settings(max_examples=150)
@given(LIMITS, STEPS)
def test_a_path_is_its_buckets_one_by_one(limits: dict[str, Any], steps: list[Any]) -> None:
    terms = KeyTerms(KeyLimits(**limits))
    path = Quota({"k": terms}, {}).budget("k").path
    alone = [
        Bucket(limit, window_ns, burst, counts=counts) for counts, window_ns, limit, burst in windows(terms.limits)
    ]
    now = 0
    for pause, tokens_in, tokens_out, used, ran in steps:
        now += pause
        prices = prices_of(tokens_in, tokens_out)
        waits = [bucket.wait_ns(prices[bucket.counts], now) for bucket in alone]
        refusal = path.check(prices, SECOND, now)
        assert (refusal is None) == (not any(waits))
        assert path.refusing == (refusal is not None)
        if refusal is None:
            path.charge(prices, now)
            for bucket in alone:
                bucket.charge(prices[bucket.counts], now)
            if not ran:
                used = None
            path.settle(tokens_in, tokens_out, None if used is None else Usage(*used), now, now + pause, ran)
            now += pause
            used_in, used_out = used or (0, 0)
            more = prices_of(used_in - tokens_in, max(0, used_out) - tokens_out, 0 if ran else -1)
            for bucket in alone:
                if bucket.counts != REQUESTS:
                    bucket.settle(more[bucket.counts], now)
                elif not ran:
                    bucket.charge(-1, now)
        requests = [bucket for bucket in alone if bucket.counts == REQUESTS]
        tokens = [bucket for bucket in alone if bucket.counts != REQUESTS]
        rows = path.headers(now)
        assert [row[0] for row in rows] == ["requests"] * bool(requests) + ["tokens"] * bool(tokens)
        for name, limit, remaining, reset_ns in rows:
            kind = requests if name == "requests" else tokens
            assert remaining == min(bucket.remaining(now) for bucket in kind)
            assert (limit, remaining, reset_ns) in [(b.limit, b.remaining(now), b.reset_ns(now)) for b in kind]
