"""Many callers at once, each with its own rate, burstiness and sizes, as Alibaba's ServeGen measured them.

The table that ships gives, for the clients of five models, the mean rate, the share of time in which the client sends
at all, the variation of its gaps, and quantiles of its prompt and output sizes.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import NamedTuple

from forebay.errors import UsageError
from forebay.workload.arrival import NS_PER_S, Arrival
from forebay.workload.pacer import Table
from forebay.workload.sizes import MAX_TOKENS
from forebay.workload.trace import shipped_folder
from forebay.workload.tracefile import plain_name

WINDOW_S = 600.0
"""A client is active or silent for a window at a time, as it was measured."""

CV_MAX = 20.0
"""A few clients of very low rate were measured as burstier: within a run they would be one burst, or nothing."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Token counts by their median, 90th and 99th percentile, log-linear between, and with about the given mean.

    The lower half reaches down to whatever brings the mean closest, the last percent up to `p99²/p90`.
    """

    least: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def fitted(cls, mean: float, p50: float, p90: float, p99: float) -> Quantiles:
        """The distribution of these figures. The mean is met where the quantiles allow it."""
        p50 = max(1.0, p50)
        p90 = max(p50, p90)
        p99 = max(p90, p99)
        above = 0.4 * _mean_between(p50, p90) + 0.09 * _mean_between(p90, p99)
        rest = (mean - above - 0.01 * _mean_between(p99, _most(p90, p99))) / 0.5
        low, high = 1.0, p50
        for _ in range(40):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if _mean_between(middle, p50) < rest else (low, middle)
        return cls(low, p50, p90, p99)

    def draw(self, rng: Random) -> int:
        """One size in tokens, at least 1."""
        at = rng.random()
        size: float
        if at < 0.5:
            size = self.least * (self.p50 / self.least) ** (at / 0.5)
        elif at < 0.9:
            size = self.p50 * (self.p90 / self.p50) ** ((at - 0.5) / 0.4)
        elif at < 0.99:
            size = self.p90 * (self.p99 / self.p90) ** ((at - 0.9) / 0.09)
        else:
            size = self.p99 * (_most(self.p90, self.p99) / self.p99) ** ((at - 0.99) / 0.01)
        return min(MAX_TOKENS, max(1, round(size)))

    @property
    def mean(self) -> float:
        """Mean in tokens."""
        return (
            0.5 * _mean_between(self.least, self.p50)
            + 0.4 * _mean_between(self.p50, self.p90)
            + 0.09 * _mean_between(self.p90, self.p99)
            + 0.01 * _mean_between(self.p99, _most(self.p90, self.p99))
        )


def _most(p90: float, p99: float) -> float:
    return min(p99 * p99 / p90, 4.0 * p99)


def _mean_between(low: float, high: float) -> float:
    """Mean of what is uniform in its logarithm."""
    return low if high <= low * (1.0 + 1e-9) else (high - low) / math.log(high / low)


@dataclass(frozen=True, slots=True)
class Client:
    """One caller: `rate` requests per second on average, `cv` of its gaps, the share of time in which it sends."""

    name: str
    rate: float
    cv: float
    active_share: float
    prompt_tokens: Quantiles
    output_tokens: Quantiles


class _Request(NamedTuple):
    at_s: float
    client: Client
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Population:
    """Callers that send side by side, none knowing of the others."""

    clients: tuple[Client, ...]

    @property
    def rate(self) -> float:
        """Requests per second of all together."""
        return math.fsum(client.rate for client in self.clients)

    def scaled(self, rate: float) -> Population:
        """The same callers at another total rate: their shares and the variation of their gaps stay."""
        if not 0 < rate < math.inf:
            raise UsageError(f"a population cannot send {rate:g} requests per second")
        factor = rate / self.rate
        return Population(tuple(replace(client, rate=client.rate * factor) for client in self.clients))

    def stream(self, duration_s: float, seed: int, *, pauses: bool = False) -> Iterator[Arrival]:
        """All requests in time order, drawn as they are asked for.

        Each caller draws from its own streams of chance: to leave one out changes no other. `pauses`: a caller is
        silent for whole windows of 10 minutes, as often as it was, and faster in the others. Otherwise all send
        throughout, and the total rate is what it says even in a short run.
        """
        streams = [self._requests(client, duration_s, seed, pauses) for client in self.clients]
        for request in heapq.merge(*streams, key=_at_s):
            at_ns = int(request.at_s * NS_PER_S)
            yield Arrival(at_ns, "load", request.prompt_tokens, request.output_tokens, request.client.name)

    @staticmethod
    def _requests(client: Client, duration_s: float, seed: int, pauses: bool) -> Iterator[_Request]:
        arrivals, sizes = (Random(f"{seed}/{client.name}/{what}") for what in ("arrivals", "sizes"))
        rates: tuple[float, ...] = (client.rate,)
        if pauses:
            share = client.active_share
            windows = Random(f"{seed}/{client.name}/windows")
            count = math.ceil(duration_s / WINDOW_S)
            rates = tuple(client.rate / share if windows.random() < share else 0.0 for _ in range(count))
            if not any(rates):
                return
        for at_s in Table(rates, WINDOW_S, duration_s, client.cv).offsets_s(arrivals):
            yield _Request(at_s, client, client.prompt_tokens.draw(sizes), client.output_tokens.draw(sizes))


def _at_s(request: _Request) -> float:
    return request.at_s


@cache
def population(model: str) -> Population:
    """The measured callers of one of ServeGen's models. Raises UsageError for another name.

    Sizes of some callers were not published: they take those of the caller nearest in rate that has some.
    """
    with (shipped_folder() / "servegen_clients.csv").open(encoding="utf-8") as file:
        table = [row for row in csv.DictReader(file) if plain_name(row["model"]) == plain_name(model)]
    if not table:
        raise UsageError(f"no callers of a model {model!r} were measured: {', '.join(models())} are there")
    sized = [row for row in table if row["prompt_mean"] and row["output_mean"]]
    clients = []
    for row in table:
        rate = float(row["mean_rps"])
        if rate <= 0:
            continue
        like = row if row in sized else min(sized, key=lambda other: abs(math.log(_rate(other) / rate)))
        clients.append(
            Client(
                name=f"client-{row['client_id']}",
                rate=rate,
                cv=min(CV_MAX, max(0.1, float(row["cv_rate_weighted"] or 1.0))),
                active_share=max(float(row["active_share"]), 1e-3),
                prompt_tokens=_sizes(like, "prompt"),
                output_tokens=_sizes(like, "output"),
            )
        )
    return Population(tuple(clients))


@cache
def measured_rates(model: str) -> tuple[float, ...]:
    """Requests per second of all callers of a model, one figure per 10 minutes. Raises UsageError for another name."""
    with gzip.open(shipped_folder() / "servegen_rates_10min.csv.gz", "rt", encoding="utf-8") as file:
        table = [float(row["rps"]) for row in csv.DictReader(file) if plain_name(row["model"]) == plain_name(model)]
    if not table:
        raise UsageError(f"no rates of a model {model!r} were measured: {', '.join(models())} are there")
    return tuple(table)


@cache
def models() -> tuple[str, ...]:
    """The models whose callers were measured."""
    with (shipped_folder() / "servegen_clients.csv").open(encoding="utf-8") as file:
        return tuple(dict.fromkeys(row["model"] for row in csv.DictReader(file)))


def _rate(row: dict[str, str]) -> float:
    return max(1e-9, float(row["mean_rps"]))


def _sizes(row: dict[str, str], what: str) -> Quantiles:
    mean, p50, p90, p99 = (float(row[f"{what}_{figure}"]) for figure in ("mean", "p50", "p90", "p99"))
    return Quantiles.fitted(mean, p50, p90, p99)
