"""What becomes of the article's claims when they are tried: the figures behind ``docs/article-claims.md``.

``python -m benchmarks.article`` (or ``make bench NAME=article``) computes, runs and simulates every one, prints the
tables, writes ``benchmarks/results/article-DATE.json`` and the generated section of the page; some four minutes. The
same seeds give the same figures; only the pauses of the official clients (``sdk``) depend on the machine.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from benchmarks import article_code as code
from benchmarks import article_figures as figures
from benchmarks import article_runs as runs
from benchmarks import article_sdk, environment, publish, tables
from benchmarks.article_runs import Row
from benchmarks.peers import ROOT

PAGE: Final = publish.DOCS / "article-claims.md"
TRACES: Final = (runs.CONV, runs.CODE, runs.MLARGE)


@dataclass(frozen=True, slots=True)
class Claim:
    """One set of figures: what is shown, and how it is had."""

    title: str
    rows: Callable[[], list[Row]]


def curve() -> list[Row]:
    """The bands, the hyperbola nearest to them, and the gain per request up to each size."""
    fit = figures.hyperbola()
    middles = {batch: sum(band) / 2 for batch, band in figures.BANDS.items()}
    gains = [None, *figures.slopes(middles)]
    return [
        {
            "batch": batch,
            "article %": f"{low}–{high}",
            f"b/(b+{fit.half:.2f}) %": fit.percent[batch],
            "residual to the middle": fit.percent[batch] - middles[batch],
            "points per request since the last": gain,
        }
        for (batch, (low, high)), gain in zip(figures.BANDS.items(), gains, strict=True)
    ]


def series() -> list[Row]:
    """Measured engines beside the bands."""
    return [
        {
            "series": one.name.replace(",", ""),
            "inside": f"{one.inside} of {one.of}",
            "concave": one.concave,
            "% of peak FLOPS at 32": one.flops,
        }
        for one in figures.measured_series()
    ]


def estimate() -> list[Row]:
    """Four characters to a token, with the vocabulary of the embedded model; nothing when it was never fetched."""
    from forebay.engines.embedded import weights
    from forebay.engines.embedded.gguf import GgufFile
    from forebay.engines.embedded.tokenizer import Tokenizer

    path = weights.cached()
    if path is None:
        return [{"text": "not measured: the model is fetched by `make demo`"}]
    with GgufFile(path) as file:
        encode = Tokenizer.from_gguf(file.metadata).encode
    return [
        {"text": name, "characters per token": ratio, "error of len // 4, %": error}
        for name, ratio, error in figures.four_characters(encode, ROOT)
    ]


def sweet_spot() -> list[Row]:
    """What batch 8 to 16 gives a language model."""
    return [
        {
            "decode batch": batch,
            "H100 8B, % of batch 128": figures.decode_share(figures.H100_8B, batch, 128),
            "A100 8B, % of batch 256": figures.decode_share(figures.A100_8B, batch, 256),
            "A100 8B, % of memory bandwidth for weights": figures.bandwidth_share(batch),
        }
        for batch in (1, 4, 8, 16, 20, 32, 64, 128)
    ]


def static_batches() -> list[Row]:
    """200 callers, answers of 211 tokens, whole batches."""
    return [
        {"batch": batch, "wait before the GPU s": figures.wait_of_static_batches(200, batch, 211)}
        for batch in (8, 16, 32, 64, 108, 128, 200)
    ]


def flat_output() -> list[Row]:
    """The flat 128 against recorded answers, and how unequal requests are."""
    rows = []
    for trace in TRACES:
        flat, (tail, cv) = figures.flat_output(trace), figures.cost_spread(trace)
        rows.append({
            "trace": trace,
            "answers over 128 tokens %": 100 * flat.longer_share,
            "mean error of output %": 100 * flat.output_error,
            "all tokens charged / used": flat.charged_over_used,
            "tokens of a request, p99 / p50": tail,
            "CV": cv,
        })  # fmt: skip
    return rows


def snippets() -> list[Row]:
    """The article's code, run."""
    push = code.PushQueue()
    for number in range(500):
        push.push(number)
    taken = len(push.start_batch())
    push.end_batch()
    gate = code.InflightGate()
    admitted = 0
    while gate.admit() == 200:
        admitted += 1
        if admitted % 100:  # one in a hundred fails, and nobody says that it is complete
            gate.complete()
    tokens = code.TokenGate()
    passed = sum(tokens.admit(4000) == 200 for _ in range(3600))
    hybrid = code.HybridGate(queue=deque(range(20)))
    before = hybrid.tokens.available
    answers = [hybrid.process(100, 4000) for _ in range(5)]
    mixed = code.HybridGate(queue=deque([1, 2, 3])).process(4, 400)
    calls = asyncio.run(code.channel_calls(20, 8, 0, 0.002))
    worked = asyncio.run(code.channel_calls(20, 8, 1, 0.002))
    return [
        {"snippet": "GPUQueue, 500 pushed, max_depth 50", "result": f"{len(push.queue) + taken} in the queue"},
        {"snippet": "GPUQueue, after that batch, no further push", "result": f"{len(push.queue)} wait, none is served"},
        {"snippet": "InferenceGate, 1 in 100 never completes", "result": f"shut for good after {admitted:,} requests"},
        {
            "snippet": "TokenAwareAdmission, 1,000-token prompts, one a second for an hour",
            "result": f"{passed} admitted, then none",
        },
        {
            "snippet": "HybridInferenceGate, queue full",
            "result": f"answers {answers}, {before - hybrid.tokens.available:,} tokens charged for none served",
        },
        {
            "snippet": "HybridInferenceGate, request 4 behind 1, 2, 3",
            "result": f"its caller gets the results of {mixed}",
        },
        {"snippet": "Go handler, channel of 8, 20 calls, no worker", "result": calls},
        {"snippet": "Go handler, the same with a worker", "result": worked},
    ]


def tuner() -> list[Row]:
    """The tuner, with a p99 that does not depend on the depth, and with one that does."""
    rows = []
    for p99 in (100, 199, 200, 300, 400, 500, 501, 900):
        depths = code.settle(code.DepthTuner(), lambda _, p99=p99: float(p99), 60)  # type: ignore[misc]
        rows.append({"p99 is": f"{p99} ms", "start": 16, "after 5 min": depths[9], "after 30 min": depths[-1]})
    slow = code.settle(code.DepthTuner(64), lambda _: 900.0, 60)
    turns = next(number for number, depth in enumerate(slow, 1) if depth == 4)
    rows.append({"p99 is": "900 ms", "start": 64, "after 5 min": slow[9], "after 30 min": slow[-1]})
    rows.append({"p99 is": "900 ms, from 64 to 4", "start": 64, "after 5 min": f"{turns * 30 / 60:g} min in all"})
    follows = code.settle(code.DepthTuner(), lambda depth: 12.0 * depth, 60)
    rows.append({"p99 is": "12 ms × depth", "start": 16, "after 5 min": follows[9], "after 30 min": follows[-1]})
    return rows


def sdk() -> list[Row]:
    """What the official clients do after a 429."""
    return [
        {
            "client": one.client,
            "the 429 says": one.answer,
            "attempts": one.attempts,
            "pauses s": ", ".join(f"{pause:.2f}" for pause in one.pauses_s) or "–",
            "then": "gives up" if one.gave_up else "still waits after 12 s",
        }
        for one in article_sdk.behaviours()
    ]


CLAIMS: Final[dict[str, Claim]] = {
    "static": Claim("A hundred and more callers and a worker that serves whole batches", static_batches),
    "overload": Claim("Overload: an hour of chat, twice as fast, on one A100 (8B)", runs.overload),
    "code-hour": Claim("Bursts: an hour of code completion on one A100 (8B)", runs.first_token_only),
    "snippets": Claim("The article's code, run", snippets),
    "curve": Claim("The S-curve", curve),
    "series": Claim("Measured engines, batch 1, 4, 8, 16, 32 against the article's bands", series),
    "sweet-spot": Claim("Batches of language models", sweet_spot),
    "bounded": Claim("Backpressure, senders bounded and not", runs.bounded),
    "natural": Claim("Chat straight to an H100 (8B), no queue before it", runs.natural_batches),
    "estimate": Claim("Four characters to a token", estimate),
    "flat": Claim("A flat 128 tokens of output", flat_output),
    "tokens": Claim("Places counted in requests or in tokens, admission mode", runs.token_admission),
    "depth": Claim("Twice the capacity, H100 (8B): a depth of 20, or a wait budget of 200 ms", runs.depth_or_wait),
    "wait-rule": Claim(
        "Refuse beyond 50 ms of predicted wait: BERT-large INT8 on an A100, batches of 32", runs.wait_rule
    ),
    "depth-formula": Claim("Depth, batches of 32, bursts at 1.5 times the capacity", runs.depth_formula),
    "tuner": Claim("The tuner", tuner),
    "fleet": Claim("Chat hour, four times as fast: A100s (8B) needed", runs.fleet),
    "engine-limits": Claim("vLLM's own limits at 1.5 times the capacity, H100 (8B)", runs.engine_limits),
    "sdk": Claim("What official clients do after a 429", sdk),
    "retries": Claim("Ten times the load for ten seconds, hybrid, H100 (8B)", runs.retries),
    "cold": Claim("An engine that comes up after 30 s, SDK callers", runs.cold_start),
    "bad-client": Claim("Nine callers and one that floods, hybrid, H100 (8B)", runs.bad_client),
    "linger": Claim("Waiting for a batch to fill: BERT-large INT8 on an A100, batches of 32", runs.linger),
    "bursts": Claim("Admission alone and the hybrid, in bursts", runs.bursts),
}


def cell(value: object) -> str:
    """A figure with the digits that mean something."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def section(name: str, rows: Iterable[Row]) -> list[str]:
    """One set of figures as Markdown."""
    kept = list(rows)
    head = list(dict.fromkeys(column for one in kept for column in one))
    body = [[cell(one.get(column, "")) for column in head] for one in kept]
    return [f"### {name}", "", f"{CLAIMS[name].title}.", "", *tables.table(head, body), ""]


@click.command(help=__doc__)
@click.option("--only", "names", multiple=True, type=click.Choice(list(CLAIMS)), help="These only; nothing is written.")
@publish.json_option
@publish.dry_option
def main(names: tuple[str, ...], json_path: Path | None, dry: bool) -> None:
    load_before = environment.load_average()
    measured: dict[str, list[Row]] = {}
    for name in names or CLAIMS:
        click.echo(name, err=True)
        measured[name] = CLAIMS[name].rows()
        click.echo("\n".join(section(name, measured[name])))
    result: dict[str, Any] = {
        "environment": environment.describe(load_before),
        "command": publish.command("article", *sys.argv[1:]),
        "figures": measured,
    }
    if dry or names:
        if json_path is not None:
            publish.write_results("article", result, json_path)
        return
    publish.write_results("article", result, json_path)
    env = result["environment"]
    lines = [f"Made {env['at']} at commit `{env['commit']}` by `{result['command']}`.", ""]
    for name, rows in measured.items():
        lines += section(name, rows)
    publish.write_sections(PAGE, {"article": "\n".join(lines)})


if __name__ == "__main__":
    main()
