"""The keys of a store at work: in memory for the data port, in the core for the verdicts, and on the admin port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from forebay.config.schema import Config
from forebay.ingress.api.keys import KeyEndpoints
from forebay.ingress.api.ledger import LedgerEndpoints
from forebay.ingress.api.table import Endpoint
from forebay.ingress.http.site import Site
from forebay.ledger.database import Database, StoreGoneError
from forebay.ledger.desk import NOTHING_BEFORE, Desk
from forebay.ledger.feed import KeyFeed
from forebay.ledger.key import known
from forebay.ledger.keyring import Keyring, StoredKey
from forebay.ledger.keys import KeyStore
from forebay.live.gateway import Gateway


class StoredKeys:
    """What a gateway with a store has beside one without."""

    def __init__(self, database: Database, config: Config, wall_ns: Callable[[], int]) -> None:
        self.database = database
        self.keyring = Keyring(config)
        self.keyring.complete = False
        self._store = KeyStore(database, known(config))
        self._feed = KeyFeed(database, self.keyring, self._changed, self._read, lambda: wall_ns() / 1e9)
        self._has_read = False
        self._site: Site
        self._gateway: Gateway
        self._desk: Desk

    @classmethod
    async def load(cls, database: Database, config: Config, wall_ns: Callable[[], int] = time.time_ns) -> StoredKeys:
        """Read the keys of a store, without keeping the loop. Raises StoreError, unless the store is not there and the
        configuration says to wait for it."""
        stored = cls(database, config, wall_ns)
        try:
            await asyncio.to_thread(stored._feed.load)
            stored._has_read = True
        except StoreGoneError as error:
            if config.keys.at_start == "stop":
                raise
            stored._feed.degraded = f"the keys of the store are not known: {error}"
        return stored

    def start(self, site: Site, gateway: Gateway, loop: asyncio.AbstractEventLoop, desk: Desk) -> None:
        """Let the keys call, and follow their changes. `desk`: it knows their credit, and what they used."""
        self._site, self._gateway, self._desk = site, gateway, desk
        site.stored = self.keyring
        self._agree()
        desk.start(loop, gateway, self._complete)
        self._complete()
        self._feed.start(loop)

    def _read(self) -> None:
        """Every key of a store that was waited for is here."""
        self._has_read = True
        self._complete()

    def _complete(self) -> None:
        """Let the keys call once they, and what they used before, are known: else a quota would be spent twice."""
        desk, gateway = self._desk, self._gateway
        if self.keyring.complete or not (self._has_read and desk.opened):
            return
        before, desk.before = desk.before, NOTHING_BEFORE
        for key, (day_tokens, month_tokens) in before.of_keys.items():
            gateway.restore_usage(key, day_tokens, month_tokens)
        for (key, model), (day_tokens, month_tokens) in before.of_models.items():
            gateway.restore_usage(key, day_tokens, month_tokens, model)
        self.keyring.complete = True
        self._site.heads.clear()

    def reconfigure(self, config: Config) -> None:
        """Take other classes and teams: what they agree on with each key may differ."""
        self.keyring.reconfigure(config)
        self._store.known = known(config)
        self._agree()

    def _agree(self) -> None:
        for key in self.keyring.open_keys():
            self._gateway.set_key(key.id, self.keyring.agreed(key))

    def _changed(self, keys: list[StoredKey]) -> None:
        """The data port forgets a key before the core does: nobody may call with what the core does not know."""
        keys = [key for key in keys if self.keyring.knows(key.id)]
        self._site.forget({key.id for key in keys})
        for key in keys:
            terms = self.keyring.agreed(key)
            if key.closed is not None or not terms.prepaid:
                self._desk.forget(key.id)
            if key.closed is None:
                self._gateway.set_key(key.id, terms)
            else:
                self._gateway.remove_key(key.id)

    @property
    def degraded(self) -> str | None:
        """What does not work of it just now."""
        return self._feed.degraded

    def endpoints(self) -> Iterator[Endpoint]:
        """Of the admin port."""
        yield from KeyEndpoints(self._store, self._feed.look).endpoints()
        yield from LedgerEndpoints(self.database, self._store, self._credited).endpoints()

    def _credited(self, key_id: str) -> None:
        """The desk asks the store anew, instead of when it would have."""
        self._desk.credited(key_id)

    def stop(self) -> None:
        """Stop following."""
        self._feed.stop()
