"""Built-in policies and files: each is a configuration, sized by the engine and the objective."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.config.load import loads
from forebay.core.model import Mode
from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.profile import EncoderProfile, StepProfile
from forebay.errors import ConfigError, UsageError
from forebay.sim.bounds import FluidBound
from forebay.sim.policies import BATCH_SHARE, BUILT_IN, GUARDED, NONE, Sizing, config_text, policy, sizing

H100 = profile_named("h100-80g/llama-3.1-8b/bf16/tp1/trtllm")
ENCODER = profile_named("a100-40gb/bert-large/fp16/seq128")


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != NONE])
def test_a_built_in_policy_is_a_configuration_of_its_mode(name: str) -> None:
    made = policy(name, Sizing(40, kv_tokens=1000), slo_ms=800.0, tpot_ms=40.0)
    config = loads(made.config, name="text", environment={}).config
    assert config.admission.mode is (Mode.HYBRID if name == GUARDED else Mode(name))
    assert (config.slo.ttft_ms, config.slo.tpot_ms) == (800.0, 40.0)
    concurrency = config.engines[0].concurrency
    if name == GUARDED:
        assert (concurrency.kind, concurrency.kv_tokens) == ("guarded", 1000)
    else:
        assert (concurrency.kind, concurrency.limit) == ("fixed", 40)


def test_none_is_no_gateway() -> None:
    assert not policy(NONE, Sizing(1)).gateway


def test_language_models_run_the_batch_of_the_bound() -> None:
    assert isinstance(H100, StepProfile)
    bound = FluidBound(10.0, 1000.0, 87.6, 40.0, "objective")
    assert sizing(H100, bound) == Sizing(88, kv_tokens=H100.kv_tokens)
    assert sizing(H100, bound, in_flight=7).in_flight == 7
    assert sizing(H100, None).in_flight == H100.max_num_seqs


def test_encoders_get_the_batch_that_leaves_time_for_the_one_before() -> None:
    assert isinstance(ENCODER, EncoderProfile)
    size = sizing(ENCODER, None, latency_ms=30.0)
    assert ENCODER.batch_ms(size.batch) <= 30.0 * BATCH_SHARE < ENCODER.batch_ms(size.batch + 1)
    assert size.in_flight == 1
    assert size.wait_budget_ms == pytest.approx(30.0 * (1 - BATCH_SHARE))
    batching = loads(config_text("hybrid", size), name="text", environment={}).config.engines[0].batching
    assert batching is not None
    assert batching.max_size == size.batch
    assert sizing(ENCODER, None, max_batch=4).batch == 4


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[admission]\nmode = "admission"\n')
    made = policy(str(path), Sizing(1))
    assert (made.name, made.config) == ("mine", path.read_text())
    path.write_text("[admission]\nmod = 1\n")
    with pytest.raises(ConfigError, match=r"mine\.toml:2: \[admission\] mod"):
        policy(str(path), Sizing(1))
    with pytest.raises(UsageError, match=r"'other\.toml' is neither a policy"):
        policy("other.toml", Sizing(1))
