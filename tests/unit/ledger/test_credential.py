"""Credentials: their form, and that only the right one is right."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.ledger.credential import CREDENTIAL_CHARACTERS, mint, public_id, verify


def test_a_credential_has_its_form_and_160_bits_of_chance() -> None:
    minted = [mint() for _ in range(100)]
    for each in minted:
        assert re.fullmatch(r"sk-fb-[a-z2-7]{16}-[a-z2-7]{32}", each.credential)
        assert len(each.credential) == CREDENTIAL_CHARACTERS
        assert public_id(each.credential.encode()) == each.public_id
        assert verify(each.credential.encode(), each.verifier)
    assert len({each.credential[-32:] for each in minted}) == len({each.verifier for each in minted}) == 100


def test_what_is_kept_does_not_hold_the_secret() -> None:
    minted = mint()
    assert minted.credential[-32:].encode() not in minted.verifier
    assert len(minted.verifier) == 48


def test_the_same_secret_of_two_keys_is_kept_differently() -> None:
    """Whoever reads the table cannot tell whether two keys are alike, nor use one hash for another key."""
    one, other = mint(), mint()
    forged = f"sk-fb-{other.public_id}-{one.credential[-32:]}".encode()
    assert not verify(forged, other.verifier)


@given(st.integers(0, 31), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_one_wrong_character_is_wrong(place: int, letter: str) -> None:
    minted = mint()
    secret = minted.credential[-32:]
    changed = secret[:place] + letter + secret[place + 1 :]
    credential = minted.credential[:-32] + changed
    assert verify(credential.encode(), minted.verifier) is (changed == secret)


@pytest.mark.parametrize(
    "credential",
    [
        "",
        "sk-fb-",
        "sk-a",
        "sk-fb-" + "a" * 49,
        "sk-fb-aaaaaaaaaaaaaaaa_" + "a" * 32,
        "SK-FB-" + "a" * 16 + "-" + "a" * 32,
        "sk-fb-" + "A" * 16 + "-" + "a" * 32,
        "sk-fb-" + "1" * 16 + "-" + "a" * 32,
        "sk-fb-" + "a" * 16 + "-" + "a" * 31 + "\n",
        "sk-fb-" + "a" * 16 + "-" + "a" * 33,
        " sk-fb-" + "a" * 16 + "-" + "a" * 31,
    ],
)
def test_what_has_another_form_names_no_key(credential: str) -> None:
    assert public_id(credential.encode()) is None
