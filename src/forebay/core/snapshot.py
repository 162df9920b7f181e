"""A frozen picture of all rooms, for status pages, metrics and tests. Durations are nanoseconds."""

from __future__ import annotations

import msgspec


class EngineSnapshot(msgspec.Struct, frozen=True):
    """One engine: its health, what it holds and how much it may hold."""

    name: str
    readiness: str
    ejected: bool
    in_flight: int
    tokens_in_flight: int
    places: int
    concurrency_limit: int
    window: int  # of that limit, as much as may be used now
    others: int  # requests that reached it past this gateway, as far as it says
    tokens_limit: int
    shadow_limit: int | None  # that a limit in shadow would have set
    prefill_tokens: int  # of streams that have not begun; kept where several engines or a limit need it
    prefill_limit: int
    gap_ns: int  # between two tokens of a stream, as the limit last saw it; 0: not known


class TunerSnapshot(msgspec.Struct, frozen=True):
    """What moves the depth of one pool's queue."""

    kind: str
    depth: int  # in force in hybrid mode
    frozen: bool
    changes: int
    looked_ns: int | None  # since it looked last; None: not yet
    changed_ns: int | None  # since it moved the depth; None: not yet
    shadow_depth: int | None  # that a tuner in shadow would have set


class PoolSnapshot(msgspec.Struct, frozen=True):
    """One pool: its queue, its forecast and its engines."""

    name: str
    models: tuple[str, ...]
    mode: str
    queue_depth: int
    queue_tokens: int
    queue_bytes: int
    queue_depth_limit: int
    tuner: TunerSnapshot
    shadow_decisions: dict[str, dict[str, int]]  # policy -> verdict of its shadow beside the acting one -> requests
    drain_rate_per_s: float
    wait_budget_ns: int
    predicted_wait_ns: int
    wait_correction: float
    service_ns: int
    engines: tuple[EngineSnapshot, ...]


class Snapshot(msgspec.Struct, frozen=True):
    """The whole pipeline. Outcomes are counts by name."""

    draining: bool
    offered: int
    outcomes: dict[str, int]
    queued: int
    in_flight: int
    keys: int
    pools: tuple[PoolSnapshot, ...]
