"""Fair turns between flows by start-time fair queueing, weighted by tokens.

A request's start tag is max(virtual time, its flow's last finish tag); its finish tag adds its cost in tokens.
Serving the smallest start tag shares the engine between backlogged flows by tokens, not by requests, whatever the
arrival order. Virtual time is the start tag of the request served last. Source: Goyal, Vin, Cheng, SIGCOMM 1996.
"""

from __future__ import annotations

from typing import TypeAlias

Flow: TypeAlias = tuple[str, int]
"""A flow within a priority: what it queues below must not put it last above, where turns are another matter."""

FLOWS_MAX = 10_000


class VirtualClock:
    """Tags requests of flows; forgets flows that have caught up."""

    __slots__ = ("_finish", "now")

    def __init__(self) -> None:
        self.now = 0.0  # virtual, in tokens
        self._finish: dict[Flow, float] = {}

    def start_tag(self, flow: Flow, cost: int) -> float:
        """The tag by which a new request of this flow is ordered."""
        finish = self._finish.get(flow)
        if finish is None and len(self._finish) >= FLOWS_MAX:
            self._forget()
        start = self.now if finish is None or finish < self.now else finish
        self._finish[flow] = start + (cost or 1)  # requests priced at nothing take turns like others
        return start

    def tag_now(self, flow: Flow) -> float:
        """The tag that a request of this flow would get."""
        finish = self._finish.get(flow)
        return self.now if finish is None or finish < self.now else finish

    def _forget(self) -> None:
        """Keep those that are ahead, and of these at most half the table: the ones furthest ahead."""
        ahead = sorted(((tag, flow) for flow, tag in self._finish.items() if tag > self.now), reverse=True)
        self._finish = {flow: tag for tag, flow in ahead[: FLOWS_MAX // 2]}

    def served(self, start_tag: float) -> None:
        """The request with this tag was dispatched."""
        self.now = max(self.now, start_tag)

    def withdrawn(self, flow: Flow, cost: int) -> None:
        """A request left the queue unserved: its flow is not to pay for it."""
        finish = self._finish.get(flow)
        if finish is not None:
            self._finish[flow] = max(self.now, finish - (cost or 1))

    def idle(self) -> None:
        """Nobody waits: history ends."""
        self._finish.clear()
        self.now = 0.0
