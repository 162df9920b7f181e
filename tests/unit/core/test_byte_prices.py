"""Prices of bytes: bounded, the same for a text however long, and dear where tokenizers are."""

from __future__ import annotations

import base64
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.admission import byte_prices
from forebay.core.admission.byte_prices import LEAST, PRICE_BELOW, PRICE_SCALE, PRICED_BYTES, tokens_per_byte
from forebay.core.model import ByteClass

PROSE = (
    b"Before a request is admitted, the gateway has to know about how many tokens it is, because keys have budgets in "
    b"tokens, the queue waits in tokens, and engines are filled by tokens. "
)
TABLES = (
    byte_prices.ASCII, byte_prices.UTF8, byte_prices.ESCAPED_LATIN, byte_prices.ESCAPED_ALPHABET,
    byte_prices.ESCAPED_INDIC, byte_prices.ESCAPED_WIDE,
)  # fmt: skip


def test_no_table_overflows_the_sum() -> None:
    for table in TABLES:
        assert len(table) == 256
        assert max(table) * byte_prices.SUMMED_BYTES < 65_521


@given(st.binary(max_size=3_000), st.sampled_from(ByteClass))
def test_the_price_is_the_mean_of_the_prices(text: bytes, byte_class: ByteClass) -> None:
    table = byte_prices._TABLES[byte_class]
    mean = sum(table[byte] for byte in text) / PRICE_SCALE / (len(text) or 1) - PRICE_BELOW
    assert tokens_per_byte(text, byte_class) == pytest.approx(max(LEAST[byte_class], mean))


def test_a_long_text_costs_as_its_parts() -> None:
    short = tokens_per_byte(PROSE, ByteClass.ASCII)
    for times in (10, 30, 1_000, 20_000):
        assert tokens_per_byte(PROSE * times, ByteClass.ASCII) == pytest.approx(short, rel=0.05)


def test_of_a_long_text_few_bytes_are_looked_at() -> None:
    """What is priced does not grow with the text, and both halves of it count."""
    noise = base64.b64encode(Random(1).randbytes(300_000))
    mixed = tokens_per_byte(PROSE * 2_400 + noise, ByteClass.ASCII)
    ends = tokens_per_byte(PROSE * 20, ByteClass.ASCII), tokens_per_byte(noise[:PRICED_BYTES], ByteClass.ASCII)
    assert mixed == pytest.approx(sum(ends) / 2, rel=0.1)


def test_noise_is_dearer_than_code_and_code_than_prose() -> None:
    code = b"def f(self, x):\n    if x is None:\n        return self._y[x:0]\n"
    noise = base64.b64encode(Random(1).randbytes(600))
    prices = [tokens_per_byte(text, ByteClass.ASCII) for text in (PROSE, code, noise)]
    assert prices == sorted(prices)
    assert prices[2] > 2 * prices[0]


@pytest.mark.parametrize(
    ("text", "byte_class", "least"),
    [
        ("漢" * 4_000, ByteClass.WIDE, 0.2),  # B-19: 0.6 tokens a character
        ("深度学习模型需要大量数据" * 50, ByteClass.WIDE, 0.2),
        ("🙂" * 4_000, ByteClass.WIDE, 0.25),
        ("7" * 16_000, ByteClass.ASCII, 0.5),
    ],
)
def test_dear_characters_are_not_undersold(text: str, byte_class: ByteClass, least: float) -> None:
    assert tokens_per_byte(text.encode(), byte_class) >= least
