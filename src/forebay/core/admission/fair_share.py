"""Fair admission: each flow's share of what the pool completes, kept at the door because a short queue cannot keep it.

With a wait budget of a few slots there is next to nothing in the queue for a fair order to choose from, and whoever
arrives most gets most. So every flow has a finish tag, moved by the work it was admitted with, and the pool has a
virtual clock, moved by the work that it completes, shared among the flows that were admitted in the last seconds. A
flow is *within its share* while its tag is no more than `burst_s` of fair service ahead of the clock. One that is
beyond it may still have what nobody else wants: a free place, as long as nobody waits and a reserve stays free, in
which the others, who cannot wait, find their bursts served.

The clock needs no idea of the capacity, forgets flows that are gone, and costs O(1) amortised per request.
Work is prompt tokens plus twice the output tokens, as in VTC (Sheng et al., OSDI 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, exp

from forebay.core.instant import SECOND, Instant

OUTPUT_WEIGHT = 2
FLOWS_MAX = 50_000
WAIT_MOST_NS = 3600 * SECOND
FIRST_ADMITTED = 64  # requests


@dataclass(frozen=True, slots=True)
class FairShareConfig:
    """How much a flow may run ahead, and what is kept free for those that do not."""

    burst_s: float = 4.0  # of fair service
    run_ahead_s: float = 10.0  # of fair service is the most that is held against a flow
    reserve: float = 0.08  # of the pool's places: a burst of those within their share finds it free
    reserve_from: int = 16  # places; in a smaller pool one place is too much to keep free
    rate_window_s: float = 5.0  # over which the completed work per second is averaged
    present_s: float = 5.0  # after its last admitted request a flow still counts among those that share


class _Flow:
    __slots__ = ("active", "due", "finish", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.finish = 0.0
        self.active = False
        self.due = 0.0  # the tag under which it stands in the heap


class FairShare:
    """The clock and the tags of one pool. Work is in weighted tokens, tags in weighted tokens per unit of weight."""

    def __init__(self, config: FairShareConfig) -> None:
        self.config = config
        self.clock = 0.0
        self._flows: dict[str, _Flow] = {}  # only those that are ahead of the clock
        self._present: dict[str, tuple[Instant, float]] = {}  # last admitted at, weight; the longest ago first
        self._weights = 0.0  # of these
        self._first = 0  # requests admitted, as far as they are counted
        self._ahead: list[tuple[float, str]] = []
        self._rate = 0.0  # completed work per second
        self._rate_at: Instant = 0
        self._rate_since: Instant = 0  # when the first work was completed

    def __len__(self) -> int:
        """Flows that are ahead of the clock."""
        return len(self._flows)

    def excess_ns(self, name: str, weight: float, now: Instant) -> int:
        """How long until the flow is within its share again; 0 when it is. Alone it always is."""
        flow = self._flows.get(name)
        if flow is None or len(self._present) == 1:
            return 0
        ahead = flow.finish - self.clock
        rate = self._fair_rate(now)
        if rate <= 0.0:
            # Nothing was completed yet, so no share is known: the first places are anybody's, and after that whoever
            # has had some waits until there is one.
            return 0 if self._first < FIRST_ADMITTED else SECOND
        total = max(self._weights, weight)
        excess = ahead - self.config.burst_s * rate / total
        return min(WAIT_MOST_NS, ceil(excess * total / rate * SECOND)) if excess > 0.0 else 0

    def tag(self, name: str) -> float:
        """By which the next request of this flow takes its turn: smaller is sooner."""
        flow = self._flows.get(name)
        return self.clock if flow is None else max(self.clock, flow.finish)

    def part(self, weight: float) -> float:
        """The part of the pool that is due to a flow of this weight, beside those that are ahead of the clock."""
        return weight / max(self._weights, weight)

    def reserve(self, places: int) -> int:
        """Places of so many that stay free for flows within their share."""
        return ceil(self.config.reserve * places) if places >= self.config.reserve_from else 0

    def admitted(self, name: str, weight: float, work: float, now: Instant) -> None:
        """A request of this flow was admitted, with this much expected work."""
        flow = self._flows.get(name)
        if flow is None:
            if len(self._flows) >= FLOWS_MAX:
                return  # what cannot be kept is not held against anybody
            flow = self._flows[name] = _Flow(weight)
            flow.finish = self.clock
        self._first += self._first < FIRST_ADMITTED
        self._see(name, flow.weight, now)
        flow.finish += work / flow.weight
        rate = self._rate_now(now)
        if rate > 0.0:
            # A burst into an idle pool is forgiven after a while.
            most = self.clock + max(self.config.run_ahead_s * rate / self._weights, work / flow.weight)
            flow.finish = min(flow.finish, most)
        if not flow.active:
            flow.active = True
            flow.due = flow.finish
            heappush(self._ahead, (flow.due, name))

    def _see(self, name: str, weight: float, now: Instant) -> None:
        """It is among those that share."""
        present = self._present
        before = present.pop(name, None)
        self._weights += weight if before is None else weight - before[1]
        present[name] = (now, weight)
        gone_before = now - int(self.config.present_s * SECOND)
        while present[first := next(iter(present))][0] < gone_before:
            self._weights -= present.pop(first)[1]

    def ended(self, name: str, charged: float, done: float, now: Instant) -> None:
        """An admitted request ended: `done` is the work it really was, 0 for one that was never served."""
        flow = self._flows.get(name)
        if done > 0.0:
            total = self._weights or 1.0
            self.clock += done / total
            if self._rate_now(now) <= 0.0:
                self._rate_since = now
            self._rate = self._rate_now(now) + done / self.config.rate_window_s
        if flow is not None:
            flow.finish += (done - charged) / flow.weight
        self._catch_up()

    def _rate_now(self, now: Instant) -> float:
        if now > self._rate_at:
            self._rate *= exp(-(now - self._rate_at) / SECOND / self.config.rate_window_s)
            self._rate_at = now
        return self._rate

    def _fair_rate(self, now: Instant) -> float:
        """The rate, corrected for the time before the first completed work, which the average takes for idle."""
        window_s = self.config.rate_window_s
        seen_s = max((now - self._rate_since) / SECOND, 0.1 * window_s)
        return self._rate_now(now) / (1.0 - exp(-seen_s / window_s))

    def _catch_up(self) -> None:
        """Let go of flows that the clock has passed. A flow stands in the heap under a tag that may be outdated."""
        ahead, flows = self._ahead, self._flows
        while ahead and ahead[0][0] <= self.clock:
            _, name = heappop(ahead)
            flow = flows[name]
            if flow.finish > self.clock:
                flow.due = flow.finish
                heappush(ahead, (flow.due, name))
            else:
                del flows[name]
