"""Byte-level BPE from a GGUF file's own vocabulary, SmolLM2's chat template, and an incremental detokenizer.

Text is split as the model was trained: every numeric character alone, then GPT-2's pattern. Text never yields a
control token: only the chat template and token ids given as such can, so a message cannot end its own turn.
"""

from __future__ import annotations

import codecs
import functools
import heapq
import re
import sys
import unicodedata
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_CONTROL: Final = 3
"""The GGUF token type of control tokens."""

_CACHED_WORD_CHARS: Final = 32
_CACHED_WORDS: Final = 32_768

# GPT-2's pattern in the standard library's terms. Numeric characters are cut out before it, so "alphanumeric, no
# digit, no underscore" is exactly "letter" here. Python counts \x1c-\x1f as white space, Unicode does not.
_SPACE: Final = r"[^\S\x1c-\x1f]"
_MARK: Final = r"(?:[^\s\w]|[_\x1c-\x1f])"
_WORDS: Final = re.compile(rf"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?{_MARK}+|{_SPACE}+(?!{_MARK}|[^\W\d_])|{_SPACE}+")

DEFAULT_SYSTEM_PROMPT: Final = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "user",
    "function": "user",
}


class PromptTooLongError(Exception):
    """The text has more tokens than the limit; it was not tokenized further."""


class PromptError(Exception):
    """The prompt or the messages cannot be turned into tokens; the message is for the caller."""


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte: itself where Latin-1 prints, else the next free one from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


@functools.cache
def _numeric_splitter() -> re.Pattern[str]:
    """Matches one numeric character (group 1), or a run without any.

    Made once, when the first tokenizer is: it looks at every code point, which takes 0.1 s.
    """
    category = unicodedata.category
    numeric = [chr(point) for point in range(sys.maxunicode + 1) if category(chr(point))[0] == "N"]
    return re.compile(f"({_ranges(numeric)})|{_ranges(numeric, negated=True)}+")


def _ranges(characters: Sequence[str], *, negated: bool = False) -> str:
    """A character class of sorted `characters`, written as ranges."""
    spans: list[list[str]] = []
    for character in characters:
        if spans and ord(character) == ord(spans[-1][1]) + 1:
            spans[-1][1] = character
        else:
            spans.append([character, character])
    inside = "".join(f"{re.escape(first)}-{re.escape(last)}" for first, last in spans)
    return f"[{'^' if negated else ''}{inside}]"


class Tokenizer:
    """Turns text into token ids and back.

    Args:
        tokens: the vocabulary, id by position, in GPT-2's byte alphabet.
        merges: `"left right"` pairs, best first.
        control: ids of control tokens, which have no text.
        eos: ids that end an answer.
    """

    def __init__(
        self, tokens: Sequence[str], merges: Sequence[str], control: frozenset[int], eos: frozenset[int]
    ) -> None:
        self.eos = eos
        self.control = control
        self.size = len(tokens)
        self._id = {token: index for index, token in enumerate(tokens)}
        self._rank = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(merges)}
        self._alphabet = _byte_alphabet()
        byte_of = {character: byte for byte, character in enumerate(self._alphabet)}
        self._bytes = [
            b"" if index in control else bytes(byte_of.get(character, 0x20) for character in token)
            for index, token in enumerate(tokens)
        ]
        missing = [character for character in self._alphabet if character not in self._id]
        self._unknown = missing and f"the vocabulary lacks {len(missing)} of the 256 bytes"
        self._longest_token_bytes = max(map(len, self._bytes), default=1) or 1
        self._cached_word = functools.lru_cache(_CACHED_WORDS)(self._merge)
        _numeric_splitter()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that a GGUF file describes.

        Raises:
            EngineError: the file has none, or another kind than byte-level BPE.
        """
        kind = metadata.get("tokenizer.ggml.model")
        tokens = _strings(metadata.get("tokenizer.ggml.tokens"))
        merges = _strings(metadata.get("tokenizer.ggml.merges"))
        if kind != "gpt2" or not tokens or not merges:
            raise EngineError(f"the model file has tokenizer {kind!r}; the embedded engine knows byte-level BPE (gpt2)")
        types = metadata.get("tokenizer.ggml.token_type")
        if not isinstance(types, list) or len(types) != len(tokens):
            raise EngineError("the model file does not say which of its tokens are control tokens (token_type)")
        control = frozenset(index for index, kind in enumerate(types) if kind == _CONTROL)
        ends = {metadata.get("tokenizer.ggml.eos_token_id")}
        ends |= {index for index in control if tokens[index] in ("<|im_end|>", "<|endoftext|>")}
        eos = frozenset(index for index in ends if isinstance(index, int) and 0 <= index < len(tokens))
        return cls(tokens, merges, control, eos)

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Token ids of `text`, none of them a control token.

        Raises:
            PromptTooLongError: as soon as there are more than `limit`.
            PromptError: the vocabulary cannot spell the text.
        """
        if limit is not None and len(text) > limit * self._longest_token_bytes:
            raise PromptTooLongError  # a huge text is refused before any work on it
        ids: list[int] = []
        for word in _split(text):
            ids.extend(self._cached_word(word) if len(word) <= _CACHED_WORD_CHARS else self._merge(word))
            if limit is not None and len(ids) > limit:
                raise PromptTooLongError
        return ids

    def control_id(self, token: str) -> int:
        """Id of a control token by its name.

        Raises:
            PromptError: the model has no such token, so it has no chat format that is known here.
        """
        index = self._id.get(token, -1)
        if index not in self.control:
            raise PromptError(f"this model has no {token} token: it cannot chat, only complete")
        return index

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], limit: int | None = None) -> list[int]:
        """Token ids of a conversation in SmolLM2's format, ending where the assistant is to speak.

        Roles and contents are plain text: a content of `<|im_end|>` is eleven characters, not the end of a turn.

        Raises:
            PromptTooLongError: as soon as there are more than `limit`.
            PromptError: no messages, an unknown role, or a content that is not text.
        """
        if not messages:
            raise PromptError("messages is empty: give at least one message")
        start, end = self.control_id("<|im_start|>"), self.control_id("<|im_end|>")
        turns = [_turn(index, message) for index, message in enumerate(messages)]
        if turns[0][0] != "system":
            turns.insert(0, ("system", DEFAULT_SYSTEM_PROMPT))
        ids: list[int] = []
        for role, content in turns:
            left = None if limit is None else limit - len(ids)
            ids += [start, *self.encode(f"{role}\n{content}", left), end, *self.encode("\n")]
        ids += [start, *self.encode("assistant\n")]
        if limit is not None and len(ids) > limit:
            raise PromptTooLongError
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; none for control tokens."""
        return self._bytes[token]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self._bytes.__getitem__, ids)).decode("utf-8", "replace")

    def _merge(self, word: str) -> tuple[int, ...]:
        """BPE of one word: the best-ranked neighbours join until none can, in O(n log n) for a hostile long word."""
        parts: list[str | None] = [self._alphabet[byte] for byte in word.encode("utf-8", "replace")]
        count = len(parts)
        after, before = list(range(1, count + 1)), list(range(-1, count - 1))
        heap: list[tuple[int, int, str, str]] = []

        def consider(left: int) -> None:
            right = after[left]
            if right < count:
                pair = (parts[left] or "", parts[right] or "")
                rank = self._rank.get(pair)
                if rank is not None:
                    heapq.heappush(heap, (rank, left, *pair))

        for index in range(count - 1):
            consider(index)
        while heap:
            _, left, first, second = heapq.heappop(heap)
            right = after[left]
            # A pair that has changed since it was pushed is stale; its successor is in the heap by itself.
            if parts[left] != first or right >= count or parts[right] != second:
                continue
            parts[left], parts[right] = first + second, None
            after[left] = after[right]
            if after[left] < count:
                before[after[left]] = left
            if before[left] >= 0:
                consider(before[left])
            consider(left)
        try:
            return tuple(self._id[part] for part in parts if part is not None)
        except KeyError:
            raise PromptError(f"the text cannot be tokenized: {self._unknown or 'a merge is no token'}") from None


class Detokenizer:
    """Turns a stream of tokens into text, giving only whole characters: a token may end in the midst of one."""

    __slots__ = ("_decoder", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)


def _strings(value: object) -> list[str]:
    """The value when it is a list of strings, else an empty one."""
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else []


def _split(text: str) -> Iterator[str]:
    for run in _numeric_splitter().finditer(text):
        if run[1] is not None:
            yield run[1]
        else:
            yield from _WORDS.findall(run[0])


def _turn(index: int, message: Mapping[str, Any]) -> tuple[str, str]:
    role, content = message.get("role"), message.get("content")
    known = _ROLES.get(role) if isinstance(role, str) else None
    if known is None:
        raise PromptError(f"messages[{index}].role is {role!r}: use one of {', '.join(_ROLES)}")
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise PromptError(f"messages[{index}].content must be text")
    return known, content
