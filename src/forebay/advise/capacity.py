"""What a calibrated engine can do with requests of a given length: the figures that an advice quotes.

They are the fluid bound with every place taken and all requests of the mean length. Real traffic reaches less, so
they say what cannot work, and roughly where things begin to wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.engines.simulated.catalog import profiles
from forebay.engines.simulated.profile import EncoderProfile, Profile, StepProfile
from forebay.errors import UsageError
from forebay.sim.bounds import Binding, Size, encoder_bound, limits_of, step_bound
from forebay.sim.scenario import EngineSpec

CONFIDENCE = ("high", "medium", "medium-low", "low")
ENCODER_BATCH_MAX = 128
PACE_SHARE = 0.8
"""Of the pace that is asked: the mix varies from second to second, and places at the very pace break it half of the
time. On the conversation trace at twice the capacity, 0.8 had the most completions in time of 0.6 to 1."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """One engine entry of `replicas` engines, at the batch that the objective allows."""

    profile: str
    confidence: str
    places: int
    """Requests in flight on one engine."""
    bound_by: str
    """What keeps `places` from being more."""
    step_ms: float
    """Time of one step (encoder: of one batch) with all places taken."""
    kv_tokens: int | None
    """Tokens, in and out, that the KV cache of one engine holds."""
    rate_per_s: float
    """Requests per second of all replicas."""
    service_ms: float
    """Time that a request holds its place."""


def choose_profile(gpu: str | None, model: str | None, *, encoder: bool) -> Profile | None:
    """The best-measured profile whose names contain `gpu` and `model`; None when neither is given.

    Raises UsageError, with the profiles of that kind, when none does.
    """
    if gpu is None and model is None:
        return None
    kind = EncoderProfile if encoder else StepProfile
    known = {name: one for name, one in profiles().items() if isinstance(one, kind)}
    parts = [part.lower() for part in (gpu, model) if part]
    fitting = [one for name, one in known.items() if all(part in name.lower() for part in parts)]
    if not fitting:
        shown = ", ".join(dict.fromkeys(name.split("/")[0] + "/" + name.split("/")[1] for name in known))
        raise UsageError(f"no calibrated engine is called {' and '.join(parts)}; there are {shown}")
    return min(fitting, key=_doubt)  # the first of equals, in the order of the calibration file


def _doubt(profile: Profile) -> int:
    if isinstance(profile, EncoderProfile):
        return 0
    word = profile.confidence.split()[0]
    return CONFIDENCE.index(word) if word in CONFIDENCE else len(CONFIDENCE)


def language_model(profile: StepProfile, *, prompt: int, output: int, tpot_ms: float, replicas: int) -> Capacity:
    """Places by the pace, the KV cache and the engine's own limits, whichever is least.

    Raises UsageError when one request alone is slower than `tpot_ms`, or does not fit the KV cache.
    """
    if prompt + output > profile.kv_tokens:
        raise UsageError(
            f"{prompt} + {output} tokens do not fit the KV cache of {profile.name} ({profile.kv_tokens} tokens): "
            "choose a larger GPU, or shorter requests"
        )
    alone = profile.step_ms(tokens=1, sequences=1, context=prompt, pairs=0)
    pace_ms = PACE_SHARE * tpot_ms
    bound = step_bound(
        profile, limits_of(profile, EngineSpec(profile=profile.name)), [Size(prompt, output)], tpot_ms=pace_ms
    )
    if alone > pace_ms or bound.requests_per_s == 0:
        raise UsageError(
            f"{profile.name} needs {alone:.1f} ms per token for a single request, and {tpot_ms:g} ms are asked: allow "
            f"{alone * 1.5 / PACE_SHARE:.0f} ms, or choose a faster GPU"
        )
    places = max(1, int(bound.batch))
    return Capacity(
        profile=profile.name,
        confidence=profile.confidence,
        places=places,
        bound_by=_in_words(bound.limited_by, f"{100 * PACE_SHARE:.0f} % of the pace of {tpot_ms:g} ms per token"),
        step_ms=bound.step_ms,
        kv_tokens=profile.kv_tokens,
        rate_per_s=replicas * bound.requests_per_s,
        service_ms=1000 * places / bound.requests_per_s,
    )


def encoder(profile: EncoderProfile, *, latency_ms: float, replicas: int) -> Capacity:
    """The batch that takes half of the objective: the other half is spent waiting for the batch before it."""
    alone = profile.batch_ms(1)
    if alone > latency_ms / 2:
        raise UsageError(
            f"{profile.name} needs {alone:.1f} ms for a single input, and as much may pass before it begins: allow "
            f"{alone * 2.4:.0f} ms, or choose a faster GPU"
        )
    bound = encoder_bound(profile, [Size(1, 1)], ENCODER_BATCH_MAX, latency_ms=latency_ms / 2)
    return Capacity(
        profile=profile.name,
        confidence="a latency curve",
        places=int(bound.batch),
        bound_by=_in_words(bound.limited_by, "half of the objective"),
        step_ms=bound.step_ms,
        kv_tokens=None,
        rate_per_s=replicas * bound.requests_per_s,
        service_ms=bound.step_ms,
    )


def _in_words(limited_by: Binding, objective: str) -> str:
    words: dict[Binding, str] = {
        "sequences": "the engine's largest batch",
        "batch tokens": "the tokens of a step",
        "kv": "the KV cache",
        "objective": objective,
        "nothing": "nothing",
    }
    return words[limited_by]
