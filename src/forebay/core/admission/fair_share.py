"""Fair admission: each flow's share of what the pool completes, kept at the door because a short queue cannot keep it.

With a wait budget of a few slots there is next to nothing in the queue for a fair order to choose from, and whoever
arrives most gets most. So every flow has a finish tag, moved by the work it was admitted with, and the pool has a
virtual clock, moved by the work that it completes, shared among the flows that were admitted in the last seconds. A
flow is *within its share* while its tag is no more than `burst_s` of fair service ahead of the clock. One that is
beyond it may still have what nobody else wants: a free place, as long as nobody waits and a reserve stays free, in
which the others, who cannot wait, find their bursts served.

The clock needs no idea of the capacity, forgets flows that are gone, and costs O(1) amortised per request. What changes
slowly (the rate, who is here) is looked at a few times a second only, since all this is asked at every request.
Work is prompt tokens plus twice the output tokens, as in VTC (Sheng et al., OSDI 2024).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import ceil, exp

from forebay.core.instant import MILLISECOND, SECOND, Instant

OUTPUT_WEIGHT = 2
FLOWS_MAX = 50_000
WAIT_MOST_NS = 3600 * SECOND
FIRST_ADMITTED = 64  # requests
LOOK_NS = 50 * MILLISECOND
LET_GO_MOST = 4  # flows at a time: more than come at a time, so that none stay


@dataclass(frozen=True, slots=True)
class FairShareConfig:
    """How much a flow may run ahead, and what is kept free for those that do not."""

    burst_s: float = 4.0  # of fair service
    run_ahead_s: float = 10.0  # of fair service is the most that is held against a flow
    reserve: float = 0.045  # of the pool's places: a burst of those within their share finds it free
    reserve_from: int = 16  # places; in a smaller pool one place is too much to keep free
    rate_window_s: float = 5.0  # over which the completed work per second is averaged
    present_s: float = 5.0  # after its last admitted request a flow still counts among those that share


class _Flow:
    __slots__ = ("finish", "seen", "weight")

    def __init__(self, weight: float, finish: float, seen: Instant) -> None:
        self.weight = weight
        self.finish = finish
        self.seen = seen  # about when it was last admitted


class FairShare:
    """The clock and the tags of one pool. Work is in weighted tokens, tags in weighted tokens per unit of weight."""

    def __init__(self, config: FairShareConfig) -> None:
        self.config = config
        self.clock = 0.0
        # Those that share, the one that was seen the longest ago first. Not a dict, whose first entry is the harder to
        # find the more were taken away before it.
        self._flows: OrderedDict[str, _Flow] = OrderedDict()
        self._weights = 0.0  # of these
        self._all_here_until: Instant = -1  # before then none of them has been away for long
        self._first = 0  # requests admitted, as far as they are counted
        self._rate = 0.0  # completed work per second, when it was last looked at
        self._done = 0.0  # work completed since
        self._rate_at: Instant = 0
        self._rate_since: Instant = 0  # when the first work was completed
        self._present_ns = int(config.present_s * SECOND)

    def __len__(self) -> int:
        """Flows that share."""
        return len(self._flows)

    def excess_ns(self, name: str, weight: float, now: Instant) -> int:
        """How long until the flow is within its share again; 0 when it is. Alone it always is."""
        flow = self._flows.get(name)
        if flow is None or flow.finish <= self.clock or len(self._flows) == 1:
            return 0
        rate = self._fair_rate(now)
        if rate <= 0.0:
            # Nothing was completed yet, so no share is known: the first places are anybody's, and after that whoever
            # has had some waits until there is one.
            return 0 if self._first < FIRST_ADMITTED else SECOND
        total = max(self._weights, weight)
        excess = flow.finish - self.clock - self.config.burst_s * rate / total
        return min(WAIT_MOST_NS, ceil(excess * total / rate * SECOND)) if excess > 0.0 else 0

    def ahead_ns(self, name: str, weight: float, now: Instant) -> int:
        """What `excess_ns` has just said of it, for those who only want to know: this changes nothing."""
        return self.excess_ns(name, weight, now) if now - self._rate_at < LOOK_NS else 0

    def tag(self, name: str) -> float:
        """By which the next request of this flow takes its turn: smaller is sooner."""
        flow = self._flows.get(name)
        return self.clock if flow is None else max(self.clock, flow.finish)

    def part(self, weight: float) -> float:
        """The part of the pool that is due to a flow of this weight, beside those that share it."""
        return weight / max(self._weights, weight)

    def reserve(self, places: int) -> int:
        """Places of so many that stay free for flows within their share."""
        return ceil(self.reserve_share(places) * places)

    def reserve_share(self, places: int) -> float:
        """The same, of 1: a reserve of anything else that the pool has."""
        return self.config.reserve if places >= self.config.reserve_from else 0.0

    def admitted(self, name: str, weight: float, work: float, now: Instant) -> float:
        """A request of this flow was admitted, with this much expected work. Returns the tag of its turn."""
        flow, clock = self._flows.get(name), self.clock
        if flow is None:
            if len(self._flows) >= FLOWS_MAX:
                return clock  # what cannot be kept is not held against anybody
            flow = self._flows[name] = _Flow(weight, clock, now)
            self._weights += weight
            if now > self._all_here_until:
                self._let_go(now)
        elif now - flow.seen > LOOK_NS:
            self._see(name, flow, now)
        tag = flow.finish
        if tag < clock:
            tag = clock
        flow.finish = tag + work / flow.weight
        if self._first < FIRST_ADMITTED:
            self._first += 1
        if flow.finish > clock + self._run_ahead() and (rate := self._rate_now(now)) > 0.0:
            # A burst into an idle pool is forgiven after a while.
            most = clock + max(self.config.run_ahead_s * rate / self._weights, work / flow.weight)
            flow.finish = min(flow.finish, most)
        return tag

    def ended(self, name: str, charged: float, done: float, now: Instant) -> None:
        """An admitted request ended: `done` is the work it really was, 0 for one that was never served."""
        if done > 0.0:
            self.clock += done / (self._weights or 1.0)
            if not self._rate and not self._done:
                self._rate_since = self._rate_at = now
            self._done += done
        flow = self._flows.get(name)
        if flow is not None:
            flow.finish += (done - charged) / flow.weight

    def _see(self, name: str, flow: _Flow, now: Instant) -> None:
        """It is here, and the last that was seen."""
        flow.seen = now
        self._flows.move_to_end(name)
        if now > self._all_here_until:
            self._let_go(now)

    def _let_go(self, now: Instant) -> None:
        """Let go of flows that have not been here for a while, and owe nothing: a few at a time, for there may be
        tens of thousands of them."""
        flows = self._flows
        for _ in range(LET_GO_MOST):
            first = next(iter(flows))
            other = flows[first]
            self._all_here_until = other.seen + self._present_ns
            if now <= self._all_here_until:
                return
            if other.finish > self.clock:
                other.seen = now  # it is kept out, not gone
                flows.move_to_end(first)
            else:
                del flows[first]
                self._weights -= other.weight

    def _run_ahead(self) -> float:
        """About what a flow may be ahead by; the rate is looked at anew only for one that is further."""
        return self.config.run_ahead_s * self._rate / (self._weights or 1.0)

    def _rate_now(self, now: Instant) -> float:
        passed = now - self._rate_at
        if passed >= LOOK_NS:
            window_s = self.config.rate_window_s
            self._rate = self._rate * exp(-passed / SECOND / window_s) + self._done / window_s
            self._rate_at, self._done = now, 0.0
            return self._rate
        return self._rate + self._done / self.config.rate_window_s

    def _fair_rate(self, now: Instant) -> float:
        """The rate, corrected for the time before the first completed work, which the average takes for idle."""
        window_s = self.config.rate_window_s
        rate, seen_s = self._rate_now(now), (now - self._rate_since) / SECOND
        if seen_s > 5 * window_s:
            return rate
        return rate / (1.0 - exp(-max(seen_s, 0.1 * window_s) / window_s))
