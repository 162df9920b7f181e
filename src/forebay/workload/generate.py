"""Arrivals from a short text, such as `poisson`, `spike:factor=4,at=60,for=30` or `clients:model=m-large`.

A text is a name and settings: `NAME` or `NAME:SETTING=VALUE,…`. `SHAPES` has all of them, with what they mean.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import accumulate
from random import Random
from typing import NamedTuple

from forebay.errors import UsageError
from forebay.workload.arrival import NS_PER_S, Arrival
from forebay.workload.pacer import (
    Clumps,
    Constant,
    Diurnal,
    Gamma,
    Mmpp,
    Pacer,
    Poisson,
    Ramp,
    Spike,
    Table,
)
from forebay.workload.population import WINDOW_S, measured_rates, population
from forebay.workload.sizes import Sizes
from forebay.workload.trace import sizes_of

CV_LEAST, CV_MOST = 0.01, 100.0


class Settings:
    """The settings of one text, taken by name; what nobody takes is a mistake."""

    def __init__(self, shape: str, given: Mapping[str, str]) -> None:
        self._shape = shape
        self._given = dict(given)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number within bounds. Raises UsageError."""
        text = self._given.pop(name, None)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise UsageError(f"arrivals {self._shape}: {name}={text} is no number within {least:g} and {most:g}")
        return value

    def text(self, name: str, default: str) -> str:
        """A word."""
        return self._given.pop(name, default)

    def end(self, known: str) -> None:
        """Raise UsageError when settings are left over; `known` tells those that there are."""
        if self._given:
            left = ", ".join(self._given)
            raise UsageError(f"arrivals {self._shape}: no setting {left}; it knows {known or 'none'}")


class Shape(NamedTuple):
    """A kind of arrivals: how its pacer is made of settings, rate and duration in seconds, and what a person reads."""

    pacer: Callable[[Settings, float, float], Pacer]
    settings: str
    meaning: str


class RetryStorm(NamedTuple):
    """Callers that make a spike worse: an SDK's retries, and no patience. Fields of a scenario's clients."""

    retry: str = "sdk"
    patience_s: float = 10.0


RETRY_STORM = RetryStorm()
"""Who should send the arrivals `retry-storm`: arrivals alone do not retry."""


def _gamma(take: Settings, rate: float, duration_s: float) -> Pacer:
    return Gamma(rate, take.number("cv", 3.0, CV_LEAST, CV_MOST), duration_s)


def _mmpp(take: Settings, rate: float, duration_s: float) -> Pacer:
    return Mmpp(rate, take.number("ratio", 5.0, 1.0, 1000.0), take.number("stay", 5.0, 1e-3, 1e6), duration_s)


def _clumps(take: Settings, rate: float, duration_s: float) -> Pacer:
    size = int(take.number("size", 8.0, 1.0, 1e6))
    return Clumps(rate, size, duration_s, spread_s=take.number("spread", 0.0, 0.0, 1e6))


def _ramp(take: Settings, rate: float, duration_s: float) -> Pacer:
    return Ramp(rate, rate * take.number("to", 3.0, 0.0, 1000.0), duration_s)


def _diurnal(take: Settings, rate: float, duration_s: float) -> Pacer:
    peak, period_s = take.number("peak", 3.0, 1.0, 1e6), take.number("period", 86_400.0, 1e-3, 1e9)
    return Diurnal(rate, peak, period_s, duration_s, take.number("cv", 1.0, CV_LEAST, CV_MOST))


def _spike(take: Settings, rate: float, duration_s: float) -> Pacer:
    at_s, lasts_s = take.number("at", duration_s / 3, 0.0, 1e9), take.number("for", duration_s / 6, 1e-3, 1e9)
    factor = take.number("factor", 4.0, 0.0, 1000.0)
    return Spike(rate, factor, at_s, lasts_s, duration_s, take.number("cv", 1.0, CV_LEAST, CV_MOST))


def _measured(take: Settings, rate: float, duration_s: float) -> Pacer:
    rates = measured_rates(take.text("model", "m-large"))
    first = int(take.number("from_h", 0.0, 0.0, 24.0 * 365) * 3600 / WINDOW_S) % len(rates)
    factor = rate * len(rates) / math.fsum(rates)
    scaled = tuple(factor * rate for rate in rates[first:] + rates[:first])
    return Table(scaled, WINDOW_S, duration_s, take.number("cv", 1.0, CV_LEAST, CV_MOST))


SHAPES: dict[str, Shape] = {
    "poisson": Shape(lambda _take, rate, duration_s: Poisson(rate, duration_s), "", "independent arrivals"),
    "constant": Shape(lambda _take, rate, duration_s: Constant(rate, duration_s), "", "evenly spaced"),
    "gamma": Shape(_gamma, "cv=3", "gaps with that coefficient of variation"),
    "mmpp": Shape(_mmpp, "ratio=5, stay=5", "a calm and a busy state, so many times apart, for so many seconds each"),
    "bursty": Shape(_mmpp, "ratio=5, stay=5", "the same as mmpp"),
    "clumps": Shape(_clumps, "size=8, spread=0", "that many requests within so many seconds"),
    "ramp": Shape(_ramp, "to=3", "from the rate to so many times the rate"),
    "diurnal": Shape(_diurnal, "peak=3, period=86400, cv=1", "a sinusoid: peak over trough, from the trough on"),
    "spike": Shape(_spike, "factor=4, at, for, cv=1", "so many times the rate, from second `at`, `for` seconds"),
    "retry-storm": Shape(_spike, "factor=4, at, for, cv=1", "a spike, for callers such as RETRY_STORM"),
    "measured": Shape(_measured, "model=m-large, from_h=0, cv=1", "the daily and weekly curve of a ServeGen model"),
}
"""By name. The rate is the mean, but that of `ramp` is where it begins and that of spikes is the one outside of them;
`diurnal` and `measured` have it as their mean over a whole period."""

CLIENTS_SETTINGS = "model=m-large, pauses=0"
"""Settings of `clients`, ServeGen's callers side by side: keys and sizes come from them too."""


def stream(
    arrivals: str = "poisson",
    *,
    rate: float,
    duration_s: float,
    cv: float = 3.0,
    prompt_tokens: str = "512",
    output_tokens: str = "128",
    sizes_from: str | None = None,
    keys: int = 1,
    key_skew: float = 0.0,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Arrivals with sizes and keys, in time order, drawn as they are asked for. The same seed gives the same.

    Sizes are texts of `Sizes`, or pairs drawn from those of a trace (`sizes_from`: a shipped name or a file). Requests
    are spread over `keys` keys `k0`, `k1`, … in proportion to `1 / rank ** key_skew`. `clients` brings its own of both.
    `cv` is the default of `gamma`. Raises UsageError at once for what makes no sense.
    """
    return filled(
        moments(arrivals, rate=rate, duration_s=duration_s, cv=cv, seed=seed),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        sizes_from=sizes_from,
        keys=keys,
        key_skew=key_skew,
        seed=seed,
    )


def moments(arrivals: str, *, rate: float, duration_s: float, cv: float = 3.0, seed: int = 0) -> Iterator[Arrival]:
    """When requests come, in time order, drawn as they are asked for; sizes and keys are set only by `clients`.

    Raises UsageError at once for a text, a rate or a duration that makes no sense.
    """
    if not 0 < rate < math.inf or not 0 < duration_s < math.inf:
        raise UsageError(f"arrivals need a rate and a duration above 0, not {rate:g} per second for {duration_s:g} s")
    name, take = _read(arrivals, cv)
    if name == "clients":
        callers = population(take.text("model", "m-large")).scaled(rate)
        pauses = bool(take.number("pauses", 0.0, 0.0, 1.0))
        take.end(CLIENTS_SETTINGS)
        return callers.stream(duration_s, seed, pauses=pauses)
    pacer = SHAPES[name].pacer(take, rate, duration_s)
    take.end(SHAPES[name].settings)
    offsets = pacer.offsets_s(Random(f"{seed}/arrivals"))
    return (Arrival(int(offset_s * NS_PER_S), "load") for offset_s in offsets)


def filled(
    arrivals: Iterable[Arrival],
    *,
    prompt_tokens: str = "512",
    output_tokens: str = "128",
    sizes_from: str | None = None,
    keys: int = 1,
    key_skew: float = 0.0,
    seed: int = 0,
) -> Iterator[Arrival]:
    """The arrivals with what they lack: sizes and keys, drawn as `stream` tells. Raises UsageError at once."""
    if keys < 1 or not 0 <= key_skew <= 10:
        raise UsageError("requests have at least 1 key, with a skew within 0 and 10")
    prompts, outputs = Sizes.parse(prompt_tokens), Sizes.parse(output_tokens)
    pairs = None if sizes_from is None else sizes_of(sizes_from)
    sizes, chance = Random(f"{seed}/sizes"), Random(f"{seed}/keys")

    def size() -> tuple[int, int]:
        return (prompts.draw(sizes), outputs.draw(sizes)) if pairs is None else sizes.choice(pairs)

    shares = list(accumulate(1.0 / (rank + 1) ** key_skew for rank in range(keys)))

    def key() -> str:
        if keys == 1:
            return ""
        return f"k{chance.randrange(keys) if not key_skew else bisect(shares, chance.random() * shares[-1])}"

    def whole() -> Iterator[Arrival]:
        for arrival in arrivals:
            prompt, output = arrival.prompt_tokens, arrival.output_tokens
            if prompt is None or output is None:
                some_prompt, some_output = size()
                prompt, output = prompt or some_prompt, output or some_output
            yield arrival._replace(prompt_tokens=prompt, output_tokens=output, key=arrival.key or key())

    return whole()


def check_arrivals(text: str) -> None:
    """Raise UsageError when the text names no kind of arrivals, or settings that it does not know."""
    name, take = _read(text, 3.0)
    if name == "clients":
        population(take.text("model", "m-large"))
        take.number("pauses", 0.0, 0.0, 1.0)
        take.end(CLIENTS_SETTINGS)
    else:
        SHAPES[name].pacer(take, 1.0, 1.0)
        take.end(SHAPES[name].settings)


def _read(text: str, cv: float) -> tuple[str, Settings]:
    name, _, rest = text.partition(":")
    name = name.strip()
    if name not in SHAPES and name != "clients":
        known = [*SHAPES, "clients"]
        close = get_close_matches(name, known, 1)
        raise UsageError(f"no arrivals {name!r}: " + (f"is {close[0]} meant?" if close else f"use {', '.join(known)}"))
    given: dict[str, str] = {"cv": f"{cv!r}"} if name == "gamma" else {}
    for part in rest.split(",") if rest.strip() else ():
        setting, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise UsageError(f"arrivals {name}: {part.strip()!r} is not SETTING=VALUE")
        given[setting.strip()] = value.strip()
    return name, Settings(name, given)
