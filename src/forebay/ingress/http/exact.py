"""Prompt tokens counted by a real tokenizer, for models that have one named in the configuration.

Counting takes the place of the bytes' price only: what an engine reports still teaches the ratio and the template's
overhead, so that a tokenizer that is not quite the model's is corrected. It runs on the event loop, so a body is
counted up to a size that costs less than a millisecond, and priced by its bytes beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from forebay.ingress.http.peek import Peek, peek

COUNTED_BYTES = 32 * 1024
MESSAGE_TOKENS = 4  # of the template, around each message
ENCODINGS = {"o200k": "o200k_base", "cl100k": "cl100k_base", "llama3": "llama3", "qwen3": "qwen3"}
TALKED = ("messages", "prompt", "input", "system", "instructions", "query", "documents", "texts")
QUOTED = ("tools", "functions", "response_format", "text", "tool_choice")  # engines show these as JSON
SILENT = frozenset(
    {"role", "type", "id", "tool_call_id", "url", "data", "image_url", "file_data", "format", "media_type"}
)

_decode = msgspec.json.Decoder().decode


class ExactTokens:
    """Counts prompt tokens by model."""

    def __init__(self, counts: Mapping[str, Callable[[str], int]]) -> None:
        """`counts`: tokens of a text, by model; "*" is for the models not named."""
        self._counts = counts

    def read(self, body: bytes, *, generates: bool = True) -> Peek:
        """What `peek` says, with the counted tokens in the place of the price. Raises BadRequest."""
        seen = peek(body, generates=generates)
        self.correct(seen.model, body, seen)
        return seen

    def correct(self, model: str, body: bytes, seen: Peek) -> None:
        """Put the counted tokens in the place of the price, where they can be counted."""
        count = self._counts.get(model) or self._counts.get("*")
        if count is None or len(body) > COUNTED_BYTES or not seen.text_bytes:
            return
        try:
            fields = _decode(body)
            tokens = sum(map(count, _texts(fields)))
        except (ValueError, RecursionError, msgspec.DecodeError):
            return  # deeper than may be walked: the price stands
        messages = fields.get("messages")
        if isinstance(messages, list) and messages:
            tokens += MESSAGE_TOKENS * (len(messages) - 1)
        seen.tokens_per_byte = tokens / seen.text_bytes


def _texts(fields: dict[str, Any]) -> Iterator[str]:
    for name in TALKED:
        if name in fields:
            yield from _spoken(fields[name])
    for name in QUOTED:
        if fields.get(name):
            yield msgspec.json.encode(fields[name]).decode()


def _spoken(value: Any) -> Iterator[str]:
    """Every string that the model reads; no roles, no kinds, no payloads."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _spoken(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in SILENT:
                yield from _spoken(item)


def load(by_model: Mapping[str, str]) -> ExactTokens | None:
    """The named tokenizers, loaded once each; None when none is named, or the extra that has them is not installed.

    That it is missing is one of the configuration's warnings.
    """
    if not by_model:
        return None
    try:
        import quicktok
    except ImportError:
        return None
    loaded = {name: quicktok.get_encoding(ENCODINGS[name]).count for name in sorted(set(by_model.values()))}
    return ExactTokens({model: loaded[name] for model, name in by_model.items()})
