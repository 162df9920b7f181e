"""Requests that come again under the same name: counted per API key, for as long as a return may take, and no more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.instant import SECOND
from forebay.ingress.repeats import LIFE_NS, Repeats


def test_each_time_is_one_more_than_before() -> None:
    repeats = Repeats()
    assert [repeats.count("k", b"one", at) for at in range(3)] == [0, 1, 2]
    assert repeats.count("k", b"two", 3) == 0
    assert repeats.count("other", b"one", 3) == 0, "the names of another API key are its own"


def test_a_name_lives_from_its_last_use() -> None:
    repeats = Repeats()
    assert repeats.count("k", b"one", 0) == 0
    assert repeats.count("k", b"one", LIFE_NS) == 1
    assert repeats.count("k", b"one", 2 * LIFE_NS) == 2
    assert repeats.count("k", b"one", 3 * LIFE_NS + 1) == 0
    assert LIFE_NS > 120 * SECOND, "a caller may be told to come back after two minutes"


def test_the_one_not_used_for_longest_is_forgotten_first() -> None:
    repeats = Repeats(kept=2)
    assert [repeats.count("k", name, 0) for name in (b"a", b"b", b"a", b"c")] == [0, 0, 1, 0]
    assert repeats.count("k", b"a", 0) == 2
    assert repeats.count("k", b"b", 0) == 0


@given(st.lists(st.tuples(st.sampled_from("xy"), st.sampled_from([b"1", b"2", b"3", b"4"])), max_size=60))
def test_never_more_than_were_sent_and_never_more_kept_than_may_be(sent: list[tuple[str, bytes]]) -> None:
    repeats = Repeats(kept=3)
    for number, (key, name) in enumerate(sent):
        assert repeats.count(key, name, number) <= sent[:number].count((key, name))
        assert len(repeats._seen) <= 3
