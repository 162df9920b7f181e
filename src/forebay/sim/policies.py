"""The policies that a sweep compares: a mode of the gateway with everything else at its default, a file, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forebay.config.load import loads
from forebay.config.render import toml
from forebay.core.model import Mode
from forebay.engines.simulated.profile import EncoderProfile, Profile, StepProfile
from forebay.errors import UsageError
from forebay.sim.bounds import FluidBound
from forebay.sim.run import ENCODER_MAX_BATCH

NONE = "none"
"""No gateway: requests go straight to the engines."""
GUARDED = "guarded"
"""Hybrid, with the limit that finds itself. For language models: an encoder has no pace to keep."""

BUILT_IN = (*(mode.value for mode in Mode), GUARDED, NONE)

TPOT_SHARE = 0.75
"""Of the objective: a batch at its edge misses it half of the time, and what comes in bursts is not the mean."""
BATCH_SHARE = 0.5
"""Of an encoder's objective: a request waits for the batch before its own."""
PLAIN_BATCH = 32
"""Requests in an encoder's batch where no objective says more."""


@dataclass(frozen=True, slots=True)
class Policy:
    """`config` is the text of a configuration; `gateway` false means that there is none in the way."""

    name: str
    config: str = ""
    gateway: bool = True


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a built-in policy needs to know of an engine: requests in flight, and the gateway's batch (1: none).

    `in_flight` counts batches where the gateway makes them. `kv_tokens`: the size of its cache, for the guarded limit.
    `wait_budget_ms`: what an encoder's objective leaves beside the batch; None is the default.
    """

    in_flight: int
    batch: int = 1
    linger_ms: float = 0.0
    kv_tokens: int | None = None
    wait_budget_ms: float | None = None


def sizing(
    profile: Profile,
    bound: FluidBound | None,
    *,
    max_batch: int | None = None,
    latency_ms: float | None = None,
    in_flight: int | None = None,
    kv_tokens: int | None = None,
) -> Sizing:
    """The in-flight limit where the objective's operating point is; for encoders the batch that keeps the objective.

    `bound` is one engine's fluid bound under TPOT_SHARE of the objective. `in_flight` set replaces what is derived.
    """
    if isinstance(profile, StepProfile):
        derived = profile.max_num_seqs if bound is None else max(1, round(bound.batch))
        return Sizing(in_flight or derived, kv_tokens=kv_tokens or profile.kv_tokens)
    most = max_batch or ENCODER_MAX_BATCH
    if latency_ms is None:
        return Sizing(in_flight or 1, min(most, PLAIN_BATCH))
    batch_ms = latency_ms * BATCH_SHARE
    return Sizing(in_flight or 1, _encoder_batch(profile, most, batch_ms), wait_budget_ms=latency_ms - batch_ms)


def _encoder_batch(profile: EncoderProfile, most: int, within_ms: float) -> int:
    return max((size for size in range(1, most + 1) if profile.batch_ms(size) <= within_ms), default=1)


def policy(name: str, size: Sizing, *, slo_ms: float | None = None, tpot_ms: float | None = None) -> Policy:
    """A built-in policy by name, or a configuration file by path.

    Raises UsageError for a name that is neither, ConfigError for a file that is no configuration.
    """
    if name == NONE:
        return Policy(NONE, gateway=False)
    if name in BUILT_IN:
        mode = Mode.HYBRID.value if name == GUARDED else name
        return Policy(name, config_text(mode, size, slo_ms=slo_ms, tpot_ms=tpot_ms, guarded=name == GUARDED))
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"{name!r} is neither a policy ({', '.join(BUILT_IN)}) nor a configuration file")
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    loads(text, name=str(path), environment={})
    return Policy(path.stem, text)


def config_text(
    mode: str,
    size: Sizing,
    *,
    slo_ms: float | None = None,
    tpot_ms: float | None = None,
    guarded: bool = False,
    wait_budget_ms: float | None = None,
    depth_limit: int | None = None,
    deadline_s: float | None = None,
) -> str:
    """A configuration for simulated engines; what is None stays at its default."""
    objective = {"ttft_ms": slo_ms, "tpot_ms": tpot_ms}
    lines = ["[slo]", *(f"{name} = {toml(value)}" for name, value in objective.items() if value is not None)]
    lines += ["[admission]", f"mode = {toml(mode)}"]
    budget = size.wait_budget_ms if wait_budget_ms is None else wait_budget_ms
    if budget is not None:
        lines.append(f"wait_budget_ms = {toml(budget)}")
    queue = {"depth_limit": depth_limit, "deadline_s": deadline_s}
    if any(value is not None for value in queue.values()):
        lines += ["[queue]", *(f"{name} = {toml(value)}" for name, value in queue.items() if value is not None)]
    lines += ["[[engines]]", 'name = "engine"', 'kind = "simulated"']
    if guarded:
        cache = f", kv_tokens = {size.kv_tokens}" if size.kv_tokens is not None else ""
        lines.append(f'concurrency = {{ kind = "guarded"{cache} }}')
    else:
        lines.append(f'concurrency = {{ kind = "fixed", limit = {size.in_flight} }}')
    if size.batch > 1:
        linger = toml(size.linger_ms)
        lines.append(f'batching = {{ kind = "dynamic", max_size = {size.batch}, linger_ms = {linger} }}')
    return "\n".join(lines) + "\n"
