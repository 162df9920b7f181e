"""Which settings may change while the gateway runs, and which differences between two configurations may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from forebay.config.schema import Config
from forebay.config.secret import Secret

LIVE = frozenset({"slo", "admission", "queue", "tuner", "limits", "classes", "teams", "keys", "responses", "estimate"})
"""Sections that a reload swaps whole."""

LIVE_OF_AN_ENGINE = frozenset({"balance", "prefix_bytes", "slow_start_s", "shadow"})
LIVE_OF_CONCURRENCY = frozenset({"kind", "limit", "least", "most", "tokens", "kv_tokens", "signal", "shadow"})
"""Of [[engines]] concurrency."""


def needs_restart(old: Config, new: Config) -> list[str]:
    """The settings, as `[section] field`, that differ and cannot change in a running gateway; empty when none do."""
    before, after = _plain(old), _plain(new)
    return [_spelt(path) for path in _differences(before, after, ()) if not _is_live(path)]


def _plain(config: Config) -> Any:
    return msgspec.to_builtins(config, enc_hook=lambda value: value.digest() if isinstance(value, Secret) else value)


def _differences(old: Any, new: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for name in old:
            yield from _differences(old[name], new[name], (*path, name))
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _differences(one, other, (*path, str(number)))
    else:
        yield path


def _is_live(path: tuple[str, ...]) -> bool:
    if path[0] in LIVE:
        return path[:2] != ("keys", "store")
    if path[0] == "gpu":
        return path[1:2] == ("memory_high",)
    if path[0] != "engines":
        return False
    if path[2:3] == ("concurrency",):
        return path[3:4] != () and path[3] in LIVE_OF_CONCURRENCY
    return path[2:3] != () and path[2] in LIVE_OF_AN_ENGINE


def _spelt(path: tuple[str, ...]) -> str:
    return f"[{path[0]}] {'.'.join(path[1:])}".strip()
