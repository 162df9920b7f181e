"""API keys as callers hold them: `sk-fb-<public id>-<secret>`, made here, shown once, and kept only as a salted hash.

The secret has 160 bits of chance, so nobody can guess at it, hash or no hash; what a slow hash protects is passwords
(docs/adr, "keys"). The public id says which row to compare with, so a credential costs one look-up and one hash.
"""

from __future__ import annotations

import hmac
import re
import secrets
from base64 import b32encode
from hashlib import blake2b
from typing import NamedTuple

PREFIX = "sk-fb-"
ID_BYTES, SECRET_BYTES, SALT_BYTES, HASH_BYTES = 10, 20, 16, 32
ID_CHARACTERS, SECRET_CHARACTERS = 16, 32
CREDENTIAL_CHARACTERS = len(PREFIX) + ID_CHARACTERS + 1 + SECRET_CHARACTERS

_PERSON = b"forebay api key"  # no other use of the same hash gives the same value
_SHAPE = re.compile(rb"sk-fb-([a-z2-7]{16})-([a-z2-7]{32})")


class Minted(NamedTuple):
    """A new key: what its owner gets, and what is kept of it."""

    public_id: str
    credential: str  # the whole of what callers send; nothing keeps it
    verifier: bytes  # salt and hash, SALT_BYTES + HASH_BYTES


def mint() -> Minted:
    """A credential that nobody had before."""
    public_id, secret = _text(ID_BYTES), _text(SECRET_BYTES)
    salt = secrets.token_bytes(SALT_BYTES)
    return Minted(public_id, f"{PREFIX}{public_id}-{secret}", salt + _hash(secret.encode(), salt))


def public_id(credential: bytes) -> str | None:
    """The id that a credential names, or None when it has not the form of one. Nothing is verified."""
    if len(credential) != CREDENTIAL_CHARACTERS:
        return None
    shape = _SHAPE.fullmatch(credential)
    return None if shape is None else shape[1].decode()


def verify(credential: bytes, verifier: bytes) -> bool:
    """Is this the credential that `verifier` was made of? Compared in constant time."""
    secret = credential[-SECRET_CHARACTERS:]
    return hmac.compare_digest(_hash(secret, verifier[:SALT_BYTES]), verifier[SALT_BYTES:])


def _text(size: int) -> str:
    """So many bytes of chance in letters and digits that survive any shell, URL and double click."""
    return b32encode(secrets.token_bytes(size)).decode().rstrip("=").lower()


def _hash(secret: bytes, salt: bytes) -> bytes:
    return blake2b(secret, digest_size=HASH_BYTES, salt=salt, person=_PERSON).digest()
