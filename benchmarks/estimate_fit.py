"""The prices of bytes: fits them to five tokenizers and prints, or writes, the tables of the gateway.

``python -m benchmarks.estimate_fit --write`` replaces the generated part of ``forebay/core/admission/byte_prices.py``.
Only the ``fit`` half of the texts is seen, and the tokenizers have one vote each: what is left of a tokenizer's own
habits is what the gateway learns from its engines.
"""

from __future__ import annotations

import textwrap
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import click
import numpy as np

from benchmarks.estimate_judges import judges
from benchmarks.estimate_texts import bodies, oddities, texts
from forebay.core.admission.byte_prices import PRICE_BELOW, PRICE_SCALE
from forebay.core.model import ByteClass
from forebay.ingress.http.peek import FRAME_BYTES, peek

TABLES: Final = {
    "ascii": {ByteClass.ASCII},
    "utf8": {ByteClass.LATIN, ByteClass.ALPHABET, ByteClass.INDIC, ByteClass.WIDE},
    "escaped_latin": {ByteClass.ESCAPED_LATIN},
    "escaped_alphabet": {ByteClass.ESCAPED_ALPHABET},
    "escaped_indic": {ByteClass.ESCAPED_INDIC},
    "escaped_wide": {ByteClass.ESCAPED_WIDE},
}
GROUPS: Final = (
    range(97, 123), range(65, 91), range(48, 58), (32,), (92,), (34,),
    [b for b in range(33, 127) if not chr(b).isalnum() and b not in {34, 92}],
    range(0x80, 0xC0), range(0xC2, 0xE0), range(0xE0, 0xE4), range(0xE4, 0xEA), range(0xEA, 0xF0), range(0xF0, 0xF5),
)  # fmt: skip
"""Bytes of a kind: a byte that hardly occurs in the texts is priced as its kind."""

FOUR_BYTE_LEADS, FOUR_BYTES = slice(0xF0, 0xF5), 1.5  # emoji and rare ideographs are too rare here to show their price
DIGITS, DIGIT = slice(48, 58), 0.55  # one token each with some tokenizers, a third with others: at least the middle
MOST: Final = 63 / PRICE_SCALE - PRICE_BELOW
PULL: Final = 0.3  # towards the price of the kind, in units of one body
SWEEPS: Final = 200
BODIES_PER_KIND: Final = 600
ODDITIES_EACH: Final = 20  # bodies of digits, spaces and the like: few, so that they bound prices and do not set them
BEGIN, END = "# generated: prices\n", "# end: prices\n"
PAGE: Final = Path(__file__).parents[1] / "src" / "forebay" / "core" / "admission" / "byte_prices.py"


def _least_squares(rows: np.ndarray, prior: np.ndarray, pull: float, floor: np.ndarray | float) -> np.ndarray:
    """Weights with which every row sums to about 1, within what a table can hold, by coordinate descent."""
    normal = rows.T @ rows + pull * np.eye(rows.shape[1])
    wanted = rows.sum(axis=0) + pull * prior
    weights, least = prior.copy(), np.broadcast_to(floor, prior.shape)
    for _ in range(SWEEPS):
        for at in range(len(weights)):
            step = (wanted[at] - normal[at] @ weights) / normal[at, at]
            weights[at] = min(MOST, max(least[at], weights[at] + step))
    return weights


def _table(counts: np.ndarray, tokens: np.ndarray, floor: np.ndarray) -> bytes:
    """The price of each byte from how often it occurs in each body, and the tokens of each body by each judge."""
    rows = np.vstack([counts / tokens[:, judge : judge + 1] for judge in range(tokens.shape[1])])
    grouped = np.stack([rows[:, list(group)].sum(axis=1) for group in GROUPS], axis=1)
    group_prices = _least_squares(grouped, np.full(len(GROUPS), 0.3), 0.01, 0.0)
    prior = np.full(256, 0.3)
    for group, price in zip(GROUPS, group_prices, strict=True):
        prior[list(group)] = price
    prices = _least_squares(rows, prior, PULL, floor)
    prices[FOUR_BYTE_LEADS] = FOUR_BYTES
    return bytes(np.round((prices + PRICE_BELOW) * PRICE_SCALE).astype(np.uint8))


def fit(seed: int) -> dict[str, bytes]:
    """A table of 256 prices per spelling."""
    rng, judged = Random(seed), judges()
    samples: dict[str, list[tuple[np.ndarray, list[int]]]] = {name: [] for name in TABLES}
    makers = [(make, BODIES_PER_KIND * (3 if kind == "languages" else 1)) for kind, make in texts("fit").items()]
    makers += [(make, ODDITIES_EACH) for make in oddities().values()]
    for make, times in makers:
        for _ in range(times):
            body, contents = bodies(rng, partial(make, rng), escaped=rng.random() < 0.5)
            tokens = [judge(contents) for judge in judged.values()]
            byte_class = peek(body).byte_class
            name = next(name for name, classes in TABLES.items() if byte_class in classes)
            counts = np.bincount(np.frombuffer(body, np.uint8), minlength=256) * (1 - FRAME_BYTES / len(body))
            samples[name].append((counts, tokens))
    tables = {}
    for name, found in samples.items():
        floor = np.full(256, -PRICE_BELOW)
        if name in {"ascii", "utf8"}:  # in the others digits spell escapes
            floor[DIGITS] = DIGIT
        counted, tokens = zip(*found, strict=True)
        tables[name] = _table(np.array(counted), np.array(tokens, float), floor)
    return tables


def source(tables: dict[str, bytes]) -> str:
    """The tables as Python."""
    lines = [BEGIN]
    for name, table in tables.items():
        rows = "\n".join(f"    {row}" for row in textwrap.wrap(table.hex(), 112))
        lines.append(f'{name.upper()} = bytes.fromhex(\n    """\n{rows}\n    """\n)\n')
    return "".join([*lines, END])


@click.command(help=__doc__)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--write", is_flag=True, help="Replace the tables of the gateway.")
def main(seed: int, write: bool) -> None:
    made = source(fit(seed))
    if not write:
        click.echo(made, nl=False)
        return
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + made + after)


if __name__ == "__main__":
    main()
