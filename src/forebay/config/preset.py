"""Defaults for kinds of use. They lie beneath everything that a file, the environment or a flag sets."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # Both ends are ours and there are few clients: making them wait costs nobody work.
    "internal": {"admission": {"mode": "backpressure"}, "queue": {"held_limit": 1000}},
    # Strangers, bursts and retries: a place now or an honest refusal, and no caller takes it all.
    "public-api": {
        "admission": {"mode": "admission"},
        "limits": {"default": {"requests_per_minute": 60, "concurrency": 8}},
    },
    # Capacity is sold: every caller has a key with limits of its own.
    "b2b": {"admission": {"mode": "admission"}, "keys": {"anonymous": False}},
    # Nobody watches: wait as long as it takes.
    "offline": {"admission": {"mode": "backpressure"}, "slo": {"ttft_ms": 60_000}, "queue": {"deadline_s": 3600}},
    # A person watches: a short wait smooths bursts, a long one is worse than a refusal.
    "realtime": {"admission": {"mode": "hybrid"}, "slo": {"ttft_ms": 500}},
}
