"""The lines of the advised config, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from forebay.advise.answers import Answers
from forebay.advise.capacity import Capacity
from forebay.advise.rules import Situation
from forebay.config.build import FIXED_LIMIT
from forebay.config.schema import Config
from forebay.core.model import Mode

KV_SHARE = 0.9
"""Of the KV cache that expected tokens may take: estimates of output are means, and the rest is for the long ones."""
HELD_S = 30.0
ANONYMOUS_SHARE = 2
SLOTS = {"llama.cpp": 4, "ollama": 4, "embedded": 32}
"""Sequences that these engines compute together by default."""

Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the config, and why it is there. `section` is its table."""

    section: str
    name: str
    value: Value
    why: str


def settings(answers: Answers, row: Situation, mode: Mode, capacity: Capacity | None, ttft: float) -> Iterator[Setting]:
    """All lines in the order of the file; `ttft` is the objective in force, in ms."""
    if answers.ttft_ms is not None:
        yield Setting("slo", "ttft_ms", ttft, "What callers expect, in ms; the wait budget derives from it.")
    if answers.tpot_ms is not None and guarded(answers):
        yield Setting("slo", "tpot_ms", answers.tpot_ms, "The pace per token, in ms; the concurrency limit keeps it.")
    yield Setting("admission", "preset", row.preset, "Defaults for this kind of use, beneath all that is set here.")
    yield Setting("admission", "mode", mode.value, "What happens to a request that cannot start at once.")
    if row.preset == "b2b" and mode is not Mode.BACKPRESSURE:
        why = "A customer who is ahead of his share of the work is refused first, while others want theirs."
        yield Setting("admission", "fair_share", True, why)
    if mode is Mode.BACKPRESSURE and row.preset != "offline":
        why = "Longest that a request is held, in seconds; shorter than the callers' own time-outs."
        yield Setting("queue", "deadline_s", HELD_S, why)
    if mode is Mode.HYBRID and answers.engine == "encoder":
        yield Setting("admission", "wait_budget_ms", ttft / 2, "Half of the objective; the batch takes the other half.")
    yield from _anonymous(answers, row, capacity)
    yield from _engine(answers, capacity)


def _anonymous(answers: Answers, row: Situation, capacity: Capacity | None) -> Iterator[Setting]:
    if row.preset == "b2b":
        yield Setting("keys", "anonymous", False, "Who has no key has bought nothing.")
    if row.preset != "public-api" or (answers.rate_per_s is None and capacity is None):
        return
    # The preset's allowance is of all callers without a key together: too little for a service. Above what the
    # engines carry it is they who decide.
    carried = capacity.rate_per_s if capacity is not None else 0.0
    most = ANONYMOUS_SHARE * max(answers.rate_per_s or 0.0, carried)
    why = f"Of all callers without a key together: {ANONYMOUS_SHARE} times the peak. Give callers keys to limit each."
    yield Setting("limits.default", "requests_per_minute", ceil(60 * most), why)
    if capacity is not None:
        why = "Open at once, of all callers without a key together: the places, and as many who wait."
        yield Setting("limits.default", "concurrency", ANONYMOUS_SHARE * capacity.places * answers.replicas, why)


def _engine(answers: Answers, capacity: Capacity | None) -> Iterator[Setting]:
    entry = "engines"
    yield Setting(entry, "name", "engine", "Shown in metrics and logs.")
    if answers.engine == "embedded":
        yield Setting(entry, "kind", "embedded", "The bundled model, started by Forebay.")
    else:
        yield Setting(entry, "urls", answers.urls, "One base URL for each engine, without /v1.")
    if answers.engine == "ollama":
        yield Setting(entry, "probe", '{ path = "/" }', "Ollama has no /health.")
    if answers.engine == "encoder":
        size = capacity.places if capacity else Config().batching.max_size
        why = "Batches are formed here and leave as soon as the engine is free: waiting for more raises no throughput."
        yield Setting(entry, "batching", f'{{ kind = "dynamic", max_size = {size}, linger_ms = 0 }}', why)
        yield Setting(
            entry, "concurrency", '{ kind = "fixed", limit = 1 }', "One batch at a time; the next forms meanwhile."
        )
        return
    yield Setting(entry, "concurrency", *_concurrency(answers, capacity))


def _concurrency(answers: Answers, capacity: Capacity | None) -> tuple[str, str]:
    """The limit of one engine, and why: found by itself where there is a pace to keep, otherwise fixed."""
    begins = "" if capacity is None else f", limit = {capacity.places}"
    if guarded(answers):
        why = "Requests in flight on one engine: as many as [slo] and its memory allow, found while it runs."
        if capacity is None:
            return '{ kind = "guarded" }', why
        # vLLM and SGLang tell the size of their cache themselves.
        tells = answers.engine in ("vllm", "sglang")
        cache = "" if tells or capacity.kv_tokens is None else f", kv_tokens = {capacity.kv_tokens}"
        return f'{{ kind = "guarded"{begins}{cache} }}', f"{why} It begins with what was reckoned."
    if capacity is None or answers.engine in SLOTS:
        limit = SLOTS.get(answers.engine, FIXED_LIMIT)
        guess = "A guess: say --gpu and --model for one that is reckoned."
        told = "As many as it has slots by default; raise both together."
        return (
            f'{{ kind = "fixed", limit = {limit} }}',
            f"Requests in flight on one engine. {told if answers.engine in SLOTS else guess}",
        )
    why = f"Requests in flight on one engine, by {capacity.bound_by}."
    if answers.costs_vary is False or capacity.kv_tokens is None:
        return f'{{ kind = "fixed", limit = {capacity.places} }}', why
    tokens = int(KV_SHARE * capacity.kv_tokens)
    why += f" Tokens: {100 * KV_SHARE:.0f} % of its KV cache, so that long requests count as such."
    return f'{{ kind = "fixed", limit = {capacity.places}, tokens = {tokens} }}', why


def guarded(answers: Answers) -> bool:
    """May the engine's limit find itself? It goes by the pace of tokens: not where none is kept, or none stream."""
    return answers.clients != "offline" and answers.engine != "encoder" and answers.engine not in SLOTS
