"""What a GPU costs: dated quotes from a CSV file, the median of the current ones, and prices set by hand."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TextIO

import msgspec

from forebay.errors import UsageError

BASES = ("on-demand", "marketplace", "serverless", "reservation", "interruptible", "index", "superseded")
USED = frozenset({"on-demand", "marketplace"})
"""Bases at which a fleet that runs all the time can be had."""

USD_PER_HOUR_MOST = 1000.0
"""Above this a price is a node's, a month's or a slip, not a GPU's per hour."""

HOURS_PER_MONTH = 730.0
CURRENT_MONTHS = 12
_DATE = re.compile(r"(\d{4})(?:-(?:(\d{2})(?:-(\d{2}))?|Q([1-4])))?")


class Quote(msgspec.Struct, frozen=True):
    """One price somebody named. `gpu` is normalised; `as_of` is empty when undated."""

    gpu: str
    provider: str
    usd_per_hour: float
    basis: str
    as_of: str


class Price(msgspec.Struct, frozen=True):
    """What one GPU costs per hour in US dollars, the range of the quotes behind it, and their dates."""

    gpu: str
    usd_per_hour: float
    low: float
    high: float
    quotes: int
    as_of: str
    basis: str


def card(name: str) -> str:
    """One spelling of a GPU's name: `H100-SXM-80G`, `H100-80G-SXM` and `h100-80gb` are all `h100-80g`."""
    parts = [re.sub(r"^(\d+)gb?$", r"\1g", part) for part in name.strip().lower().replace("_", "-").split("-")]
    kept = [part for part in parts if part not in ("sxm", "sxm4", "sxm5", "nvidia", "")]
    return {"t4": "t4-16g", "a30": "a30-24g"}.get("-".join(kept), "-".join(kept))


@dataclass(frozen=True, slots=True)
class PriceBook:
    """Quotes, and prices that the user set, which go before them. `provider` narrows to one provider's quotes."""

    quotes: Sequence[Quote]
    given: Mapping[str, float] = field(default_factory=dict)
    provider: str | None = None
    origin: str = "shipped quotes"

    def price(self, gpu: str) -> Price | None:
        """The price of a GPU in `card` spelling; None when there is no current quote."""
        name = self.given_for(gpu)
        if name is not None:
            usd = self.given[name]
            return Price(gpu, usd, usd, usd, 0, "", "given with --price")
        newest = _newest(self._current(gpu))
        if not newest:
            return None
        amounts = sorted(quote.usd_per_hour for quote in newest)
        dates = sorted((quote.as_of for quote in newest), key=_month)
        as_of = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        count = f"median of {len(newest)} providers" if len(newest) > 1 else f"one quote, {newest[0].provider}"
        return Price(gpu, statistics.median(amounts), amounts[0], amounts[-1], len(newest), as_of, count)

    def given_for(self, gpu: str) -> str | None:
        """The name of the price that the user set for a GPU: its own, or its beginning, as `h100` for `h100-80g`."""
        names = [name for name in self.given if gpu == name or gpu.startswith(f"{name}-")]
        return max(names, key=len, default=None)

    def _current(self, gpu: str) -> list[Quote]:
        latest = max((_month(quote.as_of) for quote in self.quotes), default=0)
        return [
            quote
            for quote in self.quotes
            if quote.gpu == gpu
            and quote.basis in USED
            and (not quote.as_of or _month(quote.as_of) > latest - CURRENT_MONTHS)
            and (self.provider is None or self._same_shop(quote.provider))
        ]

    def _same_shop(self, provider: str) -> bool:
        assert self.provider is not None
        return provider.lower().startswith(self.provider.lower())


def price_book(path: Path | None = None, given: Iterable[str] = (), provider: str | None = None) -> PriceBook:
    """The shipped quotes or those of `path`, with prices from `gpu=usd` texts. Raises UsageError for bad ones."""
    if path is None:
        source = files("forebay") / "data" / "prices" / "gpu_prices.csv"
        quotes = _read(io.StringIO(source.read_text(encoding="utf-8"), newline=""), "gpu_prices.csv")
    else:
        try:
            with path.open("r", encoding="utf-8-sig", newline="") as file:
                quotes = _read(file, str(path))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError(f"{path}: cannot be read as prices: {reason or error}") from None
    shops = sorted({quote.provider for quote in quotes if quote.provider})
    if provider is not None and not any(shop.lower().startswith(provider.lower()) for shop in shops):
        raise UsageError(f"--provider {provider}: no quote is of that provider; there are {', '.join(shops) or 'none'}")
    return PriceBook(quotes, dict(map(_given, given)), provider, "shipped quotes" if path is None else str(path))


def _given(text: str) -> tuple[str, float]:
    name, separator, amount = text.partition("=")
    if not separator or not name.strip():
        raise UsageError(f"--price {text}: use GPU=USD, for example h100-80g=2.40")
    return card(name), _amount(amount, f"--price {text}")


def _read(file: TextIO, name: str) -> list[Quote]:
    reader = csv.DictReader(file, strict=True)
    quotes = []
    try:
        columns = {(column or "").strip().lower() for column in reader.fieldnames or ()}
        for needed in ("gpu", "usd_per_hour"):
            if needed not in columns:
                found = ", ".join(sorted(columns)) or "nothing"
                raise UsageError(f"{name}, line 1: no column `{needed}` (found: {found})")
        for row in reader:
            clean = {(key or "").strip().lower(): value.strip() for key, value in row.items() if isinstance(value, str)}
            quotes.append(_quote(clean, f"{name}, line {reader.line_num}"))
    except csv.Error as error:
        raise UsageError(f"{name}, line {reader.line_num}: {error}") from None
    if not quotes:
        raise UsageError(f"{name}: there is no price in it")
    return quotes


def _quote(row: Mapping[str, str], where: str) -> Quote:
    gpu = row.get("gpu", "")
    if not gpu:
        raise UsageError(f"{where}, gpu: it is empty")
    basis = row.get("basis", "").lower() or "on-demand"
    if basis not in BASES:
        raise UsageError(f"{where}, basis: {basis!r} is none of {', '.join(BASES)}")
    as_of = row.get("as_of", "")
    if as_of and not _month(as_of):
        raise UsageError(f"{where}, as_of: {as_of!r} is no date; use 2026-05-07, 2026-05 or 2026-Q1")
    usd = _amount(row.get("usd_per_hour", ""), f"{where}, usd_per_hour")
    return Quote(card(gpu), row.get("provider", ""), usd, basis, as_of)


def _amount(text: str, where: str) -> float:
    try:
        usd = float(text)
    except ValueError:
        raise UsageError(f"{where}: {text.strip()!r} is no amount of US dollars") from None
    if not math.isfinite(usd) or usd <= 0:
        raise UsageError(f"{where}: a price must be above 0, got {text.strip()}")
    if usd > USD_PER_HOUR_MOST:
        raise UsageError(f"{where}: {usd:g} USD per GPU and hour is above {USD_PER_HOUR_MOST:g}; is it a node's price?")
    return usd


def _month(as_of: str) -> int:
    """Months since year 0, of the end of a quarter or year; 0 for what is no date."""
    shape = _DATE.fullmatch(as_of)
    if shape is None:
        return 0
    year, month, _, quarter = shape.groups()
    number = int(month) if month else 3 * int(quarter) if quarter else 12
    return 12 * int(year) + number if 1 <= number <= 12 else 0


def _newest(quotes: Sequence[Quote]) -> list[Quote]:
    """The newest quote of each provider, so that one that is quoted often does not weigh more."""
    best: dict[str, Quote] = {}
    for index, quote in enumerate(quotes):
        shop = quote.provider.lower() or f"#{index}"
        if shop not in best or (_month(quote.as_of), quote.as_of) > (_month(best[shop].as_of), best[shop].as_of):
            best[shop] = quote
    return list(best.values())
