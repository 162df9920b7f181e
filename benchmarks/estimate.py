"""How far the estimated prompt tokens of a request are from what a real tokenizer makes of it.

``python -m benchmarks.estimate`` (or ``make bench NAME=estimate``) sends real chat bodies through the gateway's own
reader and estimator, tells it what the tokenizer counted, as an engine would, and judges every estimate after the first
50 of a key. It writes ``benchmarks/results/estimate-DATE.json`` and the generated section of ``docs/estimate.md``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any, Final

import click

from benchmarks import environment, publish, tables
from benchmarks.estimate_judges import Judge, judges
from benchmarks.estimate_texts import Chat, Text, bodies, oddities, texts
from forebay.core.admission.estimate import DemandEstimator, EstimateConfig
from forebay.core.model import Request, Usage
from forebay.ingress.http.peek import FRAME_BYTES, peek

PAGE: Final = publish.DOCS / "estimate.md"
LEARNED_AFTER: Final = 50
KEYS_PER_KIND: Final = 4
KEYS_MIXED: Final = 16
GOAL_MEAN, GOAL_P95 = 0.08, 0.25
MIXED: Final = "all kinds mixed"

Estimate = Callable[[str, Chat], int]
Learn = Callable[[str, Chat, int], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a key: kind of its text, body, and contents."""

    key: str
    kind: str
    chat: Chat


class Gateway:
    """The gateway's reader and estimator, as a request passes them."""

    def __init__(self) -> None:
        self._estimator = DemandEstimator(EstimateConfig())

    @staticmethod
    def request(key: str, body: bytes) -> Request:
        """What the HTTP layer offers to the core."""
        seen = peek(body)
        return Request(
            key=key,
            model=seen.model,
            body_bytes=len(body),
            text_bytes=seen.text_bytes,
            byte_class=seen.byte_class,
            counted_tokens=seen.counted_tokens,
            max_output_tokens=seen.max_output_tokens,
            choices=seen.completions * seen.prompts,
            stream=seen.stream,
            tokens_per_byte=seen.tokens_per_byte,
            media_tokens=seen.media_tokens,
        )

    def estimate(self, key: str, chat: Chat) -> int:
        return self._estimator.estimate(self.request(key, chat[0])).input_tokens

    def learn(self, key: str, chat: Chat, tokens: int) -> None:
        self._estimator.learn(self.request(key, chat[0]), Usage(tokens, 20))


class Unlearned(Gateway):
    """The same before it learned anything."""

    def learn(self, key: str, chat: Chat, tokens: int) -> None:
        del key, chat, tokens


class BytesOver4:
    """Bytes of the body ÷ 4: what gateways do that do not look at it."""

    @staticmethod
    def estimate(key: str, chat: Chat) -> int:
        del key
        return max(1, (len(chat[0]) - FRAME_BYTES) // 4)

    def learn(self, key: str, chat: Chat, tokens: int) -> None:
        del key, chat, tokens


class CharactersOver4(BytesOver4):
    """Characters of the contents ÷ 4: what gateways do that decode it."""

    @staticmethod
    def estimate(key: str, chat: Chat) -> int:
        del key
        return max(1, sum(map(len, chat[1])) // 4)


ESTIMATORS: Final[dict[str, Callable[[], Any]]] = {
    "Forebay": Gateway,
    "Forebay, nothing learned": Unlearned,
    "bytes ÷ 4": BytesOver4,
    "characters ÷ 4": CharactersOver4,
}


def _requests(rng: Random, key: str, kinds: dict[str, Text], count: int) -> Iterator[Sample]:
    """The requests of one key: its library escapes, or not, in all of them; what mixes kinds mixes that too."""
    escapes = rng.random() < 0.5
    names = sorted(kinds)
    for _ in range(count):
        kind = rng.choice(names)
        escaped = escapes if len(names) == 1 else rng.random() < 0.5
        yield Sample(key, kind, bodies(rng, partial(kinds[kind], rng), escaped=escaped))


def traffic(seed: int, count: int) -> dict[str, list[list[Sample]]]:
    """By kind, keys with their requests."""
    rng, kinds = Random(seed), texts("judge")
    groups = {
        kind: [list(_requests(rng, f"{kind} {n}", {kind: make}, count)) for n in range(KEYS_PER_KIND)]
        for kind, make in kinds.items()
    }
    groups[MIXED] = [list(_requests(rng, f"mixed {n}", kinds, count)) for n in range(KEYS_MIXED)]
    return groups


def lone(keys: Iterable[list[Sample]]) -> Iterator[list[list[Sample]]]:
    """Each key alone at a gateway of its own: nobody else teaches it."""
    for samples in keys:
        yield [samples]


def errors(keys: list[list[Sample]], judge: Judge, make: Callable[[], Any]) -> list[tuple[str, float]]:
    """(kind, signed relative error) of every estimate after the first of each key; the keys take turns."""
    estimator = make()
    found = []
    for number, turn in enumerate(zip(*keys, strict=True)):
        for sample in turn:
            true = judge(sample.chat[1])
            if number >= LEARNED_AFTER:
                found.append((sample.kind, estimator.estimate(sample.key, sample.chat) / true - 1))
            estimator.learn(sample.key, sample.chat, true)
    return found


def figures(signed: Iterable[float]) -> dict[str, float]:
    """Mean, median and 95th percentile of the absolute errors, and the mean of the signed ones."""
    kept = list(signed)
    sizes = sorted(map(abs, kept))
    return {
        "n": len(kept),
        "mean": mean(sizes),
        "median": median(sizes),
        "p95": sizes[int(0.95 * len(sizes))],
        "bias": mean(kept),
    }


def judge_all(seed: int, count: int) -> list[dict[str, Any]]:
    """Rows: tokenizer, estimator, group of keys, figures."""
    groups = traffic(seed, count)
    rows = []
    for tokenizer, judge in judges().items():
        cached: dict[int, int] = {}

        def counted(contents: Any, judge: Judge = judge, cached: dict[int, int] = cached) -> int:
            if id(contents) not in cached:
                cached[id(contents)] = judge(contents)
            return cached[id(contents)]

        for name, make in ESTIMATORS.items():
            found = {
                group: [error for keys_of_one in lone(keys) for error in errors(keys_of_one, counted, make)]
                for group, keys in groups.items()
            }
            one_kind = [error for group, part in found.items() if group != MIXED for _, error in part]
            rows.append(_row(tokenizer, name, "one kind a key", one_kind))
            rows += [_row(tokenizer, name, group, [error for _, error in part]) for group, part in found.items()]
            if name == "Forebay":
                all_keys = [samples for keys in groups.values() for samples in keys]
                together = errors(all_keys, counted, make)
                rows.append(_row(tokenizer, "Forebay, keys together", "all keys", [error for _, error in together]))
        click.echo(tokenizer, err=True)
    return rows


def _row(tokenizer: str, estimator: str, group: str, signed: list[float]) -> dict[str, Any]:
    return {"tokenizer": tokenizer, "estimator": estimator, "keys": group, **figures(signed)}


def judge_oddities(seed: int) -> list[dict[str, Any]]:
    """The first estimate for texts of no language: how many times too low or too high at worst."""
    rng, rows = Random(seed), []
    for name, make in oddities().items():
        ratios = []
        for judge in judges().values():
            for size in (400, 4_000, 16_000):
                content = make(rng, size)
                messages = [{"role": "user", "content": content}]
                body = json.dumps({"model": "m", "messages": messages}, ensure_ascii=False).encode()
                ratios.append(Gateway().estimate("k", (body, [content])) / judge([content]))
        rows.append({"text": name, "least": min(ratios), "most": max(ratios)})
    return rows


def cost(rounds: int = 7, steps: int = 5_000) -> dict[str, float]:
    """Nanoseconds of CPU for reading, estimating and learning one body of 1 KB, the best of the rounds."""
    rng, found = Random(5), {}
    for kind, make in texts("judge").items():
        content, body = make(rng, 900), b""
        while len(body) > 1024 or not body:
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
            content = content[:-8]
        estimator = DemandEstimator(EstimateConfig())
        usage, best = Usage(250, 20), float("inf")
        for _ in range(rounds):
            before = time.process_time_ns()
            for _ in range(steps):
                request = Gateway.request("k", body)
                estimator.estimate(request)
                estimator.learn(request, usage)
            best = min(best, (time.process_time_ns() - before) / steps)
        found[kind] = best
    return found


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def markdown(result: dict[str, Any]) -> str:
    """The generated section of ``docs/estimate.md``."""
    rows = result["rows"]
    lines = [*tables.provenance(result)[:1], f"{result['requests_per_key']} requests a key, seed {result['seed']}.", ""]
    for group, title in (("one kind a key", "Keys that send one kind of text"), (MIXED, "Keys that mix all kinds")):
        lines += [f"### {title}", ""]
        head = ["tokenizer", "estimator", "mean", "median", "p95", "bias"]
        lines += tables.table(
            head,
            [
                [row["tokenizer"], row["estimator"], *(_percent(row[key]) for key in ("mean", "median", "p95", "bias"))]
                for row in rows
                if row["keys"] == group
            ],
        )
        lines.append("")
    kinds = [kind for kind in dict.fromkeys(row["keys"] for row in rows) if kind not in {"one kind a key", "all keys"}]
    lines += ["### By kind, Forebay: mean (p95)", ""]
    lines += tables.table(
        ["keys", *dict.fromkeys(row["tokenizer"] for row in rows)],
        [
            [
                kind,
                *(
                    f"{100 * row['mean']:.1f} ({100 * row['p95']:.0f}) %"
                    for row in rows
                    if row["keys"] == kind and row["estimator"] == "Forebay"
                ),
            ]
            for kind in kinds
        ],
    )
    together = [row for row in rows if row["keys"] == "all keys"]
    lines += ["", "With all these keys at one gateway, which share what they learn of a model:", ""]
    lines += tables.table(
        ["tokenizer", "mean", "median", "p95"],
        [[row["tokenizer"], *(_percent(row[key]) for key in ("mean", "median", "p95"))] for row in together],
    )
    lines += ["", "### Texts of no language, first estimate ÷ truth over all tokenizers", ""]
    lines += tables.table(
        ["text", "least", "most"],
        [[row["text"], f"{row['least']:.2f}", f"{row['most']:.2f}"] for row in result["oddities"]],
    )
    lines += ["", "### CPU to read, estimate and learn from a body of 1 KB", ""]
    lines += tables.table(["text", "ns"], [[kind, f"{ns:,.0f}"] for kind, ns in result["cost_ns"].items()])
    return "\n".join(lines) + "\n"


@click.command(help=__doc__)
@click.option("--seed", type=int, default=2, show_default=True)
@click.option("--requests", type=click.IntRange(60, 10_000), default=120, show_default=True, help="Per key.")
@publish.json_option
@publish.dry_option
def main(seed: int, requests: int, json_path: Path | None, dry: bool) -> None:
    load_before = environment.load_average()
    result: dict[str, Any] = {
        "environment": environment.describe(load_before),
        "command": publish.command("estimate", *sys.argv[1:]),
        "rounds_run": 1,
        "seed": seed,
        "requests_per_key": requests,
        "goal": {"mean": GOAL_MEAN, "p95": GOAL_P95},
        "rows": judge_all(seed, requests),
        "oddities": judge_oddities(seed),
        "cost_ns": cost(),
    }
    click.echo(markdown(result))
    if dry:
        return
    publish.write_results("estimate", result, json_path)
    publish.write_sections(PAGE, {"estimate": markdown(result)})


if __name__ == "__main__":
    main()
