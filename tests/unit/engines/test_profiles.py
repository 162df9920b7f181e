"""The shipped calibration: complete, self-consistent, selectable by name."""

from __future__ import annotations

import pytest

from forebay.engines.simulated.catalog import DEFAULT_PROFILE, profile_named, profiles
from forebay.engines.simulated.encoder import EncoderModel
from forebay.engines.simulated.profile import EncoderProfile, StepProfile
from forebay.errors import UsageError

STEP_PROFILES = [one for one in profiles().values() if isinstance(one, StepProfile)]
ENCODERS = [one for one in profiles().values() if isinstance(one, EncoderProfile)]


def test_all_entries_are_there() -> None:
    assert len(STEP_PROFILES) == 21
    assert len(ENCODERS) == 36
    assert isinstance(profile_named(DEFAULT_PROFILE), StepProfile)


@pytest.mark.parametrize("profile", STEP_PROFILES, ids=lambda one: one.name)
def test_step_times_give_the_rates_that_are_published_with_them(profile: StepProfile) -> None:
    for batch, rate in profile.decode_tokens_per_s.items():
        assert batch / profile.step_ms(batch, batch, batch * 1024, 0.0) * 1e3 == pytest.approx(rate, rel=0.002)
    for size, rate in profile.prefill_tokens_per_s.items():
        assert size / profile.step_ms(size, 1, 0, size * size / 2) * 1e3 == pytest.approx(rate, rel=0.002)


def test_an_encoder_batch_by_hand() -> None:
    # A100-40GB, BERT-base, FP16, sequences of 128: a 0.6387, c 0.12063, p 1.238; measured 4.10 ms at 32.
    profile = profile_named("a100-40gb/bert-base/fp16/seq128")
    assert isinstance(profile, EncoderProfile)
    assert profile.batch_ms(32) == pytest.approx(4.21, rel=0.005)
    assert profile.batch_ms(32) == pytest.approx(4.10, rel=0.063)  # the worst error of this fit


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    with pytest.raises(UsageError, match=r"h100-80g/llama-3\.1-8b/bf16/tp1/trtllm"):
        profile_named("h100-80g/llama-3.1-8b")
    with pytest.raises(UsageError, match="--list-profiles"):
        profile_named("zzz")


def test_encoder_batches_run_one_at_a_time_in_order() -> None:
    profile = profile_named("a100-40gb/bert-base/fp16/seq128")
    assert isinstance(profile, EncoderProfile)
    model = EncoderModel(profile, max_batch=64)
    model.submit("a", 32, 0)
    model.submit("b", 1, 0)
    model.submit("c", 8, 0)
    first = model.step(0)
    assert first is not None
    assert (first.id, first.size, model.num_waiting) == ("a", 32, 9)
    assert first.duration_ns == round(profile.batch_ms(32) * 1e6)
    assert model.abort("b", 1)
    assert not model.abort("a", 1)  # a batch under way cannot be stopped
    second = model.step(first.duration_ns)
    assert second is not None
    assert (second.id, model.num_waiting) == ("c", 0)
    assert model.step(first.duration_ns + second.duration_ns) is None


@pytest.mark.parametrize("size", [0, 65])
def test_an_encoder_refuses_batches_that_it_cannot_hold(size: int) -> None:
    profile = profile_named("a100-40gb/bert-base/fp16/seq128")
    assert isinstance(profile, EncoderProfile)
    with pytest.raises(ValueError, match="most allowed is 64"):
        EncoderModel(profile, max_batch=64).submit("a", size, 0)
