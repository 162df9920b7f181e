"""The limits that an engine tells among its metrics."""

from __future__ import annotations

from forebay.engines.serving.metrics import EngineMetrics
from forebay.load.told import limits_of

VLLM = (
    'vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="56",'
    'kv_cache_size_tokens="7168"} 1.0\n'
)


def test_vllm_tells_its_cache_and_not_its_batch() -> None:
    assert limits_of(VLLM) == (None, 7168)
    assert limits_of(VLLM.replace(',kv_cache_size_tokens="7168"', "")) == (None, 56 * 128)


def test_our_engines_tell_both() -> None:
    text = EngineMetrics("m").text(
        running=0, waiting=0, kv_usage=0.0, max_batch=32, cache_config={"block_size": "1", "num_gpu_blocks": "16384"}
    )
    assert limits_of(text) == (32, 16384)


def test_nonsense_tells_nothing() -> None:
    assert limits_of("") == (None, None)
    assert limits_of('vllm:cache_config_info{block_size="None",num_gpu_blocks="-1"} 1') == (None, None)
