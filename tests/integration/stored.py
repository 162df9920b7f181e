"""A backend, a store with keys, and gateways on them, seen from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forebay.config.schema import Limits
from forebay.ledger.credits import Credits
from forebay.ledger.database import Database, open_store
from forebay.ledger.key import NewKey
from forebay.ledger.keys import By, KeyStore
from forebay.ledger.statement import Balance, balance
from forebay.ledger.verify import verify
from tests.faults.rig.backend import FakeBackend
from tests.faults.rig.client import ask, chat
from tests.faults.rig.gateway import GatewayProcess, config_for
from tests.faults.rig.scripts import USAGE

USED = USAGE["prompt_tokens"] + USAGE["completion_tokens"]
SMALL: dict[str, Any] = chat(max_tokens=10)


class World:
    """As above; the folder holds the journals and what the gateways say."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.backend = FakeBackend()
        self.store: Database = open_store(url)
        self.gateways: list[GatewayProcess] = []
        self.secrets: dict[str, str] = {}
        self.ids: dict[str, str] = {}

    def key(self, name: str, credit: int | None = None, limits: Limits | None = None) -> None:
        made = KeyStore(self.store).create(NewKey(name=name, prepaid=credit is not None, limits=limits), By("test"))
        assert made.secret is not None
        self.secrets[name], self.ids[name] = made.secret, made.key.id
        if credit:
            Credits(self.store).top_up(made.key.id, credit, idempotency=f"first-{name}", actor="test")

    def start(self, keys: dict[str, Any] | None = None, **ledger: Any) -> GatewayProcess:
        """With a journal by how many run. `keys`: further settings of that section."""
        number = len(self.gateways)
        config = config_for(
            self.backend, slots=32, ledger={"journal": str(self.folder / f"journal-{number}"), **ledger}
        )
        config["keys"] = {"anonymous": False, "store": self.url} | (keys or {})
        gateway = GatewayProcess(config, self.folder / f"gateway-{number}")
        self.gateways.append(gateway)
        return gateway

    def ask(self, gateway: GatewayProcess, key: str, body: dict[str, Any] = SMALL) -> Any:
        return ask(gateway.port, body, key=self.secrets[key], within=15)

    def has(self, key: str) -> Balance:
        return balance(self.store, self.ids[key])

    def end(self) -> None:
        try:
            for gateway in self.gateways:
                gateway.stop()
            assert verify(self.store) == []
        finally:
            for gateway in self.gateways:
                gateway.kill()
            self.store.close()
            self.backend.close()


def degraded(gateway: GatewayProcess) -> list[str]:
    found = json.loads(gateway.admin("/api/v1/status"))["degraded"]
    assert isinstance(found, list)
    return found
