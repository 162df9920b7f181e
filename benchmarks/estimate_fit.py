"""The prices of bytes: fits them to five tokenizers and prints, or writes, the tables of the gateway.

``python -m benchmarks.estimate_fit --write`` replaces the generated part of ``forebay/core/admission/byte_prices.py``. Only
the ``fit`` half of the texts is seen, and the tokenizers have one vote each: what is left of a tokenizer's own habits is
what the gateway learns from its engines.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from random import Random
from typing import Final

import click
import numpy as np

from benchmarks.estimate_judges import judges
from benchmarks.estimate_texts import bodies, oddities, texts
from forebay.core.admission.byte_prices import PRICE_SCALE
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

FOUR_BYTE_LEADS: Final = slice(0xF0, 0xF5)  # emoji and rare ideographs: a whole token at least, too rare here to show it
PULL: Final = 0.3  # towards the price of the kind, in units of one body
SWEEPS: Final = 200
BODIES_PER_KIND: Final = 600
ODDITIES_EACH: Final = 20  # bodies of digits, spaces and the like: few, so that they bound prices and do not set them
BEGIN, END = "# generated: prices\n", "# end: prices\n"
PAGE: Final = Path(__file__).parents[1] / "src" / "forebay" / "core" / "admission" / "byte_prices.py"


def _least_squares(rows: np.ndarray, prior: np.ndarray, pull: float) -> np.ndarray:
    """Weights from 0 to 1 with which every row sums to about 1, by coordinate descent."""
    normal = rows.T @ rows + pull * np.eye(rows.shape[1])
    wanted = rows.sum(axis=0) + pull * prior
    weights = prior.copy()
    for _ in range(SWEEPS):
        for at in range(len(weights)):
            step = (wanted[at] - normal[at] @ weights) / normal[at, at]
            weights[at] = min(1.0, max(0.0, weights[at] + step))
    return weights


def _table(counts: np.ndarray, tokens: np.ndarray) -> bytes:
    """The price of each byte from how often it occurs in each body, and the tokens of each body by each judge."""
    rows = np.vstack([counts / tokens[:, judge : judge + 1] for judge in range(tokens.shape[1])])
    grouped = np.stack([rows[:, list(group)].sum(axis=1) for group in GROUPS], axis=1)
    group_prices = _least_squares(grouped, np.full(len(GROUPS), 0.3), 0.01)
    prior = np.full(256, 0.3)
    for group, price in zip(GROUPS, group_prices, strict=True):
        prior[list(group)] = price
    prices = _least_squares(rows, prior, PULL)
    prices[FOUR_BYTE_LEADS] = 1.0
    return bytes(np.clip(np.round(prices * PRICE_SCALE), 0, PRICE_SCALE - 1).astype(np.uint8))


def fit(seed: int) -> dict[str, bytes]:
    """A table of 256 prices per spelling."""
    rng, judged = Random(seed), judges()
    samples: dict[str, list[tuple[np.ndarray, list[int]]]] = {name: [] for name in TABLES}
    makers = [(make, BODIES_PER_KIND * (3 if kind == "languages" else 1)) for kind, make in texts("fit").items()]
    makers += [(make, ODDITIES_EACH) for make in oddities().values()]
    for make, times in makers:
        for _ in range(times):
            body, contents = bodies(rng, lambda size, make=make: make(rng, size), escaped=rng.random() < 0.5)
            tokens = [judge(contents) for judge in judged.values()]
            byte_class = peek(body).byte_class
            name = next(name for name, classes in TABLES.items() if byte_class in classes)
            counts = np.bincount(np.frombuffer(body, np.uint8), minlength=256) * (1 - FRAME_BYTES / len(body))
            samples[name].append((counts, tokens))
    return {
        name: _table(np.array([counts for counts, _ in found]), np.array([tokens for _, tokens in found], float))
        for name, found in samples.items()
    }


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
