"""Random lives of a ledger against a naive model: two gateways, two keys, repeated requests, leases that run out."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forebay.errors import UsageError
from forebay.ledger.credits import Credits, Hold
from forebay.ledger.database import open_store
from forebay.ledger.posting import Posting, Tally
from forebay.ledger.statement import balance, history
from forebay.ledger.verify import verify

KEYS = ("k", "l")
MEMORY = Path("/dev/shm")  # where a sync costs nothing
TTL_MS = 3_600_000
tokens = st.integers(1, 200)
keys = st.sampled_from(KEYS)
gateways = st.integers(0, 1)
times = st.integers(1, 2)  # how often a request is sent


@dataclass
class Model:
    """What one key has, told as simply as can be."""

    given: int = 0
    available: int = 0
    spent: int = 0
    debt: int = 0
    leased: dict[str, int] = field(default_factory=dict)  # journal -> tokens
    transfers: int = 0

    def free(self, amount: int) -> None:
        paid = min(amount, self.debt)
        self.debt -= paid
        self.available += amount - paid

    def use(self, journal: str, amount: int) -> None:
        self.spent += amount
        leased = min(amount, self.leased.get(journal, 0))
        if leased:
            self.leased[journal] -= leased
        rest = min(amount - leased, self.available)
        self.available -= rest
        self.debt += amount - leased - rest

    def end(self, journal: str) -> None:
        left = self.leased.pop(journal, 0)
        self.free(left)
        self.transfers += left > 0


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="forebay-ledger-", dir=MEMORY if MEMORY.is_dir() else None))
        self.store = open_store(f"sqlite:///{self.folder / 'store.db'}")
        self.posting = Posting(self.store)
        self.model = {key: Model() for key in KEYS}
        self.journals = [self.started(), self.started()]
        self.frames = dict.fromkeys(self.journals, 0)
        self.wish = 0

    def started(self) -> str:
        journal = uuid4().hex
        self.posting.register(journal, "here")
        return journal

    @rule(key=keys, amount=tokens, sent=times)
    def top_up(self, key: str, amount: int, sent: int) -> None:
        name = uuid4().hex
        for _ in range(sent):
            Credits(self.store).top_up(key, amount, idempotency=name, actor="ann")
        self.model[key].given += amount
        self.model[key].free(amount)
        self.model[key].transfers += 1

    @rule(key=keys, amount=st.integers(-200, -1))
    def take_back(self, key: str, amount: int) -> None:
        model = self.model[key]
        try:
            Credits(self.store).adjust(key, amount, idempotency=uuid4().hex, actor="ann", note="")
        except UsageError:
            assert model.available < -amount
        else:
            model.given += amount
            model.available += amount
            model.transfers += 1
            assert model.available >= 0

    @rule(key=keys, gateway=gateways, need=st.integers(0, 200), want=st.integers(0, 200), sent=times)
    def hold(self, key: str, gateway: int, need: int, want: int, sent: int) -> None:
        self.wish += 1
        journal, model = self.journals[gateway], self.model[key]
        granted = {
            self.posting.credits.hold(journal, self.wish, [Hold(key, need, want)], TTL_MS)[key].tokens
            for _ in range(sent)
        }
        expected = min(model.available, max(need, min(want, model.available // 2)))
        assert granted == {expected}
        if expected:
            model.available -= expected
            model.leased[journal] = model.leased.get(journal, 0) + expected
            model.transfers += 1

    @rule(gateway=gateways, used=st.dictionaries(keys, tokens, min_size=1), sent=times)
    def post(self, gateway: int, used: dict[str, int], sent: int) -> None:
        journal, tally = self.journals[gateway], Tally()
        for key, amount in used.items():
            tally.add(key, 0, amount, 0, prepaid=True)
            self.model[key].use(journal, amount)
            self.model[key].transfers += 1
        for _ in range(sent):
            self.posting.post(journal, self.frames[journal], self.frames[journal] + 1, tally)
        self.frames[journal] += 1

    @rule(key=keys, gateway=gateways, amount=tokens, sent=times)
    def release(self, key: str, gateway: int, amount: int, sent: int) -> None:
        self.wish += 1
        journal, model = self.journals[gateway], self.model[key]
        for _ in range(sent):
            self.posting.credits.release(journal, self.wish, {key: amount})
        if given := min(amount, model.leased.get(journal, 0)):
            model.leased[journal] -= given
            model.free(given)
            model.transfers += 1

    @rule(gateway=gateways, sent=times)
    def restart(self, gateway: int, sent: int) -> None:
        journal = self.journals[gateway]
        for _ in range(sent):
            self.posting.finish(journal, self.frames[journal], self.frames[journal], Tally())
        for model in self.model.values():
            model.end(journal)
        self.journals[gateway] = new = self.started()
        self.frames[new] = 0

    @rule(gateway=gateways)
    def vanish(self, gateway: int) -> None:
        """The other one is not heard of in time; it may come back."""
        lost, here = self.journals[gateway], self.journals[1 - gateway]
        self.posting.credits.renew(lost, -1)
        books = self.posting.credits
        books.expire(here, books.late(here))
        for model in self.model.values():
            model.end(lost)

    @invariant()
    def adds_up(self) -> None:
        assert verify(self.store) == []
        for key, model in self.model.items():
            found = balance(self.store, key)
            assert (found.topped_up, found.available, found.held, found.spent, found.debt) == (
                model.given, model.available, sum(model.leased.values()), model.spent, model.debt,
            )  # fmt: skip
            assert found.spent - found.debt <= found.topped_up
            assert len(history(self.store, key=key, limit=1000)) == model.transfers

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


LedgerMachine.TestCase.settings = settings(max_examples=8, stateful_step_count=15, deadline=None)
TestLedger = LedgerMachine.TestCase
