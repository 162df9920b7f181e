"""The desk beside a real pipeline, a real journal and a real store: what is settled, leased, metered and refused."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from forebay.core.events import EngineUp, Finished
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Lease, Refusal, Request, Ticket, Usage
from forebay.core.outcome import ShedReason
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.quota.terms import KeyLimits, KeyTerms
from forebay.errors import ForebayError
from forebay.ledger.credits import Credits
from forebay.ledger.database import Database, StoreGoneError, open_store
from forebay.ledger.desk import Desk, DeskConfig
from forebay.ledger.journal import METERED, SEGMENT_HEAD, Journal, read_frames
from forebay.ledger.statement import balance
from forebay.ledger.verify import verify
from forebay.live.gateway import Gateway

PREPAID = KeyTerms(KeyLimits(), prepaid=True)


class Call:
    """One request: the pipeline's owner and the desk's waiter."""

    def __init__(self, rig: Rig, key: str, tokens: int, **more: Any) -> None:
        self.rig = rig
        self.request = Request(key, owner=self, counted_tokens=tokens, max_output_tokens=tokens, **more)
        self.waits_for_credit = False
        self.lease: Lease | None = None
        self.refusal: Refusal | None = None
        self.turned_away = ""

    def offer(self) -> None:
        if self.rig.desk.arrive(self.request, self):
            self.rig.gateway.offer(self.request)
        elif not self.waits_for_credit:
            self.turned_away = self.rig.desk.why_closed()

    credit_came = offer

    def no_credit_came(self) -> None:
        self.turned_away = "not in time"

    def queued(self, ticket: Ticket) -> None: ...

    def dispatched(self, lease: Lease) -> None:
        self.lease = lease
        if self.request.stream:
            self.rig.desk.streams(lease)

    def refused(self, refusal: Refusal) -> None:
        self.refusal = refusal

    def aborted(self, lease: Lease) -> None: ...

    @property
    def decided(self) -> bool:
        return bool(self.lease or self.refusal or self.turned_away)

    def finish(self, tokens: int) -> None:
        assert self.lease is not None
        self.rig.gateway.report(Finished(self.lease, Usage(tokens, 0)))


class Rig:
    """A gateway with a desk, and one engine that is up."""

    def __init__(self, store: Database, config: DeskConfig, *, wait: bool = False) -> None:
        self.store, self.desk = store, Desk(store, config, wait=wait)
        self.opened = False
        pool = PoolConfig("llama", ("llama/0",), ("*",), limit=FixedConfig(limit=100))
        self.pipeline = Pipeline(PipelineConfig((pool,)), random.Random(1), self.desk)
        self.gateway = Gateway(self.pipeline, asyncio.get_running_loop())
        self.desk.start(asyncio.get_running_loop(), self.gateway, self._open)
        self.gateway.report(EngineUp("llama/0"))

    def _open(self) -> None:
        self.opened = True

    def prepaid(self, key: str, tokens: int = 0) -> None:
        self.gateway.set_key(key, PREPAID)
        if tokens:
            Credits(self.store).top_up(key, tokens, idempotency=uuid4().hex, actor="test")

    def call(self, key: str, tokens: int, **more: Any) -> Call:
        call = Call(self, key, tokens, **more)
        call.offer()
        return call

    async def served(self, key: str, tokens: int, **more: Any) -> Call:
        call = self.call(key, tokens, **more)
        await until(lambda: call.lease is not None)
        return call

    async def stop(self) -> None:
        await asyncio.to_thread(self.desk.stop)

    def kill(self) -> None:
        """As a process ends that is killed: its threads stop where they are, and its folder is free again."""
        self.desk._timer.cancel()
        self.desk._scribe.stop()
        self.desk._clerk._work = lambda: None
        self.desk._clerk._finish = lambda: None
        self.desk._clerk.stop()
        self.desk._journal.end(remove=False)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - it may come from any thread
            await asyncio.sleep(0.002)


@pytest.fixture
def config(tmp_path: Path) -> DeskConfig:
    return DeskConfig(tmp_path / "journal", write_s=0.002, sync_s=0.005, post_s=0.01, lease_tokens=100)


@asynccontextmanager
async def running(store: Database, config: DeskConfig, *, wait: bool = False) -> AsyncIterator[Rig]:
    rig = Rig(store, config, wait=wait)
    yield rig
    await rig.stop()


def has(store: Database, key: str) -> tuple[int, int, int, int]:
    assert verify(store) == []
    found = balance(store, key)
    return found.available, found.held, found.spent, found.debt


async def test_a_prepaid_request_waits_for_its_first_lease_and_pays_what_it_used(
    store: Database, config: DeskConfig
) -> None:
    async with running(store, config) as rig:
        rig.prepaid("k", 1000)
        call = rig.call("k", 20)
        assert call.waits_for_credit
        await until(lambda: call.decided)
        assert has(store, "k") == (900, 100, 0, 0)
        call.finish(30)
        await until(lambda: balance(store, "k").spent == 30)
        assert rig.desk.degraded == []
    assert has(store, "k") == (970, 0, 30, 0)


async def test_use_of_other_keys_is_counted_and_costs_no_credit(store: Database, config: DeskConfig) -> None:
    async with running(store, config) as rig:
        rig.gateway.set_key("k", KeyTerms(KeyLimits()))
        for _ in range(3):
            (await rig.served("k", 5)).finish(7)
        rig.call("k", 5)  # still under way at the end: nothing is known of it
    assert has(store, "k") == (0, 0, 0, 0)
    assert rig.desk.used() == {"k": (21, 21)}


async def test_use_of_a_model_is_kept_apart_where_its_days_count(store: Database, config: DeskConfig) -> None:
    """Also that of a stream which was open when the process died."""
    of_days = KeyLimits(models={"big": KeyLimits(tokens_per_day=1000), "small": KeyLimits(tokens_per_minute=1000)})
    rig = Rig(store, config)
    rig.prepaid("k", 1000)
    rig.gateway.set_key("k", KeyTerms(of_days, prepaid=True))
    rig.gateway.set_key("plain", KeyTerms(KeyLimits()))
    for model, tokens in (("big", 30), ("small", 40), ("big", 5)):
        (await rig.served("k", 5, model=model)).finish(tokens)
        (await rig.served("plain", 5, model=model)).finish(tokens)
    stream = await rig.served("k", 20, stream=True, model="big")
    assert stream.lease is not None
    stream.lease.generated = 9
    await until(lambda: _metered(config) == 9)
    rig.kill()
    async with running(store, config) as again:
        assert again.desk.used() == {"k": (104, 104), "plain": (75, 75)}
        assert again.desk.used_of_models() == {("k", "big"): (64, 64)}
    assert has(store, "k") == (896, 0, 104, 0)


async def test_a_key_without_credit_is_refused_by_the_pipeline_with_its_figures(
    store: Database, config: DeskConfig
) -> None:
    async with running(store, config) as rig:
        rig.prepaid("k", 30)
        call = rig.call("k", 20)
        await until(lambda: call.decided)
        assert call.refusal is not None
        assert (call.refusal.reason, call.refusal.limit) == (ShedReason.KEY_CREDITS, 30)
        again = rig.call("k", 20)  # the store has just said so: it is not asked for every request
        assert again.refusal is not None
        rig.prepaid("k", 100)
        rig.desk._keys["k"].short_at = -1e9  # a second later
        (await rig.served("k", 20)).finish(40)
    assert has(store, "k") == (90, 0, 40, 0)


async def test_all_that_wait_for_one_key_are_counted_into_its_lease(store: Database, config: DeskConfig) -> None:
    async with running(store, config) as rig:
        rig.prepaid("k", 1000)
        calls = [rig.call("k", 50) for _ in range(12)]  # 100 tokens each
        await until(lambda: all(call.decided for call in calls))
        assert sum(call.lease is not None for call in calls) == 10
        assert {call.refusal.reason for call in calls if call.refusal} == {ShedReason.KEY_CREDITS}
        for call in calls:
            if call.lease:
                call.finish(100)
    assert has(store, "k") == (0, 0, 1000, 0)


async def test_a_lease_is_topped_up_before_it_runs_out(store: Database, config: DeskConfig) -> None:
    async with running(store, replace(config, lease_tokens=1000)) as rig:
        rig.prepaid("k", 100_000)
        waited = 0
        for _ in range(100):
            call = rig.call("k", 50)
            waited += call.waits_for_credit
            await until(lambda call=call: call.decided)
            call.finish(100)
        assert waited < 20
    assert has(store, "k") == (90_000, 0, 10_000, 0)


async def test_a_client_that_leaves_while_it_waits_is_forgotten(store: Database, config: DeskConfig) -> None:
    async with running(store, config) as rig:
        rig.prepaid("k", 1000)
        call = rig.call("k", 20)
        assert rig.desk.waiting == 1
        rig.desk.leave(call)
        assert rig.desk.waiting == 0
        await until(lambda: balance(store, "k").held > 0)
        await rig.served("k", 20)
        assert not call.decided


async def test_no_more_wait_than_may(store: Database, config: DeskConfig) -> None:
    async with running(store, replace(config, waiting_most=2)) as rig:
        rig.prepaid("k", 1000)
        calls = [rig.call("k", 20) for _ in range(3)]
        assert [call.turned_away for call in calls] == ["", "", "too many requests wait for their keys' credit"]
        assert 1_000_000_000 <= rig.desk.come_back_ns() < 3_000_000_000


async def test_what_lies_idle_is_given_back(store: Database, config: DeskConfig) -> None:
    async with running(store, replace(config, idle_s=0.05)) as rig:
        rig.prepaid("k", 1000)
        (await rig.served("k", 20)).finish(30)
        await until(lambda: has(store, "k") == (970, 0, 30, 0))


async def test_what_the_account_paid_leaves_nothing_idle_in_a_later_lease(store: Database, config: DeskConfig) -> None:
    """An answer was longer than its lease, and the account paid the rest before the next lease came."""
    async with running(store, replace(config, idle_s=0.2)) as rig:
        rig.prepaid("k", 1000)
        call = await rig.served("k", 20)
        await until(lambda: has(store, "k") == (900, 100, 0, 0))
        call.finish(130)
        await until(lambda: has(store, "k")[2:] == (130, 0))
        (await rig.served("k", 20)).finish(10)
        await until(lambda: has(store, "k") == (860, 0, 140, 0))


async def test_nothing_lies_idle_when_the_answer_to_a_post_was_lost(store: Database, config: DeskConfig) -> None:
    async with running(store, replace(config, idle_s=0.2)) as rig:
        rig.prepaid("k", 1000)
        call = await rig.served("k", 20)
        posting, lost = rig.desk._posting.post, []

        def post_and_lose(*batch: Any) -> dict[str, int]:
            beyond = posting(*batch)
            if beyond and not lost:
                lost.append(beyond)
                raise StoreGoneError("the line broke")
            return beyond

        rig.desk._posting.post = post_and_lose
        call.finish(130)
        await until(lambda: bool(lost) and not rig.desk.degraded)
        assert lost == [{"k": 30}]
        (await rig.served("k", 20)).finish(10)
        await until(lambda: has(store, "k") == (860, 0, 140, 0))


async def test_debt_that_a_top_up_paid_is_not_paid_again_by_the_lease(store: Database, config: DeskConfig) -> None:
    async with running(store, replace(config, idle_s=0.2)) as rig:
        rig.prepaid("k", 50)
        (await rig.served("k", 10)).finish(90)
        await until(lambda: has(store, "k") == (0, 0, 90, 40))
        rig.prepaid("k", 1000)
        assert has(store, "k") == (960, 0, 90, 0)
        rig.desk.credited("k")
        (await rig.served("k", 20)).finish(10)
        await until(lambda: has(store, "k") == (950, 0, 100, 0))


async def test_a_lease_that_another_gateway_ended_is_given_back_once(
    tmp_path: Path, config: DeskConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lapsed here is no part of the lease that is opened when the store is back."""
    monkeypatch.setattr("forebay.ledger.database.BUSY_MS", 20)
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    async with running(store, replace(config, lease_ttl_s=0.4)) as rig:
        rig.prepaid("k", 1000)
        (await rig.served("k", 20)).finish(30)
        await until(lambda: has(store, "k") == (900, 70, 30, 0))
        work, rig.desk._clerk._work = rig.desk._clerk._work, _gone
        line = rig.gateway.credit("k")
        assert line is not None
        await until(lambda: line.left == 0 and _expired(store) == 1)
        assert has(store, "k") == (970, 0, 30, 0)
        rig.desk._ask("k", 20)  # comes before what lapsed has been given back
        rig.desk._clerk._work = work
        await until(lambda: line.left == 100)
        assert has(store, "k") == (870, 100, 30, 0)
    store.close()


def _expired(store: Database) -> int:
    books = Credits(store)
    return books.expire("me", books.late("me"))


async def test_the_leases_of_the_dead_are_given_back_by_another(store: Database, config: DeskConfig) -> None:
    """Not before they have stopped to spend them by this machine's own time: the store's clock may have been set."""
    dead = Rig(store, replace(config, lease_ttl_s=0.2))
    dead.prepaid("k", 1000)
    (await dead.served("k", 20)).finish(30)
    await until(lambda: has(store, "k") == (900, 70, 30, 0))
    dead.kill()
    async with running(store, replace(config, journal=config.journal.with_name("other"), lease_ttl_s=0.2)):
        await until(lambda: has(store, "k") == (970, 0, 30, 0))


def _gone() -> None:
    raise StoreGoneError("nobody answers")


async def test_a_key_that_is_forgotten_gives_its_credit_back(store: Database, config: DeskConfig) -> None:
    async with running(store, config) as rig:
        rig.prepaid("k", 1000)
        call = await rig.served("k", 20)
        rig.desk.forget("k")
        rig.gateway.remove_key("k")
        await until(lambda: has(store, "k") == (960, 40, 0, 0))  # what an open request holds stays
        call.finish(10)
        await until(lambda: has(store, "k") == (990, 0, 10, 0))  # and what it did not use goes back at its end
    assert has(store, "k") == (990, 0, 10, 0)


async def test_an_open_stream_is_metered_and_settled_when_the_process_dies(store: Database, config: DeskConfig) -> None:
    rig = Rig(store, config)
    rig.prepaid("k", 1000)
    (await rig.served("k", 20)).finish(30)
    stream = await rig.served("k", 20, stream=True)
    silent = await rig.served("k", 20, stream=True)
    assert stream.lease is not None
    stream.lease.generated = 5
    await until(lambda: _metered(config) == 5)
    stream.lease.generated = 13
    await until(lambda: _metered(config) == 13)
    assert silent.lease is not None
    rig.kill()
    async with running(store, config) as again:
        assert again.desk.recovered >= 1
        assert has(store, "k") == (1000 - 30 - 33, 0, 30 + 33, 0)  # 20 in and 13 out of the stream
    assert has(store, "k") == (1000 - 30 - 33, 0, 30 + 33, 0)


def _metered(config: DeskConfig) -> int:
    found = 0
    for path in config.journal.glob("*.journal"):
        for frame, _ in read_frames(path.read_bytes(), SEGMENT_HEAD.size):
            found = max([found, *(record[4] for record in frame.records if record[0] == METERED)])
    return found


async def test_a_stream_that_ended_is_settled_once(store: Database, config: DeskConfig) -> None:
    async with running(store, config) as rig:
        rig.prepaid("k", 1000)
        stream = await rig.served("k", 20, stream=True)
        assert stream.lease is not None
        stream.lease.generated = 7
        await until(lambda: _metered(config) == 7)
        stream.finish(28)
        other = await rig.served("k", 20, stream=True)
        assert other.lease is not None
        other.lease.generated = 3
        await until(lambda: balance(store, "k").spent == 28)
        rig.gateway.cancel(other.lease.ticket, None)  # the engine failed: nothing is charged
    assert has(store, "k") == (972, 0, 28, 0)


async def test_recovery_twice_posts_once(store: Database, config: DeskConfig) -> None:
    """The process dies after the store took the journal, and before the journal was removed."""
    rig = Rig(store, config)
    rig.prepaid("k", 1000)
    stream = await rig.served("k", 20, stream=True)
    assert stream.lease is not None
    stream.lease.generated = 4
    await until(lambda: _metered(config) == 4)
    rig.kill()
    kept = {path.name: path.read_bytes() for path in config.journal.glob("*.journal")}
    async with running(store, config):
        assert has(store, "k") == (976, 0, 24, 0)
    for name, text in kept.items():
        (config.journal / name).write_bytes(text)
    async with running(store, config):
        assert has(store, "k") == (976, 0, 24, 0)


async def test_a_journal_of_another_store_is_refused(store: Database, config: DeskConfig, tmp_path: Path) -> None:
    rig = Rig(store, config)
    rig.gateway.set_key("k", KeyTerms(KeyLimits()))
    (await rig.served("k", 5)).finish(7)
    rig.kill()
    other = open_store(f"sqlite:///{tmp_path / 'other.db'}")
    with pytest.raises(ForebayError, match="belongs to another store than sqlite"):
        Desk(other, config)
    other.close()
    async with running(store, config) as again:
        assert again.desk.used() == {"k": (7, 7)}


async def test_the_store_may_be_away_and_nothing_is_lost(
    tmp_path: Path, config: DeskConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite is locked by another process, for as long as it takes."""
    monkeypatch.setattr("forebay.ledger.database.BUSY_MS", 20)
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    async with running(store, config) as rig:
        rig.prepaid("k", 1000)
        rig.prepaid("poor", 1000)
        (await rig.served("k", 20)).finish(30)
        await until(lambda: balance(store, "k").spent == 30)
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        (await rig.served("k", 20)).finish(20)  # its lease is there
        late = rig.call("poor", 20)
        await until(lambda: bool(rig.desk.degraded) and late.decided)
        assert late.turned_away == "not in time"
        assert "locked" in rig.desk.degraded[0]
        at_once = rig.call("poor", 20)
        assert at_once.turned_away == "this key's credit cannot be looked up now"
        assert rig.desk.lag_s() > 0
        other.close()
        await until(lambda: not rig.desk.degraded and balance(store, "k").spent == 50)
        assert rig.desk.lag_s() == 0
        await rig.served("poor", 20)
    assert has(store, "k") == (950, 0, 50, 0)
    store.close()


async def test_what_is_used_before_the_store_was_there_waits_in_memory(
    tmp_path: Path, config: DeskConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as may; and what an earlier process left is counted before the keys are let in."""
    monkeypatch.setattr("forebay.ledger.scribe.WAITING_MOST", 3)
    here, gone = tmp_path / "here", tmp_path / "gone"
    here.mkdir()
    url = f"sqlite:///{here / 'store.db'}"
    rig = Rig(open_store(url), config)
    rig.gateway.set_key("k", KeyTerms(KeyLimits()))
    (await rig.served("k", 5)).finish(7)
    rig.kill()
    rig.store.close()
    here.rename(gone)
    store = open_store(url, wait=True)
    with pytest.raises(StoreGoneError):
        Desk(store, config)
    async with running(store, config, wait=True) as again:
        again.gateway.set_key("k", KeyTerms(KeyLimits()))
        for _ in range(5):
            (await again.served("k", 5)).finish(10)
        await until(lambda: again.desk.lost == 2)
        assert not again.desk.opened
        assert not again.opened
        assert len(again.desk.degraded) == 2
        gone.rename(here)
        await until(lambda: again.opened)
        assert again.desk.before.of_keys == {"k": (7, 7)}
        await until(lambda: again.desk.used() == {"k": (37, 37)})
        await until(lambda: not again.desk.degraded)
    assert verify(store) == []
    store.close()


async def test_what_the_store_never_saw_is_counted_as_lost(tmp_path: Path, config: DeskConfig) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'never' / 'store.db'}", wait=True)
    async with running(store, config, wait=True) as rig:
        rig.gateway.set_key("k", KeyTerms(KeyLimits()))
        (await rig.served("k", 5)).finish(10)
    assert rig.desk.lost == 1
    Journal(config.journal).end(remove=True)
    store.close()


async def test_without_renewal_credit_is_not_spent(
    tmp_path: Path, config: DeskConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others take a gateway that the store has not heard of for dead, and lease its credit anew."""
    monkeypatch.setattr("forebay.ledger.database.BUSY_MS", 20)
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    async with running(store, replace(config, lease_ttl_s=0.4)) as rig:
        rig.prepaid("k", 1000)
        (await rig.served("k", 20)).finish(30)
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None, timeout=10)
        other.execute("BEGIN IMMEDIATE")
        line = rig.gateway.credit("k")
        assert line is not None
        await until(lambda: line.left == 0)
        assert rig.call("k", 20).turned_away
        other.close()
        await until(lambda: has(store, "k") == (970, 0, 30, 0))
    store.close()


async def test_a_journal_that_cannot_be_written_closes_prepaid_keys_only(store: Database, config: DeskConfig) -> None:
    async with running(store, replace(config, bytes_most=400)) as rig:
        rig.prepaid("k", 10_000)
        rig.gateway.set_key("other", KeyTerms(KeyLimits()))
        (await rig.served("k", 20)).finish(30)
        post, rig.desk._clerk._post = rig.desk._clerk._post, lambda: None
        while not rig.desk.degraded:
            (await rig.served("other", 1)).finish(1)
            await asyncio.sleep(0.002)
        assert "cannot be written" in rig.desk.degraded[0]
        assert rig.call("k", 20).turned_away == "what this key uses cannot be written down now"
        (await rig.served("other", 1)).finish(100)
        rig.desk._scribe._bytes_most = 1 << 30
        rig.desk._clerk._post = post
        await until(lambda: not rig.desk.degraded)
        await rig.served("k", 20)
        await until(lambda: rig.desk.lag_s() == 0)
        assert rig.desk.lost == 0
    assert has(store, "k") == (9970, 0, 30, 0)
    assert rig.desk.used()["other"][0] >= 101


async def test_a_clock_that_is_set_back_stands_still(store: Database, config: DeskConfig) -> None:
    now = [1_000_000_000_000_000_000]
    desk = Desk(store, config, wall_ns=lambda: now[0])
    assert desk._wall_ms() == 1_000_000_000_000
    now[0] -= 86_400_000_000_000
    assert desk._wall_ms() == 1_000_000_000_000
    now[0] += 86_400_001_000_000
    assert desk._wall_ms() == 1_000_000_000_001
    desk.stop()


async def test_the_folder_is_let_go_when_the_start_fails(store: Database, config: DeskConfig) -> None:
    desk = Desk(store, config)
    with pytest.raises(ForebayError, match="belongs to another gateway that runs"):
        Desk(store, config)
    desk.stop()
    Journal(config.journal).end(remove=True)
