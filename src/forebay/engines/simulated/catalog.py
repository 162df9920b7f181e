"""The calibrated GPUs by name: those that ship, and those that were fitted to an engine."""

from __future__ import annotations

import difflib
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

from forebay.engines.simulated.fitted import profile_from_file
from forebay.engines.simulated.profile import EncoderProfile, Profile, StepProfile
from forebay.errors import UsageError

DEFAULT_PROFILE = "h100-80g/llama-3.1-8b/bf16/tp1/trtllm"


class _Value(msgspec.Struct):
    value: float


class _Entry(msgspec.Struct):
    id: str
    gpu: str
    n_gpus: int
    model: str
    engine: str
    confidence: str
    coeffs: dict[str, _Value]
    kv_capacity_tokens: _Value
    max_num_seqs: _Value
    max_num_batched_tokens: _Value
    prefill_tok_per_s: dict[int, _Value]
    decode_tok_per_s: dict[int, _Value]


class _StepFile(msgspec.Struct):
    entries: list[_Entry]


class _Curve(msgspec.Struct):
    gpu: str
    model: str
    seq_len: int
    precision: str
    a_ms: _Value
    c_ms_per_sample: _Value
    p: _Value


class _EncoderFile(msgspec.Struct):
    measured: list[_Curve]
    derived: list[_Curve]


@cache
def profiles() -> dict[str, Profile]:
    """All calibrated profiles by name; language models first, in the file's order."""
    folder = files("forebay") / "data" / "calibration"
    steps = msgspec.json.decode((folder / "llm_step_model.json").read_bytes(), type=_StepFile, strict=False)
    curves = msgspec.json.decode((folder / "encoders.json").read_bytes(), type=_EncoderFile, strict=False)
    known: dict[str, Profile] = {entry.id: _step_profile(entry) for entry in steps.entries}
    for curve in curves.measured + curves.derived:
        profile = _encoder_profile(curve)
        known.setdefault(profile.name, profile)
    return known


def profile_named(name: str) -> Profile:
    """The profile called `name`: one that ships, or the path (`….json`) of one that was fitted.

    Raises `UsageError`, with the nearest names, when there is none.
    """
    if name.endswith(".json"):
        return profile_from_file(Path(name))
    known = profiles()
    if name in known:
        return known[name]
    near = [one for one in known if name in one][:3] or difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(f"there is no profile {name!r}{hint} (see --list-profiles)")


def _step_profile(entry: _Entry) -> StepProfile:
    coefficient = {name: entry.coeffs[name].value for name in ("c0", "w", "r", "p", "e", "seq", "kv", "att")}
    return StepProfile(
        name=entry.id,
        gpu=entry.gpu,
        gpus=entry.n_gpus,
        model=entry.model,
        engine=entry.engine,
        confidence=entry.confidence,
        kv_tokens=int(entry.kv_capacity_tokens.value),
        max_num_seqs=int(entry.max_num_seqs.value),
        max_num_batched_tokens=int(entry.max_num_batched_tokens.value),
        decode_tokens_per_s={batch: one.value for batch, one in entry.decode_tok_per_s.items()},
        prefill_tokens_per_s={size: one.value for size, one in entry.prefill_tok_per_s.items()},
        c0=coefficient["c0"],
        w=coefficient["w"],
        r=coefficient["r"],
        p=coefficient["p"],
        e=coefficient["e"],
        seq=coefficient["seq"],
        kv=coefficient["kv"],
        att=coefficient["att"],
    )


def _encoder_profile(curve: _Curve) -> EncoderProfile:
    return EncoderProfile(
        name=f"{curve.gpu.lower()}/{curve.model}/{curve.precision}/seq{curve.seq_len}",
        gpu=curve.gpu,
        model=curve.model,
        a=curve.a_ms.value,
        c=curve.c_ms_per_sample.value,
        p=curve.p.value,
    )
