"""What an engine tells of itself: its model's length, its batch, its KV cache, its counters."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from forebay.errors import EngineError
from forebay.load.observe import SCRAPE_TIMEOUT_S, get_text
from forebay.load.target import Target
from forebay.report.engine_metrics import engine_sample

_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Told:
    """None for what the engine does not tell."""

    model: str
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    kv_tokens: int | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


def ask(target: Target, metrics: Target | None, model: str | None) -> Told:
    """Asks /v1/models, and /metrics of `metrics` when given.

    Raises EngineError when the target cannot be reached, or has no such model. Must not be called from an event loop.
    """
    return asyncio.run(_ask(target, metrics, model))


def watch(metrics: Target, seconds: float, interval_s: float, on_scrape: Callable[[int], None]) -> list[str]:
    """The text of /metrics, again and again for so long. Raises EngineError as soon as it cannot be had."""
    return asyncio.run(_watch(metrics, seconds, interval_s, on_scrape))


async def _watch(metrics: Target, seconds: float, interval_s: float, on_scrape: Callable[[int], None]) -> list[str]:
    texts: list[str] = []
    end = time.monotonic() + seconds
    while True:
        texts.append(await _metrics(metrics))
        on_scrape(len(texts))
        if time.monotonic() + interval_s > end:
            return texts
        await asyncio.sleep(interval_s)


async def _ask(target: Target, metrics: Target | None, model: str | None) -> Told:
    models = await _models(target)
    found = next((one for one in models if model in (None, one.id)), None)
    if found is None:
        names = ", ".join(one.id for one in models) or "none"
        raise EngineError(f"{target.url} does not serve {model or 'a model'}; it lists: {names}")
    seqs, kv_tokens = (None, None) if metrics is None else limits_of(await _metrics(metrics))
    return Told(found.id, found.max_model_len, seqs, kv_tokens)


async def _models(target: Target) -> list[_Model]:
    status, text = await _get(target, "/v1/models")
    try:
        return msgspec.json.decode(text, type=_Models).data
    except msgspec.DecodeError:
        raise EngineError(f"{target.url}/v1/models does not list models (status {status})") from None


async def _metrics(metrics: Target) -> str:
    status, text = await _get(metrics, "/metrics")
    if status != 200:
        raise EngineError(f"{metrics.url}/metrics answers with status {status}")
    return text


async def _get(target: Target, path: str) -> tuple[int, str]:
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            return await get_text(target, path)
    except (OSError, TimeoutError, ValueError) as error:
        raise EngineError(f"{target.url} cannot be reached: {error or 'no answer in time'}") from None


def limits_of(metrics: str) -> tuple[int | None, int | None]:
    """Largest batch and KV tokens, from the text of /metrics; None for what it does not say."""
    batch = engine_sample(metrics, 0).max_batch
    config = _CACHE_CONFIG.search(metrics)
    labels = dict(_LABEL.findall(config.group(1))) if config else {}
    kv_tokens = _whole(labels.get("kv_cache_size_tokens"))
    if kv_tokens is None:
        blocks, size = _whole(labels.get("num_gpu_blocks")), _whole(labels.get("block_size"))
        kv_tokens = blocks * size if blocks and size else None
    return (int(batch) if batch else None), kv_tokens


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and int(text) > 0 else None
