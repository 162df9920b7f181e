"""The one change of a request's meaning that an operator may ask for: a cap on the tokens it may generate."""

from __future__ import annotations

import msgspec

CAPS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def with_cap(body: bytes, cap: int, route: str) -> bytes:
    """The same JSON object with no output cap above `cap`, and with that one when it has none; the values of all other
    fields stay as they were written. `body` was read before: its caps are whole numbers or null."""
    fields = _decode_object(body)
    stated = [name for name in CAPS if bytes(fields.get(name, b"null")) != b"null"]
    for name in stated or ["max_output_tokens" if route == "responses" else "max_tokens"]:
        if name not in stated or int(bytes(fields[name])) > cap:
            fields[name] = msgspec.Raw(b"%d" % cap)
    return msgspec.json.encode(fields)
