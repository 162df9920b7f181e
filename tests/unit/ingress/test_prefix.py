"""How a body begins, as a number."""

from __future__ import annotations

from random import Random
from typing import Any

from forebay.core.dispatch.balance import AffinityConfig, LeastConfig
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.ingress.http.prefix import prefix_of


class Nobody:
    """Observes nothing."""

    def closed(self, ticket: Any) -> None: ...

    def shed(self, request: Any, refusal: Any, predicted_wait_ns: int) -> None: ...


def pipeline(*balances: Any) -> Pipeline:
    pools = tuple(
        PoolConfig(name=f"p{number}", engines=(f"{number}/0", f"{number}/1"), models=(f"m{number}",), balance=balance)
        for number, balance in enumerate(balances)
    )
    return Pipeline(PipelineConfig(pools), Random(1), Nobody())


def test_equal_beginnings_have_equal_numbers_whatever_follows() -> None:
    made = pipeline(AffinityConfig(prefix_bytes=64))
    begin = b"x" * 64
    one, other = prefix_of(made, "m0", begin + b"one"), prefix_of(made, "m0", begin + b"another")
    assert one == other
    assert 0 < one < 1 << 64
    assert prefix_of(made, "m0", b"y" + begin) != one


def test_the_number_is_the_same_on_every_gateway_and_in_every_process() -> None:
    assert prefix_of(pipeline(AffinityConfig(prefix_bytes=64)), "m0", b"a" * 70) == 0x6C0D1ADD0FA4B6E4


def test_what_is_too_short_or_not_asked_for_has_none() -> None:
    made = pipeline(AffinityConfig(prefix_bytes=64), LeastConfig())
    assert made.asks_prefixes
    assert prefix_of(made, "m0", b"x" * 63) == 0
    assert prefix_of(made, "m1", b"x" * 640) == 0
    assert prefix_of(made, "nobody serves it", b"x" * 640) == 0
    assert not pipeline(LeastConfig()).asks_prefixes
