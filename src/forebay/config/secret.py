"""Secrets in a config: given as they are, or as a reference to the environment or a file, and never printed."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

SECRET_FILE_BYTES_MAX = 64 * 1024


class Secret:
    """A resolved secret. Its value is asked for by name, so that no log line or dump shows it by accident."""

    __slots__ = ("value",)

    def __init__(self, value: str) -> None:
        self.value = value

    def digest(self) -> bytes:
        """sha256 of the value: what a presented credential is looked up by."""
        return sha256(self.value.encode()).digest()

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self.value.encode(), other.value.encode())

    def __hash__(self) -> int:
        return hash(self.digest())


def resolve(text: str, environment: Mapping[str, str]) -> Secret:
    """The secret that `text` states: itself, `env:NAME` or `file:PATH` (one trailing line break is not part of it).

    Raises ValueError with what is wrong; the message never holds a secret.
    """
    if text.startswith("env:"):
        name = text[4:]
        value = environment.get(name)
        if value is None:
            raise ValueError(f"environment variable {name!r} is not set; export it, or give the secret as file:PATH")
        return _checked(value, f"environment variable {name!r}")
    if text.startswith("file:"):
        return _checked(_read(Path(text[5:])), f"file {text[5:]!r}")
    return _checked(text, "the secret")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(SECRET_FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"file {str(path)!r} cannot be read ({reason}); check path and rights") from None
    if len(data) > SECRET_FILE_BYTES_MAX:
        raise ValueError(f"secret file {str(path)!r} is larger than {SECRET_FILE_BYTES_MAX} bytes; it holds no secret")
    text = data.decode("utf-8", "replace")
    return text.removesuffix("\n").removesuffix("\r")


def _checked(value: str, source: str) -> Secret:
    if not value:
        raise ValueError(f"{source} is empty; a secret needs at least one character")
    if any(not 0x21 <= ord(character) <= 0x7E for character in value):
        raise ValueError(f"{source} has spaces, line breaks or non-ASCII characters; no HTTP header can carry it")
    return Secret(value)
