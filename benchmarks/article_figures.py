"""Claims of the article that arithmetic on the calibration settles: the curve, the sweet spot, what fills a GPU."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.article_code import SNIPPET_FLAT_OUTPUT, TokenGate
from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.profile import EncoderProfile, StepProfile
from forebay.workload.trace import load_trace

BANDS = {1: (12, 18), 4: (35, 45), 8: (55, 65), 16: (70, 80), 32: (85, 90)}
"""Percent of peak by batch size, as the article has them."""

A100_8B = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"
H100_8B = "h100-80g/llama-3.1-8b/bf16/tp1/trtllm"
BERT_INT8 = "a100-40gb/bert-large/int8/seq128"
WEIGHT_BYTES_8B = 8.03e9 * 2


class Fit(NamedTuple):
    """`b / (b + half)` in percent, at the article's batch sizes; largest distance to a band's middle, in points."""

    half: float
    percent: dict[int, float]
    worst: float


def hyperbola() -> Fit:
    """The one-parameter hyperbola nearest to the middles of the bands, by least squares."""

    def misfit(half: float) -> float:
        return sum((100 * b / (b + half) - (low + high) / 2) ** 2 for b, (low, high) in BANDS.items())

    half = min((number / 1000 for number in range(1000, 20_000)), key=misfit)
    percent = {b: 100 * b / (b + half) for b in BANDS}
    worst = max(abs(percent[b] - (low + high) / 2) for b, (low, high) in BANDS.items())
    return Fit(half, percent, worst)


def slopes(points: dict[int, float]) -> list[float]:
    """Percent per request between neighbours. An S would rise first; these only fall."""
    sizes = sorted(points)
    return [(points[b] - points[a]) / (b - a) for a, b in pairwise(sizes)]


class Series(NamedTuple):
    """A measured series beside the bands. `flops`: percent of the GPU's own peak at the largest size up to 32."""

    name: str
    inside: int
    of: int
    concave: bool
    flops: float | None


def measured_series() -> list[Series]:
    """Every series of the shipped measurements that has batch 1 to 32, against the bands."""
    text = (files("forebay") / "data" / "calibration" / "batch_efficiency.csv").read_text("utf-8")
    groups: dict[str, dict[int, float]] = {}
    flops: dict[str, float] = {}
    for row in csv.DictReader(io.StringIO(text)):
        try:
            batch, percent = int(row["batch"]), float(row["pct_of_measured_peak"])
        except (ValueError, TypeError):
            continue
        name = f"{row['gpu']} {row['model']} {row['precision']} {row['workload']}"
        groups.setdefault(name, {})[batch] = percent
        if batch <= 32 and row["mfu_pct"]:
            flops[name] = float(row["mfu_pct"])
    found = []
    for name, points in groups.items():
        of = {batch: points[batch] for batch in BANDS if batch in points}
        if len(of) < 4:
            continue
        inside = sum(BANDS[batch][0] <= round(percent) <= BANDS[batch][1] for batch, percent in of.items())
        falls = slopes(of)
        # Half a point per request is the scatter of these measurements.
        concave = all(b <= a + 0.5 for a, b in pairwise(falls))
        found.append(Series(name, inside, len(of), concave, flops.get(name)))
    return found


def language_model(name: str) -> StepProfile:
    """A profile of a language model. Raises TypeError for an encoder."""
    profile = profile_named(name)
    if not isinstance(profile, StepProfile):
        raise TypeError(f"{name} is an encoder")
    return profile


def encoder(name: str) -> EncoderProfile:
    """A profile of an encoder. Raises TypeError for a language model."""
    profile = profile_named(name)
    if not isinstance(profile, EncoderProfile):
        raise TypeError(f"{name} is a language model")
    return profile


def decode_tokens_per_s(name: str, batch: int, context: int = 1024) -> float:
    """Tokens per second of a batch that only decodes."""
    return batch * 1000 / language_model(name).step_ms(batch, batch, batch * context, 0)


def decode_share(name: str, batch: int, full: int) -> float:
    """Tokens per second at `batch`, in percent of those at `full`."""
    return 100 * decode_tokens_per_s(name, batch) / decode_tokens_per_s(name, full)


def bandwidth_share(batch: int) -> float:
    """Percent of an A100's memory bandwidth that streaming an 8B model's weights takes, at that batch."""
    step_s = language_model(A100_8B).step_ms(batch, batch, batch * 1024, 0) / 1000
    known = msgspec.json.decode((files("forebay") / "data" / "calibration" / "gpus.json").read_bytes())
    per_s = next(float(e["hbm_gb_s"]) * 1e9 for e in known["entries"] if e["gpu"].startswith("A100-80G"))
    return 100 * WEIGHT_BYTES_8B / step_s / per_s


def wait_of_static_batches(callers: int, batch: int, output: int) -> float:
    """Seconds before a request begins: `callers` in a closed loop, whole batches one after the other (A100, 8B)."""
    profile = language_model(A100_8B)
    took_s = output * profile.step_ms(batch, batch, batch * 1024, 0) / 1000
    return max(0.0, callers / batch - 1) * took_s


class FlatError(NamedTuple):
    """The snippet's estimate against a trace: output tokens beyond the flat allowance, and of all tokens charged."""

    longer_share: float
    output_error: float
    charged_over_used: float
    over_bucket_share: float


def flat_output(trace: str) -> FlatError:
    """How far `+128` is from what requests used. Prompts are taken as estimated exactly, in the snippet's favour."""
    rows = [(a.prompt_tokens or 1, a.output_tokens or 1) for a in load_trace(trace)]
    outputs = sum(output for _, output in rows)
    error = sum(abs(output - SNIPPET_FLAT_OUTPUT) for _, output in rows)
    charged = sum(prompt + SNIPPET_FLAT_OUTPUT for prompt, _ in rows)
    bucket = TokenGate().max_tokens_per_s
    return FlatError(
        sum(output > SNIPPET_FLAT_OUTPUT for _, output in rows) / len(rows),
        error / outputs,
        charged / sum(prompt + output for prompt, output in rows),
        sum(prompt + SNIPPET_FLAT_OUTPUT > bucket for prompt, _ in rows) / len(rows),
    )


def cost_spread(trace: str) -> tuple[float, float]:
    """Tokens of a request at p99 over p50, and the coefficient of variation: what a limit in requests does not see."""
    tokens = sorted((a.prompt_tokens or 1) + (a.output_tokens or 1) for a in load_trace(trace))
    mean = sum(tokens) / len(tokens)
    variance = sum((value - mean) ** 2 for value in tokens) / len(tokens)
    return tokens[int(0.99 * len(tokens))] / tokens[len(tokens) // 2], variance**0.5 / mean


SAMPLES = {
    "English prose": "docs/life-of-a-request.md",
    "Python": "src/forebay/core/pipeline.py",
    "JSON": "src/forebay/data/calibration/encoders.json",
    "CSV of numbers": "src/forebay/data/calibration/validation.csv",
}
FOREIGN = {
    "German": "Eine Anfrage wartet nur so lange, wie sich das Warten lohnt; alles andere wird früh, billig und mit "
    "einer ehrlichen Angabe zurückgewiesen, wann es sich lohnt, wiederzukommen. Die Schlange ist begrenzt.",
    "Chinese": "请求只在等待有意义的时间内排队，其余的请求会尽早、以很低的代价被拒绝，"
    "并告知何时可以重试。队列在每个方向上都有上限。",
    "Russian": "Запрос ждёт лишь столько, сколько имеет смысл ждать; остальное отклоняется рано, дёшево и с честным "
    "указанием, когда стоит вернуться. Очередь ограничена во всех отношениях.",
}


def four_characters(encode: Callable[[str], list[int]], root: Path) -> list[tuple[str, float, float]]:
    """(text, characters per token, error of `len // 4` in percent) with the vocabulary of the embedded model."""
    texts = {name: (root / path).read_text("utf-8")[:20_000] for name, path in SAMPLES.items()} | FOREIGN
    found = []
    for name, text in texts.items():
        tokens = len(encode(text))
        found.append((name, len(text) / tokens, 100 * (len(text) // 4 / tokens - 1)))
    return found
