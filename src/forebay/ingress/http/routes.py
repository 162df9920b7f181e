"""Which paths are proxied, and how. Every route that reaches a GPU is gated; this list is the whole truth."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from forebay.core.model import Mode


class Dialect(StrEnum):
    """The shape of error bodies and stream errors."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    KSERVE = "kserve"


class Route(msgspec.Struct, frozen=True):
    """One proxied path. `gated` routes are admitted by the pipeline, the others are passed on at once."""

    name: str  # label in metrics
    gated: bool = True
    dialect: Dialect = Dialect.OPENAI
    generates: bool = True  # produces output tokens
    json: bool = True  # the body is a JSON object that is peeked
    usage_events: bool = False  # streams end with a usage event when asked by stream_options
    methods: tuple[bytes, ...] = (b"POST",)
    mode: Mode | None = None  # None: the gateway's
    engine: str = ""  # the pool that serves it, whatever the model; empty: by model


_GET = (b"GET", b"HEAD")


def _control(name: str, dialect: Dialect = Dialect.OPENAI, methods: tuple[bytes, ...] = _GET) -> Route:
    """A route that costs the engine next to nothing: passed on, keyed, never queued."""
    return Route(name, gated=False, dialect=dialect, generates=False, json=False, methods=methods)


EXACT: dict[bytes, Route] = {
    b"/v1/chat/completions": Route("chat", usage_events=True),
    b"/v1/completions": Route("completions", usage_events=True),
    b"/v1/responses": Route("responses"),
    b"/v1/messages": Route("messages", dialect=Dialect.ANTHROPIC),
    b"/v1/embeddings": Route("embeddings", generates=False),
    b"/v1/rerank": Route("rerank", generates=False),
    b"/v1/score": Route("score", generates=False),
    b"/v1/classify": Route("classify", generates=False),
    b"/pooling": Route("pooling", generates=False),
    b"/v1/audio/transcriptions": Route("audio", json=False),
    b"/v1/audio/translations": Route("audio", json=False),
    b"/v1/audio/speech": Route("audio", generates=False),
    b"/v1/models": _control("models"),
    b"/tokenize": _control("tokenize", methods=(b"POST",)),
    b"/detokenize": _control("detokenize", methods=(b"POST",)),
    b"/v2": _control("kserve_meta", Dialect.KSERVE),
}

_INFER = Route("infer", dialect=Dialect.KSERVE, generates=False)
_META = _control("kserve_meta", Dialect.KSERVE)
_MODEL_META = _control("models")


class Routes:
    """Looks paths up: the built-in ones, then those of the config."""

    def __init__(self, extra: Iterable[tuple[str, Route]] = ()) -> None:
        self._exact = EXACT | {path.encode(): route for path, route in extra}

    def find(self, path: bytes) -> Route | None:
        """The route of an exact path (query taken off), or None. Variants in spelling are not the same path."""
        route = self._exact.get(path)
        if route is not None:
            return route
        if path.startswith(b"/v2/"):
            return _kserve(path.split(b"/")[2:])
        if path.startswith(b"/v1/models/"):
            return _MODEL_META if _plain(path[11:]) else None
        return None


def _plain(part: bytes) -> bool:
    """Is this a part of a path that nobody reads as anything else?"""
    return part not in {b"", b".", b".."} and b"/" not in part and b"%" not in part


def _kserve(parts: list[bytes]) -> Route | None:
    """/v2/health/{live,ready}, /v2/models/M[/versions/V][/ready | /infer]."""
    if not all(map(_plain, parts)):
        return None
    if parts[0] == b"health" and len(parts) == 2 and parts[1] in {b"live", b"ready"}:
        return _META
    if parts[0] != b"models" or len(parts) < 2:
        return None
    rest = parts[2:]
    if len(rest) >= 2 and rest[0] == b"versions":
        rest = rest[2:]
    if rest == [b"infer"]:
        return _INFER
    return _META if rest in ([], [b"ready"], [b"config"], [b"stats"]) else None


def kserve_model(path: bytes) -> str:
    """The model that a KServe path names."""
    return path.split(b"/")[3].decode("ascii", "replace")
