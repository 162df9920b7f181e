"""Where the load goes: an http or https URL, taken apart once."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from forebay.errors import UsageError


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `prefix` goes before every path (`""` or `/base`), `tls` tells https."""

    host: str
    port: int
    prefix: str
    tls: bool

    @classmethod
    def parse(cls, url: str, option: str = "--target") -> Target:
        """Takes `http://host:port[/base][/v1]`; UsageError for anything else."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"{option} {url!r}: {error}") from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UsageError(f"{option} {url!r} is not an http or https URL: give one like http://127.0.0.1:8080")
        if parts.query or parts.fragment or parts.username is not None:
            raise UsageError(f"{option} {url!r}: give scheme, host, port and base path only")
        tls = parts.scheme == "https"
        # Base URLs are often given as the official clients take them, with /v1; the routes carry it already.
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        if not prefix.isascii() or any(ord(character) <= 32 for character in prefix):
            raise UsageError(f"{option} {url!r}: the path holds characters that need escaping")
        return cls(parts.hostname, port or (443 if tls else 80), prefix, tls)

    @property
    def authority(self) -> str:
        """The `host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    def ssl_context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.tls else None
