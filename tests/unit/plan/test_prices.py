"""Prices: which quotes count, how a GPU is spelt, and what is said of bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.plan.prices import PriceBook, card, price_book


def book(tmp_path: Path, text: str, **options: object) -> PriceBook:
    file = tmp_path / "p.csv"
    file.write_text(text, encoding="utf-8")
    return price_book(file, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["H100-SXM-80G", "H100-80G-SXM", "h100_80gb", "NVIDIA-H100-SXM5-80GB"])
def test_one_card_has_many_spellings(name: str) -> None:
    assert card(name) == "h100-80g"


def test_another_form_factor_is_another_card() -> None:
    assert card("H100-PCIe-80G") != card("H100-SXM-80G")


def test_the_price_is_the_median_of_each_providers_newest_current_quote(tmp_path: Path) -> None:
    rows = [
        "gpu,provider,usd_per_hour,basis,as_of",
        "H100-SXM-80G,A,9.00,on-demand,2026-01",  # superseded by A's own of May
        "H100-80G,A,2.00,on-demand,2026-05-02",
        "H100-80G,B,3.00,marketplace,2026-04",
        "H100-80G,C,4.00,on-demand,2026-Q1",
        "H100-80G,D,1.00,reservation,2026-05",  # not to be had by the hour
        "H100-80G,E,1.00,on-demand,2024-12",  # more than a year before the newest
    ]
    price = book(tmp_path, "\n".join(rows)).price("h100-80g")
    assert price is not None
    assert (price.usd_per_hour, price.low, price.high, price.quotes) == (3.0, 2.0, 4.0, 3)
    assert price.as_of == "2026-Q1 to 2026-05-02"


def test_a_price_that_was_given_goes_before_every_quote(tmp_path: Path) -> None:
    prices = book(tmp_path, "gpu,usd_per_hour\nh100-80g,3\n", given=["h100=1.5", "L4-24G=0.2"])
    price = prices.price("h100-80g")
    assert price is not None
    assert (price.usd_per_hour, price.basis) == (1.5, "given with --price")
    assert prices.price("l4-24g") is not None
    assert prices.price("t4-16g") is None


def test_one_providers_quotes_alone(tmp_path: Path) -> None:
    text = "gpu,provider,usd_per_hour\nl4,RunPod,1\nl4,AWS g6,3\nh100,AWS p5,9\n"
    price = book(tmp_path, text, provider="aws").price("l4")
    assert price is not None
    assert price.usd_per_hour == 3
    assert book(tmp_path, text, provider="runpod").price("h100") is None


def test_the_shipped_quotes_price_every_llm_card() -> None:
    prices = price_book()
    for gpu in ("a100-80g", "h100-80g", "h200-141g", "l40s-48g", "l4-24g", "a10g-24g"):
        price = prices.price(gpu)
        assert price is not None
        assert price.as_of >= "2026"
        assert price.low <= price.usd_per_hour <= price.high


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("provider,usd_per_hour\nA,3\n", "line 1: no column `gpu`"),
        ("gpu,usd_per_hour\nh100,free\n", "line 2, usd_per_hour: 'free' is no amount"),
        ("gpu,usd_per_hour\nh100,3\nl4,-1\n", "line 3, usd_per_hour: a price must be above 0"),
        ("gpu,usd_per_hour\nh100,nan\n", "line 2, usd_per_hour: a price must be above 0"),
        ("gpu,usd_per_hour\nh100,20000\n", "is it a node's price?"),
        ("gpu,usd_per_hour,as_of\nh100,3,yesterday\n", "line 2, as_of: 'yesterday' is no date"),
        ("gpu,usd_per_hour,as_of\nh100,3,2026-13\n", "as_of: '2026-13' is no date"),
        ("gpu,usd_per_hour,basis\nh100,3,stolen\n", "line 2, basis: 'stolen' is none of"),
        ("gpu,usd_per_hour\n,3\n", "line 2, gpu: it is empty"),
        ("gpu,usd_per_hour\n", "there is no price in it"),
        ("", "no column `gpu` (found: nothing)"),
        ('gpu,usd_per_hour\n"h100,3\n', "unexpected end of data"),
    ],
)
def test_a_bad_file_is_refused_with_line_and_field(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=r"p\.csv") as error:
        book(tmp_path, text)
    assert says in str(error.value)


@pytest.mark.parametrize("given", ["h100", "=3", "h100=", "h100=0", "h100=1e9", "h100=inf"])
def test_a_bad_price_flag_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="--price"):
        price_book(given=[given])


def test_a_file_that_cannot_be_read_and_a_provider_nobody_quotes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read as prices"):
        price_book(tmp_path / "missing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        price_book(tmp_path / "binary.csv")
    with pytest.raises(UsageError, match=r"there are .*Lambda"):
        price_book(provider="acme")
