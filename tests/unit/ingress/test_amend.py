"""A cap of the operator's in the body: nothing else changes, and what the engine reads is what the gate read."""

from __future__ import annotations

import json

import pytest

from forebay.ingress.http.amend import with_cap


@pytest.mark.parametrize(
    ("body", "route", "becomes"),
    [
        (b"{}", "chat", b'{"max_tokens":9}'),
        (b'{"seed":9007199254740993,"x":1.50e3}', "chat", b'{"seed":9007199254740993,"x":1.50e3,"max_tokens":9}'),
        (b'{"input":"\\u00e9"}', "responses", b'{"input":"\\u00e9","max_output_tokens":9}'),
        (b'{"max_tokens": null, "n": 2}', "completions", b'{"max_tokens":9,"n":2}'),
        (b'{"max_tokens":10,"max_completion_tokens":8}', "chat", b'{"max_tokens":9,"max_completion_tokens":8}'),
        (b'{"max_completion_tokens":100}', "chat", b'{"max_completion_tokens":9}'),
        (b'{"max\\u005ftokens":10}', "chat", b'{"max_tokens":9}'),
    ],
)
def test_the_cap_replaces_what_is_above_it_or_missing(body: bytes, route: str, becomes: bytes) -> None:
    assert with_cap(body, 9, route) == becomes
    assert set(json.loads(body)) <= set(json.loads(becomes))
