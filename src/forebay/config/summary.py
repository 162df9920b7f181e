"""What follows from a configuration: the figures that `config check` prints and /api/v1/status shows. No secrets."""

from __future__ import annotations

from typing import Any

import msgspec

from forebay.config.build import engine_names, floor_shares, initial_limit, limit_kind
from forebay.config.schema import Config, depth_limit, tuner_kind, wait_budget_ms
from forebay.config.secret import Secret


def derived(config: Config) -> dict[str, Any]:
    """Plain data for a person: effective settings and the figures that derive from others."""
    classes, floors = config.classes, dict(floor_shares(config))
    return {
        "mode": config.admission.mode.value,
        "preset": config.admission.preset,
        "wait_budget_ms": wait_budget_ms(config),
        "ttft_ms": config.slo.ttft_ms,
        "tpot_ms": min([config.slo.tpot_ms, *(group.tpot_ms for group in classes.values() if group.tpot_ms)]),
        "latency_ms": config.slo.latency_ms or config.slo.ttft_ms,
        "fair_share": config.admission.fair_share,
        "retry_tickets": config.admission.retry_tickets,
        "depth_limit": depth_limit(config),
        "tuner": tuner_kind(config),
        "deadline_s": config.queue.deadline_s,
        "data_port": f"{config.server.host}:{config.server.port}",
        "admin_port": f"{config.admin.host}:{config.admin.port}",
        "tls": config.tls.certificate is not None,
        "anonymous": config.keys.anonymous,
        "keys": len(config.keys.static),
        "classes": [
            {
                "name": name,
                "priority": group.priority,
                "ttft_ms": group.ttft_ms or config.slo.ttft_ms,
                "wait_budget_ms": wait_budget_ms(config, group.ttft_ms),
                "floor_share": floors.get(group.priority, 0.0),
                "hold_back": group.hold_back,
            }
            for name, group in classes.items()
        ],
        "engines": [
            {
                "name": engine.name,
                "kind": engine.kind,
                "instances": list(engine_names(engine)),
                "models": list(engine.models),
                "concurrency": limit_kind(config, engine),
                "concurrency_limit": initial_limit(config, engine) * len(engine_names(engine)),
            }
            for engine in config.engines
        ],
    }


def plain(config: Config) -> Any:
    """The whole configuration as plain data, secrets masked."""
    return msgspec.to_builtins(config, enc_hook=_masked)


def _masked(value: object) -> str:
    if isinstance(value, Secret):
        return "***"
    raise TypeError(f"config: no plain form of {type(value).__name__}")
