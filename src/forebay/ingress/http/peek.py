"""What a body says about its own cost, read without building it: typed decode of a few fields, raw bytes for the rest.

The rule of this file: the gate and the engine must never read a body differently. A body is judged from the same
bytes that are forwarded; duplicate keys, which parsers resolve differently, are refused; whatever is not valid JSON or
UTF-8 is refused. The oracle of its fuzz test: `peek` returns, or raises BadRequest, and nothing else.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from forebay.core.admission.byte_prices import tokens_per_byte
from forebay.core.model import ESCAPED, ByteClass
from forebay.ingress.http.media import has_media, price_media

CHOICES_MAX = 128
OUTPUT_TOKENS_MAX = 10_000_000
MODEL_NAME_MAX = 512
ITEMS_MAX = 16_384  # inputs of one embeddings request
TOKEN_IDS_MAX = 1_000_000  # of one request
LOGPROBS_MAX = 128  # alternatives per token; engines compute, keep and send each of them
STOPS_MAX = 256  # stop strings, each searched for after each token
LOGIT_BIAS_MAX = 16_384  # entries
FRAME_BYTES = 64  # of a body that are keys, roles and punctuation rather than text
LARGE_BYTES = 256 * 1024  # a body that may not be parsed whole: the event loop would stand still
COMPARED_BYTES = 64 * 1024  # in one step: fresh memory for a copy of all would cost more than the comparing

Cap = Annotated[int, Meta(ge=0, le=OUTPUT_TOKENS_MAX)]
Choices = Annotated[int, Meta(ge=1, le=CHOICES_MAX)]
Logprobs = Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)]
TokenId = Annotated[int, Meta(ge=0)]


ABSENT = msgspec.Raw()
"""In the place of a field that the body does not have; known by its identity, which costs less than its size."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Judged(msgspec.Struct):
    """The fields that the gate judges; the rest of the body is only checked to be JSON."""

    model: Annotated[str, Meta(min_length=1, max_length=MODEL_NAME_MAX)] | None = None
    stream: bool | None = None
    max_tokens: Cap | None = None
    max_completion_tokens: Cap | None = None
    max_output_tokens: Cap | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    stream_options: _StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    prompt: msgspec.Raw = ABSENT
    input: msgspec.Raw = ABSENT
    min_tokens: Cap | None = None
    logprobs: Logprobs | bool | None = None
    top_logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    stop: str | Annotated[list[str], Meta(max_length=STOPS_MAX)] | None = None
    logit_bias: msgspec.Raw = ABSENT


class _JudgedLarge(_Judged):
    """And the other fields in which large bodies are large."""

    messages: msgspec.Raw = ABSENT
    inputs: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT


_decode_judged = msgspec.json.Decoder(_Judged).decode
_decode_judged_large = msgspec.json.Decoder(_JudgedLarge).decode
_decode_ids = msgspec.json.Decoder(list[TokenId]).decode
_decode_id_lists = msgspec.json.Decoder(list[Annotated[list[TokenId], Meta(min_length=1)]]).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

BACKSLASH = b"\\"[0]
_ESCAPE = re.compile(rb"\\u([0-9a-fA-F]{2})")
_BEYOND_ASCII = re.compile(rb"[\xc0-\xff]")

# By the lead byte of UTF-8, from 0xC0, and by the block of 256 code points that an escape names.
_LATIN, _ALPHABET, _INDIC, _WIDE = ByteClass.LATIN, ByteClass.ALPHABET, ByteClass.INDIC, ByteClass.WIDE
SCRIPT_OF_LEAD = (*(_LATIN,) * 13, *(_ALPHABET,) * 19, _INDIC, _LATIN, _LATIN, *(_WIDE,) * 29)
SCRIPT_OF_BLOCK = tuple(
    ByteClass(ESCAPED + script)
    for script in (*(_LATIN,) * 3, *(_ALPHABET,) * 5, *(_INDIC,) * 8, *(_LATIN,) * 32, *(_WIDE,) * 208)
)

# A second copy of any of these keys is refused.
JUDGED = (
    "model", "messages", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of",
    "stream_options", "prompt", "input",
)  # fmt: skip
_QUOTED = tuple(f'"{name}"'.encode() for name in JUDGED)
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")  # any escape that could spell a part of such a key
_FIELD = re.compile(r"`\$\.(\w+)")


class BadRequest(Exception):  # noqa: N818 - named after what it becomes
    """The body cannot be served. `message` is for the caller, `field` names the culprit when there is one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class Peek(msgspec.Struct):
    """Facts about one body. Token counts are exact only where the body gives token ids."""

    model: str = ""
    stream: bool = False
    max_output_tokens: int | None = None
    completions: int = 1  # per prompt
    prompts: int = 1
    text_bytes: int = 0
    byte_class: ByteClass = ByteClass.ASCII
    counted_tokens: int = 0
    tokens_per_byte: float = 0.0
    media_tokens: int = 0
    has_stream_options: bool = False
    include_usage: bool = False


def peek(body: bytes, *, generates: bool = True) -> Peek:
    """Read the judged fields of a JSON object. Raises BadRequest."""
    ascii_only, size = body.isascii(), len(body)
    if not ascii_only:
        try:
            body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    try:
        judged = _decode_judged(body) if size <= LARGE_BYTES else _decode_judged_large(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _complaint(body, error) from None
    # One-byte searches come first: they cost a tenth of a longer needle's.
    escape = body.find(b"\\u") if BACKSLASH in body else -1
    escaped = escape >= 0
    if size > LARGE_BYTES and isinstance(judged, _JudgedLarge):
        _refuse_duplicates_in_large(body, judged)
    elif _has_spare_bytes(body):
        _refuse_duplicates(body, escaped)
    seen = Peek(judged.model or "", judged.stream or False, text_bytes=size - FRAME_BYTES)
    if generates:
        _read_output(judged, seen)
    if judged.prompt is not ABSENT:
        _read_prompt(bytes(judged.prompt), "prompt", seen)
    elif judged.input is not ABSENT:
        _read_prompt(bytes(judged.input), "input", seen)
    if judged.logit_bias is not ABSENT:
        _check_bias(bytes(judged.logit_bias))
    text = body
    if has_media(body):
        media = price_media(body)
        text, seen.media_tokens = media.text, media.tokens
        seen.text_bytes -= media.payload_bytes
    if seen.text_bytes < 0:
        seen.text_bytes = 0
    # The first character beyond ASCII stands for the others.
    if escaped and (first := _ESCAPE.search(body, escape)) is not None:
        seen.byte_class = SCRIPT_OF_BLOCK[int(first[1], 16)]
    elif not ascii_only and (beyond := _BEYOND_ASCII.search(body)) is not None:
        seen.byte_class = SCRIPT_OF_LEAD[body[beyond.start()] - 0xC0]
    seen.tokens_per_byte = tokens_per_byte(text, seen.byte_class)
    return seen


def opaque(body: bytes) -> Peek:
    """A body that is not JSON (audio): priced by its size, one token per 320 bytes of sound."""
    return Peek(counted_tokens=len(body) // 320 + 1, byte_class=ByteClass.ASCII)


def _has_spare_bytes(body: bytes) -> bool:
    """Is the object longer than its keys and values make it? If not, there is no room for a second copy of a key.

    A key is never spelt in fewer bytes than it has characters, so nothing can hide in the difference.
    """
    fields = _decode_object(body)
    # Two quotes, a colon and a comma each, and the braces, less the comma that the last pair lacks. Joining is the
    # cheapest way to sum the lengths, even of long values.
    spare = len(body) - len("".join(fields)) - len(b"".join(fields.values())) - 4 * len(fields) - 1
    if spare and spare == 2 * len(fields) - 1:
        # As Python writes it, with a space after each colon and comma; or else other bytes fill their place.
        return b"{%b}" % b", ".join([b'"%b": %b' % (name.encode(), value) for name, value in fields.items()]) != body
    return spare != 0


def _complaint(body: bytes, error: Exception) -> BadRequest:
    """What is wrong with a body that could not be read, for the caller."""
    if not body:
        return BadRequest("the body is empty; send a JSON object")
    if isinstance(error, RecursionError):
        return BadRequest("the body is nested too deeply")
    if not isinstance(error, msgspec.ValidationError):
        return BadRequest(f"the body is not valid JSON: {error}")
    named = _FIELD.search(str(error))
    if named is None:
        return BadRequest("the body must be a JSON object")
    return BadRequest(f"{named[1]!r} is not usable: {str(error).split(' - at')[0]}", named[1])


def _refuse_duplicates(body: bytes, escaped: bool) -> None:
    """Refuse a second copy of a judged key. Counting its spelling is enough unless keys are spelt with escapes."""
    if not _may_have_duplicates(body, escaped):
        return
    try:
        pairs = json.loads(body, object_pairs_hook=_Pairs, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not valid JSON") from None
    names = [name for name, _ in pairs]
    for name in JUDGED:
        if names.count(name) > 1:
            raise BadRequest(f"the key {name!r} appears more than once", name)


def _may_have_duplicates(body: bytes, escaped: bool) -> bool:
    if escaped and _ESCAPED_LETTER.search(body) is not None:
        return True
    count = body.count
    for quoted in _QUOTED:  # noqa: SIM110 - a generator costs as much as the counting
        if count(quoted) > 1:
            return True
    return False


def _refuse_duplicates_in_large(body: bytes, judged: _JudgedLarge) -> None:
    """The same for a large body: its bulk is cut out first, because parsing it would hold everybody up.

    Cutting cannot hide a key: a bulky value occurs as such in the body, and only one occurrence is taken out.
    """
    for value in (judged.messages, judged.prompt, judged.input, judged.inputs, judged.tools, judged.documents):
        if len(raw := memoryview(value)) > LARGE_BYTES // 16:
            body = _without(body, raw)
    if len(body) <= LARGE_BYTES:
        _refuse_duplicates(body, BACKSLASH in body)
    elif _may_have_duplicates(body, b"\\u00" in body):
        raise BadRequest("one of the keys appears more than once, or is spelt with escapes, in a body this large")


class _Pairs(list[tuple[str, Any]]):
    """An object as the pairs that it was written with."""


def _without(body: bytes, value: memoryview) -> bytes:
    """The body with one occurrence of a value cut out. Long needles are found slowly, so its beginning is sought."""
    at = body.find(value[:256])
    for start in range(0, len(value), COMPARED_BYTES):
        piece = bytes(value[start : start + COMPARED_BYTES])
        if not body.startswith(piece, at + start):
            at = body.find(value)
            break
    return body[:at] + b"0" + body[at + len(value) :]


def _read_output(judged: _Judged, seen: Peek) -> None:
    """The smallest of the caps that the body gives, and how many completions are computed per prompt."""
    cap = judged.max_tokens
    if judged.max_completion_tokens is not None or judged.max_output_tokens is not None:
        for other in (judged.max_completion_tokens, judged.max_output_tokens):
            if other is not None and (cap is None or other < cap):
                cap = other
    seen.max_output_tokens = cap
    if judged.min_tokens is not None and cap is not None and judged.min_tokens > cap:
        raise BadRequest(f"'min_tokens' is {judged.min_tokens}, more than the output cap of {cap}", "min_tokens")
    if judged.n is not None or judged.best_of is not None:
        seen.completions = max(judged.n or 1, judged.best_of or 1)
    options = judged.stream_options
    if options is not msgspec.UNSET:
        seen.has_stream_options = True
        seen.include_usage = isinstance(options, _StreamOptions) and bool(options.include_usage)


def _read_prompt(raw: bytes, field: str, seen: Peek) -> None:
    """Token ids are counted one by one; several prompts multiply the completions."""
    if not raw.startswith(b"["):
        return
    first = raw[1:64].lstrip()[:1]
    if first == b"{":
        return  # the messages of /v1/responses
    _bound_items(raw, first, field)
    try:
        if first == b'"':
            seen.prompts = len(_decode_texts(raw))
            return
        if first == b"[":
            lists = _decode_id_lists(raw)
            seen.prompts = len(lists)
            seen.counted_tokens += sum(map(len, lists))
        else:
            seen.counted_tokens += len(_decode_ids(raw))
    except (msgspec.DecodeError, RecursionError):
        text = (
            f"{field!r} must be a string, or a list of strings, of token ids (whole numbers from 0), or of such lists"
        )
        raise BadRequest(text, field) from None
    if not seen.counted_tokens:
        raise BadRequest(f"{field!r} is empty", field)
    seen.text_bytes -= len(raw)


def _bound_items(raw: bytes, first: bytes, field: str) -> None:
    """Refuse more items than one request may have before any is decoded."""
    if first == b'"':
        # At least so many strings: a quote that is no end or beginning of one has a backslash before it.
        items = (raw.count(b'"') - raw.count(b'\\"')) // 2
    else:
        items = raw.count(b"[") - 1
        if raw.count(b",") >= TOKEN_IDS_MAX:
            raise BadRequest(f"{field!r} has more than {TOKEN_IDS_MAX} token ids", field)
    if items > ITEMS_MAX:
        raise BadRequest(f"{field!r} has more than {ITEMS_MAX} inputs", field)


def _check_bias(raw: bytes) -> None:
    if raw.count(b",") >= LOGIT_BIAS_MAX:
        raise BadRequest(f"'logit_bias' has more than {LOGIT_BIAS_MAX} entries", "logit_bias")


def with_usage(body: bytes, seen: Peek) -> bytes:
    """The same body asking for a usage event at the end of its stream; nothing else changes."""
    if not seen.has_stream_options:
        start = body.index(b"{") + 1
        return body[:start] + b'"stream_options":{"include_usage":true},' + body[start:]
    fields = _decode_object(body)
    given = fields["stream_options"]
    options = _decode_object(given) if bytes(given) != b"null" else {}
    options["include_usage"] = msgspec.Raw(b"true")
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
    return msgspec.json.encode(fields)
