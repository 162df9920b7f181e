"""Which engines can be bought: calibrated profiles of a model, on GPUs that have a price."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.engines.simulated.catalog import profiles
from forebay.engines.simulated.profile import EncoderProfile, Profile, StepProfile
from forebay.errors import UsageError
from forebay.plan.prices import Price, PriceBook, card

DTYPES = ("bf16", "fp16", "fp8", "int8")
"""From the most exact on: the first that a model has is taken unless another is asked for."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One engine that could be bought, several times: its profile, and what its GPUs cost."""

    profile: Profile
    gpu: str
    gpus: int
    price: Price

    @property
    def name(self) -> str:
        """`h100-80g`, or `4 x h100-80g` for an engine that spans GPUs."""
        return self.gpu if self.gpus == 1 else f"{self.gpus} x {self.gpu}"

    @property
    def usd_per_hour(self) -> float:
        """Of one engine."""
        return self.gpus * self.price.usd_per_hour


def model_of(profile: Profile) -> str:
    """The model's name as `--model` takes it."""
    if isinstance(profile, EncoderProfile):
        return f"{profile.model}/{profile.name.split('/')[3]}"
    return profile.model


def dtype_of(profile: Profile) -> str:
    """The number format of the weights, from the profile's name."""
    return profile.name.split("/")[2]


def candidates(
    book: PriceBook, *, model: str, dtype: str | None = None, gpus: Sequence[str] = ()
) -> tuple[list[Candidate], list[str]]:
    """Engines for the model, cheapest GPU first, and notes on what was left out.

    Raises UsageError, with suggestions, for an unknown model, number format or GPU, or when nothing is left.
    """
    fitting = _of_dtype(_of_model(model), dtype)
    wanted = {name: _card_named(name, fitting) for name in gpus}
    found, notes = [], []
    for profile in fitting:
        gpu = card(profile.gpu)
        if wanted and gpu not in wanted.values():
            continue
        price = book.price(gpu)
        if price is None:
            notes.append(f"{gpu} is left out: it has no current on-demand price (set one: --price {gpu}=USD)")
            continue
        found.append(Candidate(profile, gpu, profile.gpus if isinstance(profile, StepProfile) else 1, price))
    if not found:
        raise UsageError(f"no GPU is left for {model}: {'; '.join(dict.fromkeys(notes))}")
    found.sort(key=lambda one: (one.usd_per_hour, one.profile.name))
    return found, list(dict.fromkeys(notes))


def _of_model(model: str) -> list[Profile]:
    known = list(profiles().values())
    names = sorted({model_of(profile) for profile in known})
    asked = model.lower()
    exact = [profile for profile in known if model_of(profile) == asked]
    if exact:
        return exact
    near = [name for name in names if asked in name]
    if len(near) == 1:
        return [profile for profile in known if model_of(profile) == near[0]]
    near = near or difflib.get_close_matches(asked, names, n=3, cutoff=0.4) or names
    raise UsageError(f"--model {model}: there is no calibrated profile of it; did you mean {' or '.join(near)}?")


def _of_dtype(fitting: Sequence[Profile], dtype: str | None) -> list[Profile]:
    have = {dtype_of(profile) for profile in fitting}
    if dtype is None:
        dtype = next((one for one in DTYPES if one in have), min(have))
    elif dtype.lower() not in have:
        raise UsageError(f"--dtype {dtype}: {model_of(fitting[0])} is calibrated in {' and '.join(sorted(have))} only")
    return [profile for profile in fitting if dtype_of(profile) == dtype.lower()]


def _card_named(name: str, fitting: Sequence[Profile]) -> str:
    known = sorted({card(profile.gpu) for profile in fitting})
    asked = card(name)
    if asked in known:
        return asked
    near = [one for one in known if one.startswith(f"{asked}-")] or [one for one in known if one.startswith(asked)]
    if len(near) == 1:
        return near[0]
    near = near or difflib.get_close_matches(asked, known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there is {', '.join(known)}"
    raise UsageError(
        f"--gpu {name}: {model_of(fitting[0])} in {dtype_of(fitting[0])} has no calibrated profile on it; {hint}"
    )
