"""How a fleet is run: the settings that the planner chooses, and the configuration file that says so.

One text serves both: what is simulated is what is written for the user, but for the addresses of the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from forebay.config.render import toml
from forebay.engines.simulated.profile import EncoderProfile, StepProfile
from forebay.plan.candidates import Candidate
from forebay.plan.objective import Objective
from forebay.sim.bounds import FluidBound

Mode = Literal["hybrid", "admission", "backpressure"]
MODES: tuple[Mode, ...] = ("hybrid", "admission", "backpressure")

KV_SHARE = 0.9
"""Share of the KV cache that expected tokens may fill: estimates of answers' lengths are no better."""

WAIT_SHARES = (0.5, 0.85)
"""Wait budgets that are tried, as shares of the time to first token: what is left is for the prefill."""

PATIENT_MS = 100.0
"""Below this objective the derived budget is the only one: there is no time to wait."""

TTFT_OF_SLO_MS = 1000.0
"""The configuration's own default, where the objective says nothing about first tokens."""


class Setup(msgspec.Struct, frozen=True):
    """`limit` requests and `tokens` expected tokens in flight on one engine; `wait_budget_ms` None: the derived one.

    A guarded limit only begins with `limit`, and finds its own up to `most`, with the KV cache of `kv_tokens`. `batch`
    is the most that the gateway sends together to an encoder, 1 for language models.
    """

    mode: Mode
    limit: int
    tokens: int | None = None
    wait_budget_ms: float | None = None
    batch: int = 1
    kind: Literal["fixed", "guarded"] = "fixed"
    most: int | None = None
    kv_tokens: int | None = None

    def __str__(self) -> str:
        places = f"{self.limit} in flight per engine" if self.kind == "fixed" else "a guarded limit per engine"
        parts = [self.mode, places]
        if self.batch > 1:
            parts.append(f"batches of {self.batch}")
        if self.wait_budget_ms is not None:
            parts.append(f"wait budget {self.wait_budget_ms:g} ms")
        return ", ".join(parts)


def setups(candidate: Candidate, objective: Objective, bound: FluidBound, mode: Mode) -> list[Setup]:
    """What is tried for a mode on a kind of engine, the likeliest first.

    In-flight limits span from a fraction of the batch at which the fluid bound is reached up to the engine's own
    limit: a small one keeps prefills out of each other's way, a large one lets bursts in. Beside them there is the
    limit that finds itself, where there is a pace per token for it to keep. Wait budgets are the derived one and
    shares of the objective's time to first token; with the engine's own limit there is hardly a wait.
    """
    profile = candidate.profile
    if isinstance(profile, EncoderProfile):
        batch = max(1, round(bound.batch))
        sizes = list(dict.fromkeys(max(1, round(batch * share)) for share in (0.5, 1.0, 0.25)))
        # Two batches: one in the engine, one behind it.
        return [Setup(mode, 2 * size, None, budget, size) for budget in _budgets(objective, mode) for size in sizes]
    tokens = int(KV_SHARE * profile.kv_tokens)
    limits, budgets = _limits(profile, bound), _budgets(objective, mode)
    fixed = [
        Setup(mode, limit, tokens, budget)
        for budget in budgets
        for limit in limits
        if budget is None or limit < profile.max_num_seqs
    ]
    if objective.tpot_ms is None:
        return fixed  # a guarded limit keeps a pace per token: there is none to keep
    room = {"most": profile.max_num_seqs, "kv_tokens": profile.kv_tokens}
    return [*fixed, *(Setup(mode, min(limits), None, budget, kind="guarded", **room) for budget in budgets)]


def neighbours(setup: Setup, candidate: Candidate) -> list[Setup]:
    """The same with a somewhat smaller and a somewhat larger limit; none where it finds itself."""
    profile = candidate.profile
    if setup.kind == "guarded":
        return []
    if isinstance(profile, EncoderProfile):
        sizes = {max(1, round(setup.batch * 0.75)), round(setup.batch * 1.5)} - {setup.batch}
        return [msgspec.structs.replace(setup, batch=size, limit=2 * size) for size in sorted(sizes)]
    near = {max(1, round(setup.limit * 0.75)), min(profile.max_num_seqs, round(setup.limit * 1.35))} - {setup.limit}
    return [msgspec.structs.replace(setup, limit=limit) for limit in sorted(near)]


def _limits(profile: StepProfile, bound: FluidBound) -> list[int]:
    most = profile.max_num_seqs
    full = min(most, max(2, round(bound.batch)))
    return list(dict.fromkeys([max(1, full // 2), full, max(1, full // 4), most]))


def _budgets(objective: Objective, mode: Mode) -> list[float | None]:
    if mode != "hybrid":
        return [None]
    patient = objective.ttft_ms or (objective.latency_ms or 0) / 2
    if patient <= PATIENT_MS:
        return [None]
    return [None, *(round(share * patient, 1) for share in WAIT_SHARES)]


def config_text(setup: Setup, objective: Objective, *, engines: int, urls: Sequence[str] = (), note: str = "") -> str:
    """A configuration file. Without `urls` it is that of a simulation."""
    lines = [f"# {line}".rstrip() for line in note.splitlines()]
    ttft = objective.ttft_ms or min(objective.latency_ms or TTFT_OF_SLO_MS, TTFT_OF_SLO_MS)
    lines += ["[slo]", f"ttft_ms = {toml(ttft)}"]
    if objective.tpot_ms is not None:
        lines.append(f"tpot_ms = {toml(objective.tpot_ms)}")
    lines += ["", "[admission]", f"mode = {toml(setup.mode)}"]
    if setup.wait_budget_ms is not None:
        lines.append(f"wait_budget_ms = {toml(setup.wait_budget_ms)}")
    # The wait gate is what should refuse: the depth gate only bounds memory, so it grows with the fleet.
    lines += ["", "[queue]", f"depth_limit = {max(256, 4 * engines)}"]
    lines += ["", "[[engines]]", 'name = "planned"', f"kind = {toml('openai' if urls else 'simulated')}"]
    if urls:
        lines += ["urls = [", *(f"    {toml(url)}," for url in urls), "]"]
    bounds = {"limit": setup.limit, "most": setup.most, "tokens": setup.tokens, "kv_tokens": setup.kv_tokens}
    places = [f"{name} = {bound}" for name, bound in bounds.items() if bound is not None]
    lines.append(f"concurrency = {{ kind = {toml(setup.kind)}, {', '.join(places)} }}")
    if setup.batch > 1:
        batching = f'kind = "dynamic", max_size = {setup.batch}, linger_ms = 0'
        lines.append(f"batching = {{ {batching} }}")
    return "\n".join(lines) + "\n"
