"""Fills the generated tables of README.md: the demo's from its results, the peers' from docs/benchmarks.md.

python scripts/readme_table.py out/demo.json
"""

import sys
from itertools import dropwhile, takewhile
from pathlib import Path

import msgspec

from forebay.report.results import Results
from forebay.report.table import COLUMNS, cells, stretches

ROOT = Path(__file__).parents[1]


def demo_table(results: Results) -> str:
    """Every phase and the whole, one line per mode, under a line that says where it was measured."""
    environment = results.environment
    machine = f"{environment.machine}, {environment.cpus} cores"
    lines = [
        f"Measured by `make demo` at {environment.at} on {machine}, commit `{environment.commit[:12]}`:",
        "",
        f"| load | mode | {' | '.join(COLUMNS)} |",
        f"|---|---|{'---:|' * len(COLUMNS)}",
    ]
    for name, figures in stretches(results.runs):
        for run, one in zip(results.runs, figures, strict=True):
            lines.append(f"| {name} | {run.mode} | {' | '.join(cells(one))} |")
    return "\n".join(lines)


def peer_table(page: str) -> str:
    """Provenance and first table of the generated section about proxies."""
    section = page.partition("<!-- generated: proxy -->")[2].partition("<!-- end: proxy -->")[0].strip().splitlines()
    head = list(takewhile(lambda line: not line.startswith("|"), section))
    rows = list(takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: not line.startswith("|"), section)))
    return "\n".join(head + rows)


def fill(page: str, name: str, body: str) -> str:
    """The page with what stands between the markers of `name` replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"README.md has no {begin} … {end}")
    return f"{before}{begin}\n{body}\n{end}{after}"


def main(arguments: list[str]) -> None:
    """Rewrite README.md."""
    readme = ROOT / "README.md"
    page = readme.read_text("utf-8")
    for path in arguments:
        page = fill(page, "demo-table", demo_table(msgspec.json.decode(Path(path).read_bytes(), type=Results)))
    page = fill(page, "peer-table", peer_table((ROOT / "docs" / "benchmarks.md").read_text("utf-8")))
    readme.write_text(page, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
