"""An engine behind any OpenAI-style HTTP server: vLLM, SGLang, TGI, llama.cpp, Ollama, or our own.

It owns the address, the credential and the connections of one engine, and renders request heads for it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from forebay.engines.pool import ConnectionPool, Exchange
from forebay.errors import ConfigError

TARGETS_KEPT = 256


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """How long an engine may be silent, in seconds."""

    connect_s: float = 5.0
    first_byte_s: float = 600.0  # a long prompt behind a long queue in the engine
    idle_s: float = 120.0  # between two pieces of an answer


class OpenAIEngine:
    """One engine of a pool."""

    def __init__(
        self,
        name: str,
        url: str,
        loop: asyncio.AbstractEventLoop,
        *,
        api_key: str | None = None,
        timeouts: EngineTimeouts = EngineTimeouts(),
        tls: ssl.SSLContext | None = None,
        forward_key: bool = False,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"engine {name!r}: {url!r} is not an http:// or https:// URL")
        self.name = name
        self.url = url
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.forward_key = forward_key
        if parts.scheme == "https" and tls is None:
            tls = ssl.create_default_context()
        self.tls = tls if parts.scheme == "https" else None
        self.base_path = parts.path.rstrip("/").encode()
        authority = parts.netloc.rpartition("@")[2].encode()
        fixed = b" HTTP/1.1\r\nhost: " + authority + b"\r\naccept-encoding: identity\r\n"
        if api_key:
            fixed += b"authorization: Bearer " + api_key.encode() + b"\r\n"
        self._fixed = fixed
        self._heads: dict[bytes, bytes] = {}
        self.connections = ConnectionPool(
            loop,
            self.host,
            self.port,
            tls=self.tls,
            connect_s=timeouts.connect_s,
            first_byte_s=timeouts.first_byte_s,
            idle_s=timeouts.idle_s,
        )
        self.send: Callable[[Exchange], None] = self.connections.send
        """Put a request on the wire; the exchange hears of everything else."""

    def head(self, method: bytes, target: bytes) -> bytes:
        """The request line and the headers that do not vary, for a target (path and query)."""
        known = self._heads.get(target)
        if known is not None and method == b"POST":
            return known
        head = method + b" " + self.base_path + target + self._fixed
        if method == b"POST" and len(self._heads) < TARGETS_KEPT:
            self._heads[target] = head
        return head

    def close(self) -> None:
        self.connections.close()
