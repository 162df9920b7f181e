"""What is sent: request bodies of a route with seeded prompt and output lengths, keys and priorities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, NamedTuple

from forebay.errors import UsageError
from forebay.workload.arrival import Arrival
from forebay.workload.sizes import Sizes

Route = Literal["chat", "completions", "embeddings"]
PATHS: dict[Route, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
}

# Short common words are one token each, with their space, in the byte-pair vocabularies in use.
WORDS = (
    *("the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as", "by", "at", "from", "his", "it"),
    *("an", "were", "are", "which", "this", "be", "had", "has", "first", "one", "their", "its", "new", "after", "but"),
    *("who", "not", "they", "have", "her", "she", "two", "been", "other", "when", "there", "all", "into", "only"),
)


class Shot(NamedTuple):
    """A request ready to be written: its key and complete HTTP bytes but for headers that change per attempt."""

    key: str
    head: bytes
    body: bytes
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Key:
    """A credential and its share of the requests; `label` stands for it in every record, the secret in none."""

    label: str
    secret: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Workload:
    """The kind of requests of a run. `ignore_eos` asks engines that know it to produce exactly the asked length."""

    route: Route = "chat"
    model: str = "default"
    stream: bool = True
    prompt_tokens: Sizes = field(default_factory=lambda: Sizes(32, 32))
    output_tokens: Sizes = field(default_factory=lambda: Sizes(32, 32))
    keys: tuple[Key, ...] = ()
    priority: str | None = None
    deadline_ms: int | None = None
    ignore_eos: bool = True

    def __str__(self) -> str:
        shape = f"{self.route}, {self.prompt_tokens} prompt tokens"
        return shape if self.route == "embeddings" else f"{shape}, {self.output_tokens} output tokens"


class Magazine:
    """Makes the requests of a run, in arrival order, from a seed. Bodies are cut from one text, so a shot is cheap."""

    def __init__(self, workload: Workload, host: str, prefix: str, seed: int) -> None:
        self._rng = Random(f"{seed}/workload")
        self._workload = workload
        self._heads = _heads(workload, host, prefix)
        self._keys: Sequence[Key] = workload.keys or (Key("", ""),)
        self._weights = [key.weight for key in self._keys]
        self._text, self._starts = _text(Random(f"{seed}/text"), _longest(workload))
        self._before, self._after = _body_parts(workload)

    def shot(self, arrival: Arrival) -> Shot:
        """The next request. Calls draw from one stream: make them in arrival order to repeat a run exactly."""
        rng = self._rng
        workload = self._workload
        prompt = arrival.prompt_tokens or workload.prompt_tokens.draw(rng)
        output = arrival.output_tokens or workload.output_tokens.draw(rng)
        index = rng.choices(range(len(self._keys)), self._weights)[0] if len(self._keys) > 1 else 0
        after = self._after.replace(b"%OUTPUT%", str(output).encode())
        body = b"".join((self._before, self._prompt(prompt), after))
        head = b"%bcontent-length: %d\r\n" % (self._heads[index], len(body))
        return Shot(self._keys[index].label, head, body, prompt)

    def _prompt(self, tokens: int) -> bytes:
        span = len(self._starts) - 1
        parts = []
        while tokens > 0:
            start = self._rng.randrange(span)
            take = min(tokens, span - start)
            parts.append(self._text[self._starts[start] : self._starts[start + take]])
            tokens -= take
        return b"".join(parts).strip()


def _longest(workload: Workload) -> int:
    return max(4096, min(4 * workload.prompt_tokens.high, 65536))


def _text(rng: Random, words: int) -> tuple[bytes, list[int]]:
    """A text of `words` words, and where each begins (with its space), with the end last."""
    starts, parts, at = [], [], 0
    for _ in range(words):
        word = f" {rng.choice(WORDS)}".encode()
        starts.append(at)
        parts.append(word)
        at += len(word)
    starts.append(at)
    return b"".join(parts), starts


def _body_parts(workload: Workload) -> tuple[bytes, bytes]:
    """The JSON before and after the prompt; `%OUTPUT%` marks the output length."""
    mark, length = "%PROMPT%", 1234567890
    body: dict[str, object] = {"model": workload.model}
    if workload.route == "embeddings":
        body["input"] = mark
    elif workload.route == "completions":
        body["prompt"] = mark
    else:
        body["messages"] = [{"role": "user", "content": mark}]
    if workload.route != "embeddings":
        body["max_tokens"] = length
        if workload.ignore_eos:
            body["ignore_eos"] = True
        if workload.stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
    before, after = json.dumps(body, separators=(",", ":")).split(mark)
    return before.encode(), after.replace(str(length), "%OUTPUT%").encode()


def _heads(workload: Workload, host: str, prefix: str) -> list[bytes]:
    lines = [
        f"POST {prefix}{PATHS[workload.route]} HTTP/1.1",
        f"host: {host}",
        "user-agent: forebay-bench",
        "content-type: application/json",
        "accept: text/event-stream" if workload.stream and workload.route != "embeddings" else "accept: */*",
    ]
    if workload.priority is not None:
        lines.append(f"x-forebay-priority: {workload.priority}")
    if workload.deadline_ms is not None:
        lines.append(f"x-forebay-deadline-ms: {workload.deadline_ms}")
    heads = []
    for key in workload.keys or (Key("", ""),):
        credential = [f"authorization: Bearer {key.secret}"] if key.secret else []
        heads.append(("\r\n".join(lines + credential) + "\r\n").encode())
    return heads


def parse_keys(texts: Sequence[str]) -> tuple[Key, ...]:
    """Keys given as `SECRET`, `LABEL=SECRET` or `LABEL*WEIGHT=SECRET`; without a label they are numbered."""
    keys = []
    for number, text in enumerate(texts, start=1):
        name, separator, secret = text.partition("=")
        if not separator:
            name, secret = "", text
        label, _, weight = name.partition("*")
        try:
            share = float(weight or 1.0)
        except ValueError:
            share = -1.0
        if not secret.isascii() or not secret.isprintable() or not secret or not 0 < share < 1e9:
            raise UsageError(f"--key number {number} is not SECRET, LABEL=SECRET or LABEL*WEIGHT=SECRET")
        keys.append(Key(label or f"key {number}", secret, share))
    return tuple(keys)
