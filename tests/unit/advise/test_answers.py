"""Answers that cannot hold together are told so, with what to change."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.advise.answers import Answers, check
from forebay.errors import UsageError


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"clients": "offline", "ttft_ms": 200.0}, "offline work and a time to first token of 200 ms"),
        ({"clients": "offline", "tpot_ms": 30.0}, "nobody reads along"),
        ({"clients": "public", "may_drop": False}, "public clients and 'nothing may be dropped'"),
        ({"clients": "realtime", "ttft_ms": 500.0, "may_drop": False}, "'nothing may be dropped' and 500 ms"),
        ({"clients": "public", "bounded": True}, "not a bounded number of senders"),
        ({"clients": "internal", "engine": "encoder", "output_tokens": 5}, "no tokens one by one"),
        ({"clients": "internal", "engine": "embedded", "upstreams": ("http://h:1",)}, "has no URL"),
    ],
)
def test_contradictions_are_named_with_a_way_out(answers: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(Answers(**answers))
    assert says in str(caught.value)
    assert "--" in str(caught.value)


def test_every_contradiction_is_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        check(Answers(clients="public", may_drop=False, bounded=True))
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    "answers",
    [
        Answers(clients="offline", ttft_ms=60_000.0),
        Answers(clients="internal", ttft_ms=500.0, may_drop=False, bounded=True),
        Answers(clients="internal", ttft_ms=3000.0, may_drop=False),
        Answers(clients="public", may_drop=True),
    ],
)
def test_what_can_hold_together_is_taken(answers: Answers) -> None:
    check(answers)


def test_urls_stand_in_for_replicas_and_count_them() -> None:
    assert Answers(clients="public", replicas=2).urls == ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
    assert Answers(clients="public", upstreams=("http://a:1", "http://b:1", "http://c:1")).replicas == 3
    assert Answers(clients="public", engine="embedded").urls == ()
