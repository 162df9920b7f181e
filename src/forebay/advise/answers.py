"""What is asked of the person who seeks advice, and which answers cannot hold together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from forebay.errors import UsageError

Clients = Literal["internal", "public", "b2b", "offline", "realtime"]
EngineKind = Literal["vllm", "sglang", "tgi", "llama.cpp", "ollama", "encoder", "embedded", "other"]

CLIENTS: tuple[Clients, ...] = get_args(Clients)
ENGINES: tuple[EngineKind, ...] = get_args(EngineKind)

SOMEONE_WAITS_MS = 10_000.0
"""An objective below this means that somebody waits for the answer: such work is not offline."""

VALUE_DIES_MS = 2_000.0
"""Below this an answer that comes late is worth little, so an overload must be refused, not held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """One service. `None` means: not said; the advice then uses what is usual for these clients."""

    clients: Clients
    bounded: bool | None = None
    """Is the number of senders known, and do they wait when they are made to?"""
    ttft_ms: float | None = None
    """Time to first token (for one-shot models: to the answer) that callers expect, in ms."""
    tpot_ms: float | None = None
    """Time per output token that callers expect, in ms."""
    may_drop: bool | None = None
    """May a request be refused, and be sent again later?"""
    costs_vary: bool | None = None
    """Do requests differ in cost by ten times and more?"""
    sells: bool | None = None
    """Is the capacity sold, with an allowance for each customer?"""
    engine: EngineKind = "vllm"
    upstreams: tuple[str, ...] = ()
    """Base URLs of the engines, without /v1."""
    replicas: int = 1
    """Engines; the number of `upstreams` when these are given."""
    gpu: str | None = None
    """Part of a calibrated GPU's name; with `model` it gives the figures of the advice."""
    model: str | None = None
    rate_per_s: float | None = None
    """Requests per second at the peak."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    bursty: bool | None = None
    """Do requests come in bursts far above their mean rate?"""
    customers: int | None = None
    """Keys among which the capacity is shared."""
    urls: tuple[str, ...] = field(init=False, default=())
    """Of the engines, or stand-ins for those that were not given."""

    def __post_init__(self) -> None:
        default = tuple(f"http://127.0.0.1:{8000 + number}" for number in range(self.replicas))
        object.__setattr__(self, "urls", () if self.engine == "embedded" else self.upstreams or default)
        if self.upstreams:
            object.__setattr__(self, "replicas", len(self.upstreams))

    @property
    def strict(self) -> bool:
        """Is an answer that comes late worth little?"""
        return self.ttft_ms is not None and self.ttft_ms < VALUE_DIES_MS


def check(answers: Answers) -> None:
    """Raises UsageError, a line for each pair of answers that cannot hold together and what to change."""
    found = list(_contradictions(answers))
    if found:
        raise UsageError("\n".join(found))


def _contradictions(answers: Answers) -> Iterator[str]:
    ttft = answers.ttft_ms
    if answers.clients == "offline" and ttft is not None and ttft < SOMEONE_WAITS_MS:
        yield (
            f"offline work and a time to first token of {ttft:g} ms contradict each other: nobody waits for offline "
            "work. If somebody waits, say --clients realtime or internal; if nobody does, leave --ttft-ms out"
        )
    if answers.clients == "offline" and answers.tpot_ms is not None:
        yield (
            f"offline work and a pace of {answers.tpot_ms:g} ms per token contradict each other: nobody reads along. "
            "Leave --tpot-ms out, or say --clients realtime"
        )
    if answers.may_drop is False and answers.clients == "public":
        yield (
            "public clients and 'nothing may be dropped' contradict each other: nobody bounds a public crowd, so "
            "what may wait must be bounded and the rest refused. Say --may-drop, or put a queue of your own before it"
        )
    if answers.may_drop is False and answers.strict and answers.bounded is not True and answers.clients != "public":
        yield (
            f"'nothing may be dropped' and {ttft:g} ms contradict each other while the senders are not bounded: "
            "above capacity requests are refused or they wait. Say --may-drop, bound the senders (--bounded), or "
            f"allow {VALUE_DIES_MS:g} ms and more"
        )
    if answers.engine == "encoder" and (answers.tpot_ms is not None or answers.output_tokens is not None):
        yield "an encoder makes no tokens one by one: leave --tpot-ms and --output-tokens out"
    if answers.upstreams and answers.engine == "embedded":
        yield "the embedded model is started by Forebay itself and has no URL: leave --upstream out"
    if answers.bounded is True and answers.clients == "public":
        yield (
            "public clients are not a bounded number of senders: say --clients b2b when each has a key with limits, "
            "or --clients internal when both ends are yours"
        )
