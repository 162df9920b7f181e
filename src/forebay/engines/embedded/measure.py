"""Measures the embedded engine on this machine: `python -m forebay.engines.embedded.measure`.

Prints load time, decode speed per batch size, prompt speed and resident memory. The best of several runs counts: on a
shared machine the fastest run is the one least disturbed.
"""

from __future__ import annotations

import time
from pathlib import Path

import click

from forebay.engines.embedded import pin_blas

pin_blas()

from forebay.engines.embedded.gguf import GgufFile  # noqa: E402
from forebay.engines.embedded.model import Model, Shape, load_weights  # noqa: E402
from forebay.engines.embedded.scheduler import Sequence, Span, Want  # noqa: E402
from forebay.engines.embedded.tokenizer import Tokenizer  # noqa: E402
from forebay.engines.embedded.weights import fetch  # noqa: E402

BATCHES = (1, 2, 4, 8, 16, 32)
CHUNKS = (32, 64, 128, 256)


def _resident_mb() -> float:
    """Resident memory now, in MB; 0 where /proc does not tell."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def _best_s(model: Model, spans: list[Span], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        model.forward(spans)
        best = min(best, time.perf_counter() - began)
    return best


def _span(slot: int, start: int, tokens: list[int]) -> Span:
    return Span(Sequence(str(slot), tokens, 1, None), slot, start, tokens, Want.TOKEN)


@click.command()
@click.option("--model", "path", type=click.Path(path_type=Path), help="A GGUF file; by default the bundled model.")
@click.option("--context", default=512, show_default=True, help="Tokens per sequence.")
@click.option("--length", default=100, show_default=True, help="Tokens that each sequence has in the cache.")
@click.option("--threads", default=2, show_default=True, help="CPU threads.")
@click.option("--repeats", default=10, show_default=True, help="Runs per figure.")
def main(path: Path | None, context: int, length: int, threads: int, repeats: int) -> None:
    """Load time, tokens per second by batch size, prompt tokens per second, memory."""
    path = path or fetch(click.echo)
    began = time.perf_counter()
    with GgufFile(path) as file:
        shape = Shape.from_gguf(file.metadata)
        Tokenizer.from_gguf(file.metadata)
        weights = load_weights(file, shape)
    model = Model(shape, weights, max(BATCHES), context, threads)
    click.echo(f"load {time.perf_counter() - began:.2f} s, resident {_resident_mb():.0f} MB")
    for slot in range(max(BATCHES)):
        model.forward([_span(slot, 0, [1] * length)])
    for batch in BATCHES:
        took = _best_s(model, [_span(slot, length, [1]) for slot in range(batch)], repeats)
        click.echo(f"decode batch {batch:2d}: {took * 1e3:6.1f} ms/step {batch / took:6.0f} tok/s")
    for chunk in CHUNKS:
        took = _best_s(model, [_span(0, 0, [1] * chunk)], max(2, repeats // 3))
        click.echo(f"prompt chunk {chunk:3d}: {took * 1e3:6.1f} ms {chunk / took:6.0f} tok/s")
    click.echo(f"resident {_resident_mb():.0f} MB with {max(BATCHES)} sequences of {length} tokens")


if __name__ == "__main__":
    main()
