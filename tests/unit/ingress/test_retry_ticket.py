"""Retry tickets: one is good for its key, its pool, its window and once; whatever else is shown holds nothing."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.admission import Admission
from forebay.config.secret import Secret
from forebay.core.instant import SECOND
from forebay.ingress.http import retry_ticket
from forebay.ingress.http.retry_ticket import (
    LENGTH,
    OLD_SECRET_MS,
    RetryTickets,
    Shown,
    ShownTicket,
    configured,
    pool_tag,
)

SECRET = "s" * 32
AT_MS = 1_790_000_000_000


class Clock:
    """Milliseconds since 1970."""

    def __init__(self) -> None:
        self.ms = AT_MS

    def __call__(self) -> int:
        return self.ms


def made(secret: str | None = SECRET) -> tuple[RetryTickets, Clock]:
    clock = Clock()
    return RetryTickets(secret, clock), clock


def shown(tickets: RetryTickets, ticket: bytes, key: str = "k", pool: str = "p") -> str:
    """What comes of a ticket, as it is counted."""
    before = dict(tickets.counts)
    held = ShownTicket(ticket).holds(tickets, key, pool)
    (result,) = [name for name, count in tickets.counts.items() if count != before[name]]
    assert held is (result == Shown.HELD)
    return result


def test_one_that_comes_when_it_was_told_holds_its_place() -> None:
    tickets, clock = made()
    ticket = tickets.issue("k", "p", 7 * SECOND)
    assert len(ticket) == LENGTH == 48
    clock.ms += 7_000
    assert shown(tickets, ticket) == Shown.HELD
    assert tickets.counts[Shown.ISSUED] == 1


@pytest.mark.parametrize(
    ("at_ms", "result"),
    [(5_999, Shown.EARLY), (6_000, Shown.HELD), (12_000, Shown.HELD), (12_001, Shown.LATE), (-9, Shown.EARLY)],
)
def test_its_window_is_a_second_before_to_five_after(at_ms: int, result: Shown) -> None:
    tickets, clock = made()
    ticket = tickets.issue("k", "p", 7 * SECOND)
    clock.ms += at_ms
    assert shown(tickets, ticket) == result


def test_one_that_came_too_early_is_still_good_in_time() -> None:
    tickets, clock = made()
    ticket = tickets.issue("k", "p", 7 * SECOND)
    assert shown(tickets, ticket) == Shown.EARLY
    clock.ms += 7_000
    assert shown(tickets, ticket) == Shown.HELD


def test_it_is_good_once_in_all_of_its_window() -> None:
    tickets, clock = made()
    ticket = tickets.issue("k", "p", SECOND)
    assert shown(tickets, ticket) == Shown.HELD
    for _ in range(6):
        assert shown(tickets, ticket) == Shown.USED
        clock.ms += 1_000
    assert shown(tickets, ticket) == Shown.USED, "to the last millisecond"
    clock.ms += 1
    assert shown(tickets, ticket) == Shown.LATE


def test_it_is_worth_nothing_with_another_key_pool_or_secret() -> None:
    tickets, _ = made()
    ticket = tickets.issue("k", "p", SECOND)
    assert shown(tickets, ticket, key="other") == Shown.FOREIGN
    assert shown(tickets, ticket, key="kp") == Shown.FOREIGN
    other, _ = made("another secret, and as long as any")
    assert shown(other, ticket) == Shown.FOREIGN
    assert shown(tickets, ticket) == Shown.HELD, "none of that used it up"
    of_other_pool = tickets.issue("k", "p", SECOND)
    assert shown(tickets, of_other_pool, pool="q") == Shown.FOREIGN


def test_gateways_with_one_secret_take_each_others_and_without_one_nobody_elses() -> None:
    (one, _), (other, _) = made(), made()
    assert shown(other, one.issue("k", "p", SECOND)) == Shown.HELD
    (alone, _), (too, _) = made(None), made(None)
    assert shown(too, alone.issue("k", "p", SECOND)) == Shown.FOREIGN
    assert shown(alone, alone.issue("k", "p", SECOND)) == Shown.HELD


def test_a_new_secret_signs_at_once_and_the_old_one_counts_until_its_tickets_have_ended() -> None:
    tickets, clock = made()
    before, late = tickets.issue("k", "p", 115 * SECOND), tickets.issue("k", "p", 130 * SECOND)
    tickets.change_secret(SECRET)  # a reload that changes nothing
    tickets.change_secret("another secret, and as long as any")
    others, others_clock = made("another secret, and as long as any")
    others_clock.ms = clock.ms = AT_MS + 115_000
    assert shown(tickets, before) == Shown.HELD
    assert shown(others, tickets.issue("k", "p", SECOND)) == Shown.HELD
    clock.ms = AT_MS + OLD_SECRET_MS
    assert shown(tickets, late) == Shown.FOREIGN


@given(st.binary(max_size=80) | st.binary(min_size=LENGTH, max_size=LENGTH))
def test_garbage_is_ignored(ticket: bytes) -> None:
    tickets, _ = made()
    assert shown(tickets, ticket) in {Shown.MALFORMED, Shown.FOREIGN}


@given(st.integers(0, LENGTH - 1), st.sampled_from(b"ABab09-_"))
def test_no_character_of_it_can_be_changed(at: int, character: int) -> None:
    tickets, _ = made()
    ticket = tickets.issue("k", "p", SECOND)
    forged = ticket[:at] + bytes([character]) + ticket[at + 1 :]
    expected = {Shown.HELD} if forged == ticket else {Shown.FOREIGN}
    assert shown(tickets, forged) in expected


@pytest.mark.parametrize("size", [0, 47, 49, 64 * 1024])
def test_one_of_another_length_is_not_even_decoded(size: int) -> None:
    tickets, _ = made()
    assert shown(tickets, b"A" * size) == Shown.MALFORMED


def test_one_spelt_in_the_other_alphabet_is_the_same() -> None:
    """Whoever writes + and / for - and _ shows the same ticket, which is used up all the same."""
    tickets, _ = made()
    ticket = tickets.issue("k", "p", SECOND)
    other = ticket.translate(bytes.maketrans(b"-_", b"+/"))
    assert shown(tickets, ticket) == Shown.HELD
    assert shown(tickets, other) == Shown.USED


def test_a_version_that_is_not_known_is_foreign() -> None:
    tickets, _ = made()
    token = bytearray(urlsafe_b64decode(tickets.issue("k", "p", SECOND)))
    token[0] += 1
    assert shown(tickets, urlsafe_b64encode(bytes(token))) == Shown.FOREIGN


def test_what_is_remembered_is_bounded_and_empties_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_ticket, "USED_MAX", 50)
    tickets, clock = made()
    for _ in range(50):
        assert shown(tickets, tickets.issue("k", "p", SECOND)) == Shown.HELD
    spare = tickets.issue("k", "p", 12 * SECOND)
    assert shown(tickets, tickets.issue("k", "p", SECOND)) == Shown.CROWDED, "none is taken that is not remembered"
    clock.ms += 12_000
    assert shown(tickets, spare) == Shown.HELD
    clock.ms += 12_001
    assert shown(tickets, tickets.issue("k", "p", SECOND)) == Shown.HELD
    assert len(tickets._used) + len(tickets._used_before) <= 2


@given(st.lists(st.integers(0, 9_000), max_size=60))
def test_no_ticket_is_ever_taken_twice(pauses: list[int]) -> None:
    tickets, clock = made()
    issued = [tickets.issue("k", "p", after * SECOND) for after in range(0, 60, 3)]
    held: list[bytes] = []
    for pause in pauses:
        clock.ms += pause
        held += [ticket for ticket in issued if shown(tickets, ticket) == Shown.HELD]
    assert len(held) == len(set(held))


def test_a_request_that_is_judged_twice_shows_its_ticket_once() -> None:
    tickets, _ = made()
    ticket = ShownTicket(tickets.issue("k", "p", SECOND))
    assert ticket.holds(tickets, "k", "p"), "before its body is there"
    assert ticket.holds(tickets, "k", "p")
    assert tickets.counts[Shown.HELD] == 1


def test_they_are_as_configured() -> None:
    assert configured(Admission(), None) is None
    on = configured(Admission(retry_tickets=True), None)
    assert on is not None
    assert configured(Admission(retry_tickets=True), on) is on
    assert shown(on, on.issue("k", "p", SECOND)) == Shown.HELD
    ticket = on.issue("k", "p", SECOND)
    same = configured(Admission(retry_tickets=True, retry_ticket_secret=Secret(SECRET)), on)
    assert same is on
    assert shown(on, ticket) == Shown.HELD
    assert shown(on, RetryTickets(SECRET).issue("k", "p", SECOND)) == Shown.HELD
    assert configured(Admission(), on) is None
    assert pool_tag("p") != pool_tag("q")
