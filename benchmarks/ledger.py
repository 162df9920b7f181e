"""What the ledger costs: CPU for each request, postings, and a start with many keys.

    python -m benchmarks.ledger [--keys 100000] [--postgres URL]

CPU is that of the whole process, threads included, over the same paced load with and without the desk, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from uuid import uuid4

from sqlalchemy import insert

from forebay.core.events import EngineUp, Finished, Observer
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Lease, Refusal, Request, Ticket, Usage
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.quota.terms import KeyLimits, KeyTerms
from forebay.ledger.credits import Credits
from forebay.ledger.database import Database, open_store
from forebay.ledger.desk import Desk, DeskConfig
from forebay.ledger.journal import SETTLED, Journal
from forebay.ledger.posting import Posting, Tally, civil_day
from forebay.ledger.tables import usage
from forebay.live.gateway import Gateway

KEYS = 100
RATE = 2_000
SECONDS = 5.0
USED = Usage(300, 100)


class Deaf:
    """An observer that does nothing."""

    def closed(self, ticket: Ticket) -> None: ...

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None: ...


class Caller:
    """Ends every request as soon as it is dispatched; waits for credit where it must."""

    waits_for_credit = False

    def __init__(self, gateway: Gateway, desk: Desk | None) -> None:
        self.gateway, self.desk = gateway, desk
        self.request: Request

    def offer(self, request: Request) -> None:
        self.request = request
        if self.desk is None or self.gateway.credit(request.key) is None or self.desk.arrive(request, self):
            self.gateway.offer(request)

    def credit_came(self) -> None:
        self.offer(self.request)

    def no_credit_came(self) -> None:
        raise SystemExit("no credit came")

    def queued(self, ticket: Ticket) -> None: ...

    def dispatched(self, lease: Lease) -> None:
        self.gateway.report(Finished(lease, USED))

    def refused(self, refusal: Refusal) -> None:
        raise SystemExit(f"refused: {refusal}")

    def aborted(self, lease: Lease) -> None: ...


async def cpu_us(folder: Path, store: Database | None, *, prepaid: bool) -> float:
    """CPU of the process for each request, at RATE requests a second of KEYS keys."""
    desk = None if store is None else Desk(store, DeskConfig(folder / uuid4().hex))
    observer: Observer = Deaf() if desk is None else desk
    pool = PoolConfig("x", ("x/0",), ("*",), limit=FixedConfig(limit=1000))
    loop = asyncio.get_running_loop()
    gateway = Gateway(Pipeline(PipelineConfig((pool,)), random.Random(1), observer), loop)
    gateway.report(EngineUp("x/0"))
    for number in range(KEYS):
        gateway.set_key(f"key{number:013}", KeyTerms(KeyLimits(), prepaid=prepaid and desk is not None))
        if desk is not None and prepaid and store is not None:
            Credits(store).top_up(f"key{number:013}", 1 << 40, idempotency=uuid4().hex, actor="bench")
    if desk is not None:
        desk.start(loop, gateway)
    await asyncio.sleep(0.5)
    before, began, sent = time.process_time(), time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < SECONDS:
        while sent < elapsed * RATE:
            caller = Caller(gateway, desk)
            caller.offer(
                Request(f"key{sent % KEYS:013}", "m", "chat", caller, counted_tokens=300, max_output_tokens=100)
            )
            sent += 1
        await asyncio.sleep(0.002)
    spent = time.process_time() - before
    if desk is not None:
        await asyncio.to_thread(desk.stop)
    gateway.stop()
    return 1e6 * spent / sent


def measure_cpu(folder: Path, store: Database, rounds: int) -> None:
    without, plain, prepaid = [], [], []
    for _ in range(rounds):
        without.append(asyncio.run(cpu_us(folder, None, prepaid=False)))
        plain.append(asyncio.run(cpu_us(folder, store, prepaid=False)))
        prepaid.append(asyncio.run(cpu_us(folder, store, prepaid=True)))
    for name, rows in (("without", without), ("with the desk, no credit", plain), ("prepaid", prepaid)):
        more = statistics.median(rows) - statistics.median(without)
        spread = f"{min(rows):.1f} to {max(rows):.1f}"
        print(f"  {name}: {statistics.median(rows):.1f} µs of CPU a request ({spread}); {more:+.1f} µs")


def measure_hook(folder: Path, store: Database) -> None:
    """What the event loop itself pays at the end of a request."""
    desk = Desk(store, DeskConfig(folder / uuid4().hex))
    desk._scribe._idle = False  # its thread is not started: only the loop's side is timed
    pool = PoolConfig("x", ("x/0",), ("*",), limit=FixedConfig(limit=1000))
    pipeline = Pipeline(PipelineConfig((pool,)), random.Random(1), Deaf())
    pipeline.report(EngineUp("x/0"), 1)
    (effect,) = pipeline.offer(Request("k", "m", counted_tokens=300, max_output_tokens=100), 2)
    ticket = effect.leases[0].ticket  # type: ignore[union-attr]
    ticket.usage = USED
    times = []
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(100_000):
            desk.closed(ticket)
        times.append(time.perf_counter() - began)
        desk._scribe._waiting.clear()
    print(f"  of that on the event loop, at the end: {10 * statistics.median(times):.2f} µs")
    desk.stop()


def measure_posts(store: Database) -> None:
    posting = Posting(store)
    for keys in (1, 100, 1000):
        names = [f"p{number:06}" for number in range(keys)]
        journal = uuid4().hex
        posting.register(journal, "bench")
        times, day = [], time.time_ns() // 1_000_000
        for frame in range(12):
            tally = Tally()
            for name in names:
                tally.add(name, day, 300, 100, prepaid=True)
            began = time.perf_counter()
            posting.post(journal, frame, frame + 1, tally)
            times.append(time.perf_counter() - began)
        middle = statistics.median(times[2:])
        print(f"  {keys} prepaid keys in a batch: {1000 * middle:.1f} ms, {keys / middle:,.0f} keys a second")


def measure_start(folder: Path, store: Database, keys: int) -> None:
    """A journal with one settlement of every key, and a row of use for each: from the folder to the usage restored."""
    day = civil_day(time.time_ns() // 86_400_000_000_000)
    with store.begin() as connection:
        for start in range(0, keys, 10_000):
            counts = {"requests": 1, "input_tokens": 10, "output_tokens": 5}
            rows = [
                {"key_id": f"s{n:07}", "period": period, "start": at} | counts
                for n in range(start, min(keys, start + 10_000))
                for period, at in (("day", day), ("month", day // 100))
            ]  # fmt: skip
            connection.execute(insert(usage), rows)
    path = folder / uuid4().hex
    journal, name = Journal(path), uuid4().hex
    Posting(store).register(name, "bench")
    journal.begin(name)
    now = time.time_ns() // 1_000_000
    for start in range(0, keys, 20):
        journal.append([(SETTLED, f"s{n:07}", n, 10, 5, "") for n in range(start, start + 20)], now)
    size = journal.size
    journal.end(remove=False)
    began = time.perf_counter()
    desk = Desk(store, DeskConfig(path))
    recovered = time.perf_counter()
    used = len(desk.used())
    done = time.perf_counter()
    print(
        f"  {keys:,} keys: {recovered - began:.2f} s to post {desk.recovered:,} settlements of {size / 1e6:.1f} MB, "
        f"{done - recovered:.2f} s to read what {used:,} keys used"
    )
    desk.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--postgres", help="URL of an empty database")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for url in filter(None, (f"sqlite:///{folder / 'store.db'}", chosen.postgres)):
            store = open_store(url)
            print(store.name)
            measure_cpu(folder, store, chosen.rounds)
            measure_hook(folder, store)
            measure_posts(store)
            measure_start(folder, store, chosen.keys)
            store.close()


if __name__ == "__main__":
    main()
