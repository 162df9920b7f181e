"""The frontiers of the admission study as a picture: refused requests, and refused tokens, over the p99 they buy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.admission_frontier import Spot, frontier
from benchmarks.admission_tables import TITLES
from benchmarks.admission_trials import VARIANT_LOAD

STYLES: Final = {
    "requests": ("#444444", "-", "o"),
    "tokens": ("#0072b2", "-", "s"),
    "tokens, blind": ("#56b4e9", "--", "^"),
    "guarded": ("#d55e00", "-", "D"),
    "requests per key": ("#999999", ":", "x"),
    "tokens per key": ("#009e73", ":", "+"),
}
"""Colours that differ for everybody, and marks for who prints in grey."""
FROM_MS, TO_MS = 80.0, 8000.0


def draw(result: Mapping[str, Any], path: Path) -> bool:
    """Writes the picture of one load. False when matplotlib is not there."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "forebay", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    cases = [case for case in result["cases"] if case["load"] == VARIANT_LOAD and not case["variant"]]
    figure, grid = plt.subplots(2, len(cases), figsize=(4 * len(cases), 6.4), sharex=True, sharey=True, squeeze=False)
    for column, case in enumerate(cases):
        for (name, points), row in ((one, row) for one in case["policies"].items() for row in (0, 1)):
            colour, line, mark = STYLES[name]
            best = _best(points)
            share = [100.0 * (spot.refused, spot.tokens_refused)[row] for spot in best]
            at_ms = [spot.p99_ms for spot in best]
            grid[row][column].plot(at_ms, share, line, color=colour, marker=mark, markersize=4, label=TITLES[name])
        grid[0][column].set_title(case["trace"])
        grid[1][column].set_xlabel("p99 of the first token, ms")
    for panel in grid.flat:
        panel.set_xscale("log")
        panel.set_xlim(FROM_MS, TO_MS)
        panel.set_ylim(0, 100)
        panel.grid(alpha=0.3)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:,.0f}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
    grid[0][0].set_ylabel("refused requests, %")
    grid[1][0].set_ylabel("refused tokens, %")
    grid[0][0].legend(loc="lower left", fontsize=7.5)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return True


def _best(points: list[Mapping[str, Any]]) -> list[Spot]:
    return frontier(
        Spot(one["ttft_p99_ms"], one["refused"], one["tokens_refused"], one["setting"])
        for one in points
        if one["ttft_p99_ms"] is not None
    )
