"""A gateway with a store, seen from outside: who waits for credit, who is refused, and what goes on without a store."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.config.schema import Limits, ModelLimits
from forebay.ledger.credits import Credits
from forebay.ledger.journal import Journal
from forebay.ledger.statement import Balance, history
from tests.faults.rig.client import RawClient, chat
from tests.faults.rig.waiting import eventually
from tests.integration.stored import SMALL, USED, World, degraded
from tests.stores.postgres import Postgres

ABSENT_S = 20.0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, f"sqlite:///{tmp_path / 'store.db'}")
    yield made
    made.end()


def test_a_prepaid_key_pays_and_is_refused_when_it_has_nothing_left(world: World) -> None:
    world.key("rich", 10_000)
    world.key("poor", 60)
    world.key("plain")
    gateway = world.start(lease_tokens=100)
    assert [world.ask(gateway, name).status for name in ("rich", "plain", "rich")] == [200, 200, 200]
    answers = [world.ask(gateway, "poor") for _ in range(12)]
    served = sum(answer.status == 200 for answer in answers)
    assert {answer.status for answer in answers} == {200, 429}
    assert answers[-1].header("x-forebay-reason") == "key_credits"
    assert answers[-1].json()["error"]["code"] == "insufficient_quota"
    assert answers[-1].header("x-should-retry") == "false"
    with RawClient(gateway.port) as client:
        client.request(chat(stream=True, max_tokens=10), key=world.secrets["rich"])
        assert b"[DONE]" in client.read_answer(5).body
    eventually(lambda: world.has("rich").spent == 3 * USED, 10)
    eventually(lambda: world.has("poor").spent == served * USED, 10)
    assert served * USED <= 60
    assert degraded(gateway) == []
    eventually(lambda: gateway.metric("forebay_ledger_lag_seconds") == 0, 10)
    assert gateway.metric("forebay_ledger_posted_total") == served + 4
    assert [line.kind for line in history(world.store, key=world.ids["rich"])][-2:] == ["hold", "top_up"]
    Credits(world.store).top_up(world.ids["poor"], 1000, idempotency="more", actor="test")
    eventually(lambda: world.ask(gateway, "poor").status == 200, 10)


def test_two_gateways_never_spend_more_than_the_key_has(world: World) -> None:
    world.key("k", 40 * USED)
    one, other = world.start(lease_tokens=50, lease_idle_s=0.2), world.start(lease_tokens=50, lease_idle_s=0.2)
    served = 0
    for round_ in range(120):
        answer = world.ask((one, other)[round_ % 2], "k")
        assert answer.status in {200, 429}, answer
        served += answer.status == 200
        if round_ > 40 and answer.status == 429 and not world.has("k").available + world.has("k").held:
            break
    one.stop()
    other.stop()
    world.gateways.clear()
    found = world.has("k")
    assert found.spent == served * USED <= found.topped_up
    assert (found.held, found.debt) == (0, 0)
    assert served >= 30


def test_usage_and_credit_survive_a_restart(world: World) -> None:
    world.key("k", 10_000)
    world.start(lease_tokens=100)
    for _ in range(3):
        assert world.ask(world.gateways[0], "k").status == 200
    world.gateways.pop().stop()
    assert world.has("k") == Balance(world.ids["k"], 10_000, 10_000 - 3 * USED, 0, 3 * USED, 0)
    assert [path.name for path in (world.folder / "journal-0").iterdir()] == ["lock"]
    again = world.start(lease_tokens=100)
    assert world.ask(again, "k").status == 200


def test_the_day_of_a_model_survives_a_kill(world: World) -> None:
    """Twice: what was counted again after the first is there after the second."""
    day = 3 * USED + 25  # three requests, and not a fourth: each reserves more than 25
    world.key("k", limits=Limits(models={"m": ModelLimits(tokens_per_day=day)}))
    for _ in range(2):
        gateway = world.start()
        assert world.ask(gateway, "k").status == 200
        assert world.ask(gateway, "k", SMALL | {"model": "another"}).status == 200
        eventually(lambda: gateway.metric("forebay_ledger_posted_total") == 2, 10)  # noqa: B023 - called at once
        world.gateways.pop().kill()
    gateway = world.start()
    assert [world.ask(gateway, "k").status for _ in range(2)] == [200, 429]
    refused = world.ask(gateway, "k")
    assert "tokens/day of this key for model m" in refused.json()["error"]["message"]
    assert world.ask(gateway, "k", SMALL | {"model": "another"}).status == 200


def test_without_the_store_leased_credit_is_spent_and_nothing_is_lost(world: World) -> None:
    """Another process keeps SQLite's write lock, as a backup tool does that hangs."""
    world.key("leased", 100_000)
    world.key("late", 100_000)
    world.key("plain")
    gateway = world.start(lease_tokens=5_000, lease_wait_s=1)
    assert world.ask(gateway, "leased").status == 200
    eventually(lambda: world.has("leased").spent == USED, 10)
    other = sqlite3.connect(world.folder / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for _ in range(5):
        assert [world.ask(gateway, name).status for name in ("leased", "plain")] == [200, 200]
    late = world.ask(gateway, "late")
    assert (late.status, late.header("x-forebay-reason")) == (503, "ledger_away")
    assert late.json()["error"]["code"] == "ledger_unavailable"
    assert "credit" in late.json()["error"]["message"]
    assert 1 <= int(late.header("retry-after")) <= 4
    assert late.header("x-should-retry") == "true"
    eventually(lambda: any("locked" in text for text in degraded(gateway)), 15)
    assert gateway.metric("forebay_ledger_store_up") == 0
    assert gateway.metric("forebay_ledger_lag_seconds") > 0
    other.close()
    eventually(lambda: world.has("leased").spent == 6 * USED, 20)
    eventually(lambda: world.ask(gateway, "late").status == 200, 10)
    eventually(lambda: not degraded(gateway), 10)
    assert gateway.metric("forebay_ledger_lost_total") == 0


def test_a_full_disk_closes_prepaid_keys_and_no_others(world: World) -> None:
    """The limit on the size of files is as hard as the end of a disk, for the journal and for SQLite alike."""
    world.key("k", 1_000_000)
    world.key("plain")
    gateway = world.start(lease_tokens=5_000)
    assert world.ask(gateway, "k").status == 200
    eventually(lambda: world.has("k").spent == USED, 10)
    pid, (soft, hard) = gateway.process.pid, resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (10, hard))
    served = 0
    while not any("journal" in text for text in degraded(gateway)):
        assert world.ask(gateway, "plain").status == 200
        served += 1
    refused = world.ask(gateway, "k")
    assert (refused.status, refused.header("x-forebay-reason")) == (503, "ledger_away")
    assert "written down" in refused.json()["error"]["message"]
    assert world.ask(gateway, "plain").status == 200
    assert gateway.metric("forebay_ledger_journal_writable") == 0
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    eventually(lambda: world.ask(gateway, "k").status == 200, 20)
    eventually(lambda: not degraded(gateway), 20)
    eventually(lambda: world.has("k").spent == 2 * USED, 20)
    eventually(lambda: gateway.metric("forebay_ledger_lag_seconds") == 0, 20)
    assert gateway.metric("forebay_ledger_posted_total") == served + 3
    assert gateway.metric("forebay_ledger_lost_total") == 0


def test_a_client_that_leaves_while_its_credit_is_leased_is_forgotten(world: World) -> None:
    world.key("k", 100_000)
    gateway = world.start(lease_wait_s=10)
    other = sqlite3.connect(world.folder / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with RawClient(gateway.port) as client:
        client.request(SMALL, key=world.secrets["k"])
        eventually(lambda: gateway.metric("forebay_ledger_waiting") == 1, 3)
    eventually(lambda: gateway.metric("forebay_ledger_waiting") == 0, 3)
    other.close()
    eventually(lambda: world.ask(gateway, "k").status == 200, 10)
    assert len(world.backend.calls) == 1


def test_what_cannot_be_started_is_said(world: World) -> None:
    taken = Journal(world.folder / "journal-0")
    with pytest.raises(AssertionError, match="belongs to another gateway that runs"):
        world.start()
    taken.end(remove=True)
    for url, keys, said in (
        ("postgresql://nobody@127.0.0.1:1/none", {"at_start": "stop"}, "does not answer"),
        (f"sqlite:///{world.folder}/no/such/folder.db", {"at_start": "stop"}, "its folder must exist"),
        (f"sqlite:///{world.folder / 'gateway-0' / 'forebay.toml'}", {}, "not a sound SQLite database"),
        ("mysql://me@127.0.0.1/x", {}, "cannot be a mysql database"),
    ):
        world.url = url
        with pytest.raises(AssertionError, match=said) as raised:
            world.start(keys)
        assert "Traceback" not in str(raised.value)


@pytest.mark.peers
@pytest.mark.timeout(180)
def test_postgresql_may_stop_for_a_while(tmp_path: Path) -> None:
    server = Postgres()
    world = World(tmp_path, server.url())
    try:
        world.key("leased", 1_000_000)
        world.key("late", 1_000_000)
        gateway = world.start(lease_tokens=50_000, lease_wait_s=1)
        assert world.ask(gateway, "leased").status == 200
        eventually(lambda: world.has("leased").spent == USED, 10)
        server.stop()
        for _ in range(20):
            assert world.ask(gateway, "leased").status == 200
        eventually(lambda: len(degraded(gateway)) > 0, 15)
        assert world.ask(gateway, "late").header("x-forebay-reason") == "ledger_away"
        server.start()
        eventually(lambda: not degraded(gateway), ABSENT_S)
        eventually(lambda: world.has("leased").spent == 21 * USED, ABSENT_S)
        assert world.ask(gateway, "late").status == 200
        world.end()
    finally:
        for running in world.gateways:
            running.kill()
        server.remove()
