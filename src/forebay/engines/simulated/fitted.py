"""The file of a fitted profile: what `forebay sim calibrate` writes and simulations read."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from forebay.engines.simulated.model import EngineLimits
from forebay.engines.simulated.profile import StepProfile
from forebay.errors import UsageError

MAX_FILE_BYTES = 1 << 20
NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """What a request costs before the scheduler sees it (HTTP, tokenizing): outside the steps, beside them."""

    fixed_ms: float = 0.0
    per_token_ms: float = 0.0

    def delay_ns(self, prompt_tokens: int) -> int:
        """For a prompt of so many tokens."""
        return round((self.fixed_ms + self.per_token_ms * prompt_tokens) * NS_PER_MS)


@dataclass(frozen=True, slots=True)
class Coefficient:
    """A fitted number, its standard error (inf: the data do not bound it), and whether the data identify it."""

    name: str
    value: float
    error: float
    known: bool
    wants: str
    """What a run would need for the data to tell; empty when known."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """Observed against replayed with the fitted profile: absolute relative errors over requests, as shares of 1.

    None: there was nothing to compare. From counters alone, `tpot` is of mean step times and there are no requests.
    """

    requests: int
    ttft_p50: float | None
    ttft_p90: float | None
    tpot_p50: float | None
    tpot_p90: float | None


class Fitted(msgspec.Struct, kw_only=True):
    """A calibration and where it came from. `fitted_from` is for people: the engine, the time, the kind of run."""

    kind: Literal["forebay-profile"] = "forebay-profile"
    version: Literal[1] = 1
    fitted_from: str
    profile: StepProfile
    limits: EngineLimits
    front: FrontEnd
    coefficients: list[Coefficient]
    residuals: Residuals


def write_fitted(path: Path, content: Fitted) -> None:
    """Writes the file. UsageError when it cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None


def read_fitted(path: Path) -> Fitted:
    """Reads the file. UsageError, with the field where there is one, when it is not one that can be used."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path}: too large for a profile ({MAX_FILE_BYTES >> 20} MiB at most)")
        content = msgspec.json.decode(path.read_bytes(), type=Fitted)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read as a profile: {error.strerror or error}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise UsageError(f"{path}: not a profile that `forebay sim calibrate` wrote: {error}") from None
    _check(path, content)
    return content


def profile_from_file(path: Path) -> StepProfile:
    """The step model in the file. Raises as `read_fitted` does."""
    return read_fitted(path).profile


def _check(path: Path, content: Fitted) -> None:
    profile, front = content.profile, content.front
    numbers = {f"profile.{name}": getattr(profile, name) for name in ("c0", "w", "r", "e", "seq", "kv", "att")}
    numbers |= {"front.fixed_ms": front.fixed_ms, "front.per_token_ms": front.per_token_ms}
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{path}: {name} is {value}: it must be a number of at least 0")
    if not (math.isfinite(profile.p) and 1 <= profile.p <= 64):
        raise UsageError(f"{path}: profile.p is {profile.p}: it must lie within 1 and 64")
    _check_curve(path, profile.curve)
    if profile.step_ms(1, 1, 1, 0.0) <= 0:
        raise UsageError(f"{path}: a step of this profile takes no time: c0 and w are 0, or nearly")


def _check_curve(path: Path, curve: tuple[tuple[float, float], ...]) -> None:
    if len(curve) == 1:
        raise UsageError(f"{path}: profile.curve has one point: it needs two, or none")
    for number, ((low, low_ms), (high, high_ms)) in enumerate(itertools.pairwise(curve)):
        if not (0 <= low < high < math.inf and 0 <= low_ms <= high_ms < math.inf):
            raise UsageError(f"{path}: profile.curve[{number + 1}]: tokens must grow from point to point, ms not fall")
