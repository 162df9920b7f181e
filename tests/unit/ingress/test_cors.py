"""Pages of other origins: who is named, and what a preflight is told."""

from __future__ import annotations

import pytest

from forebay.config.load import loads
from forebay.errors import ConfigError
from forebay.ingress.http.cors import Cors

PAGE = b"https://app.example.com"


def test_only_an_allowed_origin_is_named() -> None:
    cors = Cors((PAGE.decode(), "http://localhost:3000"))
    assert b"access-control-allow-origin: https://app.example.com\r\n" in cors.lines(PAGE)
    assert b"access-control-allow-origin: http://localhost:3000\r\n" in cors.lines(b"http://localhost:3000")
    for other in (b"https://app.example.com.evil.com", b"http://app.example.com", b"null", b"", b"*"):
        assert cors.lines(other) == b"vary: origin\r\n"


def test_any_origin() -> None:
    assert b"access-control-allow-origin: *\r\n" in Cors(("*",)).lines(b"https://any.example.com")


def test_a_preflight_echoes_names_of_headers_and_nothing_else() -> None:
    cors = Cors(("*",))
    told = cors.preflight((b"GET", b"HEAD"), b"authorization, x-api-key")
    assert b"access-control-allow-methods: GET, HEAD\r\n" in told
    assert b"access-control-allow-headers: authorization, x-api-key\r\n" in told
    for hostile in (b"a b", b"a\x00", b"", b"x" * 65, b", ".join([b"x"] * 65), b"a,,b"):
        assert b"allow-headers" not in cors.preflight((b"POST",), hostile)


@pytest.mark.parametrize(
    "origin", ["app.example.com", "https://app.example.com/", "https://App.example.com", "https://"]
)
def test_what_is_no_origin_is_refused_at_start(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"cors_origins\[0\].*no origin of a web page"):
        loads(f'server.cors_origins = ["{origin}"]')
    assert loads('server.cors_origins = ["https://app.example.com:8443", "*"]').config.server.cors_origins
