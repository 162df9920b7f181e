"""From answers to a recommendation: mode, preset, settings with their reasons, what to add later, what to know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any

from forebay.advise import capacity as figures
from forebay.advise.answers import Answers, check
from forebay.advise.capacity import Capacity
from forebay.advise.rules import LATER, Situation, exists, situation
from forebay.advise.settings import SLOTS, Setting, guarded, settings
from forebay.config.preset import PRESETS
from forebay.config.schema import Config
from forebay.core.model import Mode
from forebay.engines.simulated.profile import EncoderProfile, StepProfile

TPOT_MS = 50.0
"""Pace assumed when none is said: twice as fast as people read."""
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 256
"""Lengths assumed when none are said; near those of conversations in the shipped traces."""
OFFLINE_TPOT_MS = 200.0


@dataclass(frozen=True, slots=True)
class Later:
    """A capability to add, when it pays, and whether this version has it."""

    what: str
    when: str
    setting: str
    available: bool


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The advice. `figures` are the numbers its reasons quote, by name."""

    mode: Mode
    preset: str
    reasons: tuple[str, ...]
    cautions: tuple[str, ...]
    settings: tuple[Setting, ...]
    later: tuple[Later, ...]
    capacity: Capacity | None
    assumed: tuple[str, ...]
    figures: dict[str, float] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {"mode": self.mode.value, **{name: value for name, value in asdict(self).items() if name != "mode"}}


def recommend(answers: Answers) -> Recommendation:
    """The recommendation. Raises UsageError for answers that contradict each other, or that no engine can meet."""
    check(answers)
    row, mode, override = situation(answers)
    ttft = _ttft_ms(answers, row)
    capacity, assumed = _capacity(answers, ttft)
    reasons = [row.why] if override is None else [override, f"Usually one begins with {row.mode.value} here. {row.why}"]
    numbers: dict[str, float] = {"ttft_ms": ttft}
    if capacity is not None:
        reasons += _capacity_reasons(answers, capacity, mode, numbers)
    if mode is Mode.HYBRID:
        encodes = answers.engine == "encoder"
        reasons.append(_batch_wait(ttft, numbers) if encodes else _wait_reason(ttft, capacity, numbers))
    lines = list(settings(answers, row, mode, capacity, ttft))
    return Recommendation(
        mode=mode,
        preset=row.preset,
        reasons=tuple(reasons),
        cautions=tuple(_cautions(answers, mode, capacity, numbers)),
        settings=tuple(lines),
        later=tuple(_later(answers, row, mode, lines)),
        capacity=capacity,
        assumed=tuple(assumed),
        figures=numbers,
    )


def per_second(rate: float) -> str:
    """A rate with three figures: `8.77`, `5,110`."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _ttft_ms(answers: Answers, row: Situation) -> float:
    if answers.ttft_ms is not None:
        return answers.ttft_ms
    of_preset = PRESETS[row.preset].get("slo", {}).get("ttft_ms")
    return float(of_preset if of_preset is not None else Config().slo.ttft_ms)


def _capacity(answers: Answers, ttft: float) -> tuple[Capacity | None, list[str]]:
    """Figures of the calibrated engine that fits, and what had to be assumed for them."""
    profile = figures.choose_profile(answers.gpu, answers.model, encoder=answers.engine == "encoder")
    if isinstance(profile, EncoderProfile):
        return figures.encoder(profile, latency_ms=ttft, replicas=answers.replicas), []
    if not isinstance(profile, StepProfile):
        return None, []
    usual = OFFLINE_TPOT_MS if answers.clients == "offline" else TPOT_MS
    given = (answers.prompt_tokens, answers.output_tokens, answers.tpot_ms)
    names = (f"prompts of {PROMPT_TOKENS} tokens", f"answers of {OUTPUT_TOKENS} tokens", f"{usual:g} ms per token")
    assumed = [name for name, value in zip(names, given, strict=True) if value is None]
    capacity = figures.language_model(
        profile,
        prompt=answers.prompt_tokens or PROMPT_TOKENS,
        output=answers.output_tokens or OUTPUT_TOKENS,
        tpot_ms=answers.tpot_ms or usual,
        replicas=answers.replicas,
    )
    return capacity, assumed


def _capacity_reasons(answers: Answers, capacity: Capacity, mode: Mode, numbers: dict[str, float]) -> Iterator[str]:
    numbers |= {"places": capacity.places, "capacity_per_s": capacity.rate_per_s, "service_ms": capacity.service_ms}
    many = f"{answers.replicas} engines carry" if answers.replicas > 1 else "One engine carries"
    what = "batch" if answers.engine == "encoder" else "step"
    yield (
        f"{many} about {per_second(capacity.rate_per_s)} requests/s with {capacity.places} places each "
        f"({capacity.profile}, calibration: {capacity.confidence}): {capacity.bound_by} sets that number, and a {what} "
        f"then takes {capacity.step_ms:.1f} ms."
    )
    if answers.rate_per_s is None:
        return
    load = numbers["load"] = answers.rate_per_s / capacity.rate_per_s
    if load <= 1:
        share = f"{100 * load:.0f} % of that"
        yield f"Your peak of {answers.rate_per_s:g} requests/s is {share}: only bursts go beyond it."
        return
    needed = ceil(answers.replicas * load)
    numbers["replicas_needed"] = needed
    fate = "waits longer and longer" if mode is Mode.BACKPRESSURE else "is refused"
    yield (
        f"Your peak of {answers.rate_per_s:g} requests/s is {load:.1f} times that: at the peak about "
        f"{100 * (1 - 1 / load):.0f} % {fate}, and {needed} engines would carry it."
    )


def _wait_reason(ttft: float, capacity: Capacity | None, numbers: dict[str, float]) -> str:
    budget = numbers["wait_budget_ms"] = min(50.0, 0.1 * ttft)
    text = f"A request may wait {budget:g} ms, a tenth of the {ttft:g} ms to the first token and at most 50."
    if capacity is None:
        return text
    slots = numbers["slots_in_budget"] = capacity.rate_per_s * budget / 1000
    if slots >= 3:
        return f"{text} In that time about {slots:.0f} places come free, so as many may stand in line."
    raised = numbers["wait_budget_ms"] = min(3000 / capacity.rate_per_s, ttft)
    return (
        f"{text} Only {slots:.1f} places come free in that time, so Forebay raises it to that of three: "
        f"about {raised:.0f} ms."
    )


def _batch_wait(ttft: float, numbers: dict[str, float]) -> str:
    budget = numbers["wait_budget_ms"] = ttft / 2
    return (
        f"A request waits for the batch before its own, so it may wait {budget:g} ms: half of the {ttft:g} ms to the "
        "answer, of which a batch takes the other half at most."
    )


def _later(answers: Answers, row: Situation, mode: Mode, lines: list[Setting]) -> Iterator[Later]:
    # A guarded limit counts tokens by itself, and an encoder's requests are counted in batches.
    counted = guarded(answers) or answers.engine == "encoder" or any("tokens =" in str(one.value) for one in lines)
    for name in row.later:
        if (name == "hybrid" and mode is Mode.HYBRID) or (name == "tokens in flight" and counted):
            continue
        one = LATER[name]
        yield Later(one.what, one.when, ".".join(one.path), exists(one.path))


def _cautions(answers: Answers, mode: Mode, capacity: Capacity | None, numbers: dict[str, float]) -> Iterator[str]:
    load = numbers.get("load", 0.0)
    if mode is Mode.BACKPRESSURE and load > 1 and answers.clients != "offline":
        yield (
            f"Holding what cannot start does not help at {load:.1f} times the capacity: the line grows until the "
            "deadline, and everybody's answer is late. Add engines, or let requests be dropped."
        )
    if mode is Mode.BACKPRESSURE and answers.bounded is None and answers.clients == "internal":
        yield "This holds only while the number of senders is bounded; if it is not, say --not-bounded."
    if mode is Mode.BACKPRESSURE and answers.strict:
        yield (
            f"Held requests do not meet {answers.ttft_ms:g} ms once the places are taken: their number, and not the "
            "gateway, must keep the wait short."
        )
    if answers.bursty and mode is Mode.ADMISSION:
        yield "Refusing at once leaves places empty between your bursts: try the hybrid with --simulate."
    if answers.clients == "public" and not answers.sells:
        yield "Callers without a key share one allowance, so one of them can use it up: give callers keys soon."
        if answers.rate_per_s is None and capacity is None:
            allowed = PRESETS["public-api"]["limits"]["default"]["requests_per_minute"]
            yield f"The preset allows them {allowed} requests a minute together: say --rate for an allowance that fits."
    if answers.clients == "b2b" or answers.sells:
        yield "Nobody may call until the file has keys: see the commented example in it."
    if answers.tpot_ms is not None and not guarded(answers):
        yield "The pace per token is kept by a fixed limit alone: choose it anew when the mix of requests changes."
    if capacity is not None and answers.engine in SLOTS:
        yield f"The figures are those of vLLM or TensorRT-LLM on that GPU; {answers.engine} reaches less."
    if answers.engine == "encoder":
        yield "The members of a batch reach the engine as single requests, at the same time; it must group them itself."
    if capacity is not None and capacity.confidence.startswith(("low", "medium-low")):
        yield f"The figures of {capacity.profile} are scaled from another GPU: measure before you rely on them."
