"""The stored keys in memory: what a credential opens is answered from here, never from the database.

A row is small, since most keys share their terms with many others, and the entry that the data port works with is made
only when a key is used. Wall-clock time is seconds since 1970; expiry is looked at by `expire`, not at each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import msgspec

from forebay.config.build import KeyEntry, entry_of, key_limits, key_terms
from forebay.config.schema import Config, Limits
from forebay.core.model import Mode
from forebay.core.quota.terms import KeyTerms
from forebay.ledger.credential import public_id, verify

COLUMNS = (
    "id", "verifier", "expires_ms", "revoked_ms", "team", "class", "mode", "models", "routes", "limits",
    "cap_output_tokens", "prepaid",
)  # fmt: skip
"""What a row of the store is read as, in this order."""


class StoredTerms(NamedTuple):
    """What keys may have in common, as the store spells it."""

    team: str | None
    class_: str
    mode: str | None
    models: str | None
    routes: str | None
    limits: str | None
    cap_output_tokens: int | None
    prepaid: int


class StoredKey(msgspec.Struct, gc=False, eq=False):
    """One row."""

    id: str
    verifier: bytes
    terms: StoredTerms
    expires_ms: int | None
    closed: str | None = None  # why it opens nothing any more


class Keyring:
    """Every key of the store that is not revoked. `config` says what classes and teams mean, and may be replaced."""

    def __init__(self, config: Config) -> None:
        self.complete = True  # False: the store has not been read yet, and a key that is not found may be one
        self._config = config
        self._keys: dict[str, StoredKey] = {}
        self._terms: dict[StoredTerms, StoredTerms] = {}  # each of those that are in use, once
        self._agreed: dict[StoredTerms, KeyTerms] = {}
        self._entries: dict[StoredTerms, KeyEntry] = {}  # of some key with these terms
        self._expiring: list[tuple[int, str]] = []  # a heap
        self._static: frozenset[str] = frozenset()
        self.reconfigure(config)

    def __len__(self) -> int:
        return len(self._keys)

    def reconfigure(self, config: Config) -> None:
        """Take other classes, teams and static keys."""
        self._config = config
        self._agreed.clear()
        self._entries.clear()
        self._static = frozenset(key.id for key in config.keys.static)

    def take(self, rows: Iterable[tuple[Any, ...]]) -> list[StoredKey]:
        """Put in rows of COLUMNS, new or changed; returns the keys that they are."""
        taken = []
        keys, known = self._keys, self._terms
        expiring = []
        for key_id, verifier, expires_ms, revoked_ms, *spelt in rows:
            terms = StoredTerms(*spelt)
            key = StoredKey(key_id, verifier, known.setdefault(terms, terms), expires_ms)
            if revoked_ms is not None:
                key.closed = "was revoked"
            elif expires_ms is not None:
                expiring.append((expires_ms, key_id))
            keys[key_id] = key
            taken.append(key)
        self._watch(expiring)
        return taken

    def _watch(self, expiring: list[tuple[int, str]]) -> None:
        if len(expiring) > len(self._expiring):
            self._expiring += expiring
            heapify(self._expiring)
        else:
            for each in expiring:
                heappush(self._expiring, each)

    def expire(self, now_ms: int) -> list[StoredKey]:
        """Close the keys whose time has come; returns them. A clock that steps back opens none again."""
        due, heap = [], self._expiring
        while heap and heap[0][0] <= now_ms:
            key = self._keys.get(heappop(heap)[1])
            if key is not None and key.closed is None and key.expires_ms is not None and key.expires_ms <= now_ms:
                key.closed = "has expired"
                due.append(key)
        return due

    def knows(self, key_id: str) -> bool:
        """Is this a key of the store, whether it opens anything or not?"""
        return key_id in self._keys and key_id not in self._static

    def open_keys(self) -> Iterator[StoredKey]:
        """Those that open something."""
        return (key for key in self._keys.values() if key.closed is None and key.id not in self._static)

    def find(self, credential: bytes) -> KeyEntry | None:
        """The entry of the key that this is. One look-up and one hash; nothing is remembered of wrong ones."""
        key = self._verified(credential)
        if key is None or key.closed is not None or key.id in self._static or not self.complete:
            return None
        return self._entry(key)

    def may_know(self, credential: bytes) -> bool:
        """Could it be a key of the store that has not been read yet?"""
        return not self.complete and public_id(credential) is not None

    def why_not(self, credential: bytes) -> str | None:
        """Why a right credential opens nothing; None when it is no key of this store."""
        key = self._verified(credential)
        return None if key is None else key.closed

    def agreed(self, key: StoredKey) -> KeyTerms:
        """What the core is to know of a key; keys with the same terms share it."""
        terms = self._agreed.get(key.terms)
        if terms is None:
            spelt = key.terms
            own = (
                self._config.limits.default if spelt.limits is None else msgspec.json.decode(spelt.limits, type=Limits)
            )
            terms = key_terms(
                self._config, key_limits(own), spelt.class_, spelt.team or "", prepaid=bool(spelt.prepaid)
            )
            self._agreed[key.terms] = terms
        return terms

    def _verified(self, credential: bytes) -> StoredKey | None:
        name = public_id(credential)
        key = None if name is None else self._keys.get(name)
        return key if key is not None and verify(credential, key.verifier) else None

    def _entry(self, key: StoredKey) -> KeyEntry:
        terms = key.terms
        alike = self._entries.get(terms)
        if alike is None:
            alike = self._entries[terms] = entry_of(
                self._config,
                key.id,
                terms.class_,
                mode=None if terms.mode is None else Mode(terms.mode),
                models=_names(terms.models),
                routes=_names(terms.routes),
                cap_output_tokens=terms.cap_output_tokens,
                stored=True,
                prepaid=bool(terms.prepaid),
            )
        return msgspec.structs.replace(alike, id=key.id)


def _names(spelt: str | None) -> frozenset[str] | None:
    return None if spelt is None else frozenset(msgspec.json.decode(spelt, type=list[str]))
