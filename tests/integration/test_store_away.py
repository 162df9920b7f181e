"""A gateway that starts before its store: who is served meanwhile, and what is known when the store is there."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.config.schema import Limits, ModelLimits
from forebay.ledger.database import StoreError, StoreGoneError, open_store
from forebay.ledger.posting import Posting
from tests.faults.rig.client import ask
from tests.faults.rig.gateway import GatewayProcess, key
from tests.faults.rig.waiting import eventually
from tests.integration.stored import SMALL, USED, World, degraded
from tests.stores.postgres import Postgres

STATIC: dict[str, Any] = {"anonymous": True, "static": [key("static", tokens_per_day=100_000)]}
BACK_S = 30.0


def _get(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def _waits(world: World, gateway: GatewayProcess) -> int:
    """What a gateway does that has not seen its store; returns how many requests it has served."""
    assert _get(gateway.port, "/readyz") == 503
    assert _get(gateway.admin_port, "/api/v1/keys") == 503
    served = [ask(gateway.port, SMALL), ask(gateway.port, SMALL, key="sk-static")]
    assert [answer.status for answer in served] == [200, 200]
    for secret in (world.secrets["day"], world.secrets["rich"]):
        refused = ask(gateway.port, SMALL, key=secret)
        assert (refused.status, refused.header("x-forebay-reason")) == (503, "store_away")
        assert refused.json()["error"]["code"] == "store_unavailable"
        assert 1 <= int(refused.header("retry-after")) <= 4
        assert refused.header("x-should-retry") == "true"
    assert ask(gateway.port, SMALL, key="no key of any store").status == 401
    eventually(lambda: {text.split()[1] for text in degraded(gateway)} == {"keys", "journal", "store"})
    assert gateway.metric("forebay_ledger_store_up") == 0
    return len(served)


def _starts_without_its_store(world: World, go: Callable[[], None], come_back: Callable[[], None]) -> None:
    day = 3 * USED + 25  # three requests, and not a fourth: each reserves more than 25
    world.key("day", limits=Limits(models={"m": ModelLimits(tokens_per_day=day)}))
    world.key("rich", 100_000)
    gateway = world.start(STATIC)
    for name in ("day", "day", "rich", "rich"):
        assert world.ask(gateway, name).status == 200
    eventually(lambda: gateway.metric("forebay_ledger_posted_total") == 4, 10)
    assert world.ask(gateway, "day").status == 200
    eventually(lambda: gateway.metric("forebay_ledger_posted_total") == 5, 10)
    world.gateways.pop().kill()
    world.store.close()
    go()
    gateway = world.start(STATIC)
    _waits(world, gateway)
    world.gateways.pop().kill()  # what was left by the one before is still there, and posted by the next
    gateway = world.start(STATIC)
    served = _waits(world, gateway)
    come_back()
    eventually(lambda: _get(gateway.port, "/readyz") == 200, BACK_S, "a gateway that is ready")
    eventually(lambda: not degraded(gateway), BACK_S)
    assert world.ask(gateway, "day").status == 429, "its day was used up before the store went"
    assert world.ask(gateway, "rich").status == 200
    assert ask(gateway.port, SMALL, key="sk-fb-aaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb").status == 401
    assert _get(gateway.admin_port, "/api/v1/keys") == 200
    eventually(lambda: gateway.metric("forebay_ledger_posted_total") == served + 1, BACK_S)
    assert gateway.metric("forebay_ledger_lost_total") == 0
    eventually(lambda: world.has("rich").spent == 3 * USED, 10)
    (of_static, _) = Posting(world.store).used(_now_ms(world))["static"]
    assert of_static == USED, "what was used while the store was away is there, from the memory of the one that lived"


def _now_ms(world: World) -> int:
    with world.store.read() as connection:
        return world.store.now_ms(connection)


def test_a_sqlite_file_whose_folder_comes_later(tmp_path: Path) -> None:
    """As with a volume that is mounted late."""
    here, gone = tmp_path / "volume", tmp_path / "elsewhere"
    here.mkdir()
    world = World(tmp_path, f"sqlite:///{here / 'store.db'}")
    try:
        _starts_without_its_store(world, lambda: here.rename(gone) and None, lambda: gone.rename(here) and None)
        world.end()
    finally:
        for running in world.gateways:
            running.kill()


def test_a_store_that_is_new_gets_its_tables_when_it_comes(tmp_path: Path) -> None:
    here = tmp_path / "volume"
    store = open_store(f"sqlite:///{here / 'store.db'}", wait=True)
    with pytest.raises(StoreGoneError, match="folder must exist"), store.read():
        pytest.fail("a store that is not there was read")
    here.mkdir()
    assert Posting(store).used(0) == {}
    store.close()


@pytest.mark.peers
@pytest.mark.timeout(180)
def test_postgresql_may_come_up_later(tmp_path: Path) -> None:
    server = Postgres()
    world = World(tmp_path, server.url())
    try:
        _starts_without_its_store(world, server.stop, server.start)
        world.end()
    finally:
        for running in world.gateways:
            running.kill()
        server.remove()


@pytest.mark.peers
@pytest.mark.timeout(120)
def test_what_waiting_does_not_bring_stops_the_start() -> None:
    """A database or a user that nobody made, or a password that is wrong."""
    server = Postgres()
    try:
        url = server.url()
        for wrong in (url.replace("forebay_", "no_such_"), url.replace("postgres@", "nobody:hunter2@")):
            with pytest.raises(StoreError, match="lets us not in") as raised:
                open_store(wrong, wait=True)
            assert not isinstance(raised.value, StoreGoneError)
            assert "hunter2" not in str(raised.value)
    finally:
        server.remove()
