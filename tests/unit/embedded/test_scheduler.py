"""Continuous batching, step by step, with made-up tokens in place of a model."""

from __future__ import annotations

import random

import pytest

from forebay.engines.embedded.scheduler import (
    Event,
    Finished,
    Scheduler,
    Sequence,
    Shown,
    Span,
    WaitingFullError,
    Want,
)

EOS = 99


class Letters:
    """Token 0 is `a`, 1 is `b` …; stops at a letter when told to; holds nothing back but a tail."""

    def __init__(self, stop: str = "", tail: str = "") -> None:
        self._stop, self._tail = stop, tail

    def push(self, token: int) -> tuple[str, bool]:
        letter = chr(ord("a") + token)
        return ("", True) if letter == self._stop else (letter, False)

    def flush(self) -> str:
        return self._tail


def sequence(name: str, prompt: int, max_new: int = 100, text: Letters | None = None, **more: object) -> Sequence:
    return Sequence(name, list(range(prompt)), max_new, text or Letters(), eos=(EOS,), **more)  # type: ignore[arg-type]


def vector(name: str, prompt: int) -> Sequence:
    return Sequence(name, list(range(prompt)), 0, None)


def shape(spans: list[Span]) -> list[tuple[str, int, int, str]]:
    return [(span.sequence.id, span.start, len(span.tokens), span.want.value) for span in spans]


def step(scheduler: Scheduler, token: int = 0) -> list[Event]:
    spans = scheduler.plan()
    tokens = [token for span in spans if span.want is Want.TOKEN]
    vectors = [[float(sum(span.tokens)), 1.0] for span in spans if span.want is Want.VECTOR]
    return scheduler.commit(spans, tokens, vectors)


def test_a_prompt_gives_its_first_token_when_its_last_chunk_is_through() -> None:
    scheduler = Scheduler(2, 64, busy_rows=5, idle_rows=8)
    scheduler.add(sequence("a", 11))
    assert shape(scheduler.plan()) == [("a", 0, 8, "nothing")]
    assert step(scheduler) == []
    assert shape(scheduler.plan()) == [("a", 8, 3, "token")]
    assert step(scheduler) == [Shown("a", "a")]
    assert shape(scheduler.plan()) == [("a", 11, 1, "token")]


def test_generating_goes_on_while_a_long_prompt_is_computed_in_small_chunks() -> None:
    scheduler = Scheduler(2, 64, busy_rows=5, idle_rows=8)
    scheduler.add(sequence("a", 2))
    step(scheduler)
    scheduler.add(sequence("b", 10))
    seen = []
    for _ in range(4):
        seen.append(shape(scheduler.plan()))
        step(scheduler)
    assert seen == [
        [("a", 2, 1, "token"), ("b", 0, 4, "nothing")],
        [("a", 3, 1, "token"), ("b", 4, 4, "nothing")],
        [("a", 4, 1, "token"), ("b", 8, 2, "token")],
        [("a", 5, 1, "token"), ("b", 10, 1, "token")],
    ]


def test_many_answers_leave_prompts_a_quarter_of_the_step() -> None:
    scheduler = Scheduler(8, 64, busy_rows=8, idle_rows=99)
    for name in "abcdefg":
        scheduler.add(sequence(name, 1))
    step(scheduler)
    scheduler.add(sequence("p", 9))
    assert shape(scheduler.plan())[-1] == ("p", 0, 2, "nothing")


def test_short_prompts_share_one_step() -> None:
    scheduler = Scheduler(4, 64, busy_rows=5, idle_rows=8)
    for name in "abc":
        scheduler.add(sequence(name, 3))
    assert shape(scheduler.plan()) == [("a", 0, 3, "token"), ("b", 0, 3, "token"), ("c", 0, 2, "nothing")]


def test_waiting_is_first_come_first_served_and_slots_are_lowest_first() -> None:
    scheduler = Scheduler(2, 64)
    for name in "abcd":
        scheduler.add(sequence(name, 1, max_new=2 if name == "a" else 50))
    step(scheduler)
    assert (scheduler.running, scheduler.waiting) == (2, 2)
    ended = step(scheduler)
    assert Finished("a", "length", 1, 2) in ended
    spans = scheduler.plan()
    assert [(span.sequence.id, span.slot) for span in spans] == [("b", 1), ("c", 0)]
    assert (scheduler.running, scheduler.waiting) == (2, 1)


def test_the_line_is_bounded() -> None:
    scheduler = Scheduler(1, 64, max_waiting=2)
    scheduler.add(sequence("a", 1))
    scheduler.add(sequence("b", 1))
    with pytest.raises(WaitingFullError):
        scheduler.add(sequence("c", 1))


def test_an_end_of_text_token_ends_the_answer_and_is_counted_but_not_shown() -> None:
    scheduler = Scheduler(1, 64)
    scheduler.add(sequence("a", 3, text=Letters(tail="…")))
    step(scheduler, token=1)
    assert step(scheduler, token=EOS) == [Shown("a", "…"), Finished("a", "stop", 3, 2)]
    assert not scheduler.has_work


def test_a_stop_string_ends_the_answer_without_what_was_held_back() -> None:
    scheduler = Scheduler(1, 64)
    scheduler.add(sequence("a", 3, text=Letters(stop="c", tail="never")))
    step(scheduler, token=1)
    assert step(scheduler, token=2) == [Shown("a", ""), Finished("a", "stop", 3, 2)]


def test_the_context_ends_an_answer() -> None:
    scheduler = Scheduler(1, 16)
    scheduler.add(sequence("a", 13, max_new=100, text=Letters(tail="!")))
    events = [event for _ in range(3) for event in step(scheduler)]
    assert events[-2:] == [Shown("a", "a!"), Finished("a", "length", 13, 3)]
    assert not scheduler.has_work


def test_an_abort_frees_the_slot_for_the_next_step() -> None:
    scheduler = Scheduler(1, 64)
    for name in "abc":
        scheduler.add(sequence(name, 2))
    step(scheduler)
    assert scheduler.abort("a")
    assert scheduler.abort("b")
    assert not scheduler.abort("a")
    assert scheduler.cache_usage == 0.0
    assert [(span.sequence.id, span.slot) for span in scheduler.plan()] == [("c", 0)]


def test_a_vector_is_the_mean_over_the_whole_prompt() -> None:
    scheduler = Scheduler(1, 64, idle_rows=4)
    scheduler.add(vector("v", 6))
    assert step(scheduler) == []
    assert step(scheduler) == [Finished("v", "stop", 6, 0, [sum(range(6)) / 6, 2 / 6])]
    assert scheduler.totals.prompt_tokens == 6
    assert scheduler.totals.generated_tokens == 0


def test_the_cache_usage_is_the_written_part() -> None:
    scheduler = Scheduler(2, 50)
    scheduler.add(sequence("a", 10))
    step(scheduler)
    assert scheduler.cache_usage == 10 / 100
    step(scheduler)
    assert scheduler.cache_usage == 11 / 100


def test_every_sequence_ends_once_and_slots_are_never_shared() -> None:
    chance = random.Random(11)
    scheduler = Scheduler(3, 32, busy_rows=5, idle_rows=9)
    ended: dict[str, str] = {}
    added = aborted = 0
    for _ in range(600):
        if added < 80 and chance.random() < 0.4:
            scheduler.add(sequence(f"s{added}", chance.randint(1, 31), chance.randint(1, 12)))
            added += 1
        if chance.random() < 0.1 and scheduler.abort(f"s{chance.randint(0, 79)}"):
            aborted += 1
        spans = scheduler.plan()
        slots = [span.slot for span in spans]
        assert len(slots) == len(set(slots)) <= 3
        assert all(span.start + len(span.tokens) <= 32 for span in spans)
        tokens = [chance.choice((0, 1, EOS)) for span in spans if span.want is Want.TOKEN]
        for event in scheduler.commit(spans, tokens, []):
            if isinstance(event, Finished):
                assert event.id not in ended
                ended[event.id] = event.reason
    assert not scheduler.has_work
    assert len(ended) + aborted == added == 80
