"""Fronts that are not Forebay: nothing, vLLM's own caps, and llm-d's probabilistic gate, by their published rules.

Each is given what favours it: engines are chosen by their true state of this instant, where a real router has that of
its last scrape, and their own limits are set by their own documentation.
"""

from __future__ import annotations

from random import Random

from benchmarks.control_world import TTFT_MS, Tiring
from forebay.core.model import Request
from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.profile import StepProfile
from forebay.sim.call import Call
from forebay.sim.engines import LanguageEngine
from forebay.sim.fronts import Direct
from forebay.sim.world import World

UNAVAILABLE, TOO_MANY = 503, 429


class _Choosing(Direct):
    """Sends to the engine that holds least, unless the gate refuses."""

    def __init__(self, world: World, engines: list[LanguageEngine], answers: Tiring) -> None:
        super().__init__(world, engines, answers)
        self._callers = answers
        self._models = engines

    def _send_to(self, call: Call, engine: LanguageEngine) -> None:
        self._engine_of[call.index] = engine
        engine.start((call,))


class VllmCaps(_Choosing):
    """`--max-num-queued-reqs` and `--max-num-queued-tokens` of every engine: 503, and no time to come back.

    The first counts what waits and what runs, and is set to the engine's own number of sequences. The second counts
    the prompts whose first token has not come, and is sized as its documentation says: the objective for the first
    token times the prefill throughput. Both are of vLLM pull request 49445.
    """

    def __init__(
        self, world: World, engines: list[LanguageEngine], answers: Tiring, *, requests: int, tokens: float
    ) -> None:
        super().__init__(world, engines, answers)
        self._requests, self._tokens = requests, tokens
        self._prefilling = dict.fromkeys(engines, 0)

    def offer(self, call: Call, request: Request) -> None:  # noqa: ARG002
        engine = min(self._models, key=lambda one: one.held)
        if engine.held >= self._requests or self._prefilling[engine] >= self._tokens:
            self._callers.turned_away(call, UNAVAILABLE)
            return
        self._prefilling[engine] += call.prompt_tokens
        self._send_to(call, engine)

    def first_token(self, call: Call) -> None:
        super().first_token(call)
        self._begun(call)

    def leave(self, call: Call) -> int:
        if not call.first_token:
            self._begun(call)
        return super().leave(call)

    def _begun(self, call: Call) -> None:
        engine = self._engine_of[call.index]
        assert isinstance(engine, LanguageEngine)
        self._prefilling[engine] -= call.prompt_tokens


class ProbabilisticGate(_Choosing):
    """llm-d-router's probabilistic admitter, with its defaults, for requests that may all be shed.

    A request is refused with probability min(1, 300 * saturation ** 5), where saturation is the mean over the engines
    of max(waiting / 5, KV in use / 0.8). Of llm-d-router pull request 959.
    """

    def __init__(self, world: World, engines: list[LanguageEngine], answers: Tiring, seed: int) -> None:
        super().__init__(world, engines, answers)
        self._chance = Random(f"{seed}/gate")

    def offer(self, call: Call, request: Request) -> None:  # noqa: ARG002
        now = self._world.now
        models = [engine.model for engine in self._models]
        saturation = sum(
            max(model.num_waiting / 5, model.kv_used_at(now) / model.limits.kv_tokens / 0.8) for model in models
        ) / len(models)
        if self._chance.random() < min(1.0, 300.0 * saturation**5):
            self._callers.turned_away(call, TOO_MANY)
            return
        self._send_to(call, min(self._models, key=lambda one: (one.model.num_waiting, one.held)))


def no_gateway(world: World, engines: list[LanguageEngine], callers: Tiring, seed: int) -> Direct:  # noqa: ARG001
    """Nothing in the way."""
    return Direct(world, engines, callers)


def probabilistic_gate(world: World, engines: list[LanguageEngine], callers: Tiring, seed: int) -> Direct:
    """llm-d-router's."""
    return ProbabilisticGate(world, engines, callers, seed)


def vllm_caps(world: World, engines: list[LanguageEngine], callers: Tiring, seed: int) -> Direct:  # noqa: ARG001
    """vLLM's own, sized by the rule in its documentation."""
    profile = profile_named(callers.profile)
    assert isinstance(profile, StepProfile)
    throughput = max(profile.prefill_tokens_per_s.values())
    return VllmCaps(world, engines, callers, requests=profile.max_num_seqs, tokens=TTFT_MS / 1000.0 * throughput)
