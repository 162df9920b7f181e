"""The wall clock of a machine is set, by minutes or days, while gateways work: days, expiry and leases of credit.

The gateways run in this process, with sockets, engines and a store as ever, and are told another time of day.
"""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from forebay.app import App
from forebay.config import loads
from forebay.config.schema import Limits
from forebay.ledger.key import NewKey
from forebay.ledger.keys import By, KeyStore
from tests.faults.rig.client import Answer, ask
from tests.faults.rig.gateway import config_for, to_toml
from tests.faults.rig.waiting import eventually
from tests.integration.stored import SMALL, USED, World

HOUR, DAY = 3_600, 86_400
NOON = int(datetime(2027, 3, 10, 12, tzinfo=UTC).timestamp())
LATE_S = 15.0  # on a busy machine; the clock is looked at every second


class Wall:
    """The wall clock of the machine; `set` moves it by so many seconds."""

    def __init__(self) -> None:
        self._ahead_ns = NOON * 10**9 - time.monotonic_ns()

    def __call__(self) -> int:
        return time.monotonic_ns() + self._ahead_ns

    def move(self, seconds: int) -> None:
        self._ahead_ns += seconds * 10**9


class Running:
    """A gateway on a loop of its own."""

    def __init__(self, config: dict[str, Any], wall: Wall) -> None:
        config["server"] |= {"port": 0}
        config["admin"] = {"port": 0}
        self.app = App(loads(to_toml(config), environment={}).config, wall_ns=wall)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self.app.start())

    def _run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    @property
    def port(self) -> int:
        return int(self.app.url.rsplit(":", 1)[1])

    def ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        connection.request("GET", "/readyz")
        status = connection.getresponse().status
        connection.close()
        return status == 200

    def stop(self) -> None:
        self._run(self.app.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Timed(World):
    """A world of gateways in this process, whose wall clock can be set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, f"sqlite:///{folder / 'store.db'}")
        self.wall = Wall()
        self.running: list[Running] = []

    def run(self, **ledger: Any) -> Running:
        config = config_for(
            self.backend, slots=32, ledger={"journal": str(self.folder / f"journal-{len(self.running)}"), **ledger}
        )
        config["keys"] = {"anonymous": False, "store": self.url}
        self.running.append(Running(config, self.wall))
        eventually(self.running[-1].ready, LATE_S)
        return self.running[-1]

    def call(self, gateway: Running, key: str) -> Answer:
        return ask(gateway.port, SMALL, key=self.secrets[key], within=15)

    def end(self) -> None:
        for each in self.running:
            each.stop()
        super().end()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Timed]:
    made = Timed(tmp_path)
    yield made
    made.end()


def _becomes(status: int, answer: Callable[[], Answer]) -> Answer:
    """The first answer of this status."""
    found: list[Answer] = []

    def comes() -> bool:
        found.append(answer())
        return found[-1].status == status

    eventually(comes, LATE_S, f"an answer {status}")
    return found[-1]


def test_a_day_begins_with_its_date_and_a_clock_that_is_set_back_reopens_none(world: Timed) -> None:
    world.key("k", limits=Limits(tokens_per_day=3 * USED + 25))  # three requests, and not a fourth
    gateway = world.run()
    assert [world.call(gateway, "k").status for _ in range(4)] == [200, 200, 200, 429]
    refused = world.call(gateway, "k")
    assert 11 * HOUR < int(refused.header("retry-after") or 0) <= 12 * HOUR + 1, "midnight in UTC, or just after"
    world.wall.move(-DAY)
    served = _spend_for(world, gateway, 2.5)
    assert served == 0, "the day before is over"
    world.wall.move(DAY + 13 * HOUR)
    _becomes(200, lambda: world.call(gateway, "k"))
    assert [world.call(gateway, "k").status for _ in range(3)] == [200, 200, 429]
    world.wall.move(-5 * HOUR)  # and the evening of the day that was used up comes again
    assert _spend_for(world, gateway, 2.5) == 0


def _spend_for(world: Timed, gateway: Running, seconds: float) -> int:
    """Ask for as long as the gateway needs to see the clock, twice over; how many requests were served?"""
    ends, served = time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        served += world.call(gateway, "k").status == 200
        time.sleep(0.1)
    return served


def test_a_key_expires_by_the_wall_clock_and_stays_expired(world: Timed) -> None:
    expires = datetime.fromtimestamp(NOON + DAY, UTC)
    made = KeyStore(world.store).create(NewKey(name="k", expires_at=expires), By("test"))
    assert made.secret is not None
    world.secrets["k"] = made.secret
    gateway = world.run()
    assert world.call(gateway, "k").status == 200
    world.wall.move(DAY)
    assert b"expired" in _becomes(401, lambda: world.call(gateway, "k")).body
    world.wall.move(-2 * DAY)
    time.sleep(1.0)  # several looks at the clock
    assert world.call(gateway, "k").status == 401


def test_nobodys_lease_ends_because_a_clock_was_set(world: Timed) -> None:
    """Every lease is over by the store's clock then, and the other gateway could take it for a dead one's."""
    world.key("k", 1_000)
    one, other = (world.run(lease_tokens=400, lease_ttl_s=1) for _ in range(2))
    assert world.call(one, "k").status == 200
    eventually(lambda: world.has("k").spent == USED, LATE_S)
    held = world.has("k").held
    assert held == 400 - USED
    world.wall.move(DAY)
    looks = _count_looks(other)
    eventually(lambda: len(looks) >= 6, LATE_S)
    assert world.has("k").held == held
    assert world.call(one, "k").status == 200
    assert world.call(other, "k").status == 200
    eventually(lambda: world.has("k").spent == 3 * USED, LATE_S)
    assert world.has("k").debt == 0


def _count_looks(gateway: Running) -> list[float]:
    """One entry for each time that it looks for leases of the dead, from now on."""
    assert gateway.app.desk is not None
    clerk, looks = gateway.app.desk._clerk, []
    expire = clerk._expire

    def counted(now: float) -> None:
        expire(now)
        looks.append(now)

    clerk._expire = counted
    return looks
