"""Candidates: matched by model, number format, GPU and price; suggestions for what there is not."""

from __future__ import annotations

import pytest

from forebay.errors import UsageError
from forebay.plan.candidates import candidates, dtype_of, model_of
from forebay.plan.prices import price_book


def test_the_most_exact_number_format_is_taken_unless_another_is_asked_for() -> None:
    exact, _ = candidates(price_book(), model="llama-3.1-70b")
    assert {dtype_of(one.profile) for one in exact} == {"bf16"}
    asked, _ = candidates(price_book(), model="Llama-3.1-70B", dtype="FP8")
    assert {dtype_of(one.profile) for one in asked} == {"fp8"}


def test_a_tensor_parallel_entry_is_one_engine_of_several_gpus() -> None:
    found, _ = candidates(price_book(given=["h100=2"]), model="llama-3.1-70b", dtype="fp8", gpus=["h100"])
    spans = {one.gpus: one.usd_per_hour for one in found}
    assert spans == {2: 4.0, 4: 8.0, 8: 16.0}
    assert {one.name for one in found} == {"2 x h100-80g", "4 x h100-80g", "8 x h100-80g"}


def test_the_cheapest_engine_comes_first() -> None:
    found, _ = candidates(price_book(), model="llama-3.1-8b")
    costs = [one.usd_per_hour for one in found]
    assert costs == sorted(costs)
    assert len(costs) == 6


def test_a_card_without_a_price_is_left_out_and_said() -> None:
    found, notes = candidates(price_book(), model="bert-large/seq128")
    assert "t4-16g" not in {one.gpu for one in found}
    assert any("t4-16g" in note and "--price" in note for note in notes)
    priced, notes = candidates(price_book(given=["t4=0.3", "a30=0.5"]), model="bert-large/seq128")
    assert {"t4-16g", "a30-24g"} <= {one.gpu for one in priced}
    assert not notes


def test_a_part_of_a_name_is_enough_where_it_is_clear() -> None:
    found, _ = candidates(price_book(), model="8b", gpus=["l4", "H2"])
    assert {one.gpu for one in found} == {"l4-24g", "h200-141g"}
    assert {model_of(one.profile) for one in found} == {"llama-3.1-8b"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "lamma-3.1-8b"}, "did you mean llama-3.1-8b"),
        ({"model": "llama"}, "did you mean llama-3.1-70b or llama-3.1-8b?"),
        ({"model": "llama-3.1-8b", "dtype": "int4"}, "calibrated in bf16 and fp8 only"),
        ({"model": "llama-3.1-8b", "gpus": ["h100-80x"]}, "did you mean h100-80g or"),
        ({"model": "llama-3.1-70b", "gpus": ["l4"]}, "there is a100-80g, h100-80g"),
    ],
)
def test_what_there_is_not_is_named_with_what_there_is(options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError) as error:
        candidates(price_book(), **options)  # type: ignore[arg-type]
    assert says in str(error.value)
