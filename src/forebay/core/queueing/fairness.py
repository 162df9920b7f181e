"""Fair turns between flows by start-time fair queueing, weighted by tokens.

A request's start tag is max(virtual time, its flow's last finish tag); its finish tag adds its cost in tokens.
Serving the smallest start tag shares the engine between backlogged flows by tokens, not by requests, whatever the
arrival order. Virtual time is the start tag of the request served last. Source: Goyal, Vin, Cheng, SIGCOMM 1996.
"""

from __future__ import annotations

FLOWS_MAX = 10_000


class VirtualClock:
    """Tags requests of flows; forgets flows that have caught up."""

    __slots__ = ("_finish", "now")

    def __init__(self) -> None:
        self.now = 0.0  # virtual, in tokens
        self._finish: dict[str, float] = {}

    def start_tag(self, flow: str, cost: int) -> float:
        """The tag by which a new request of this flow is ordered."""
        start = max(self.now, self._finish.get(flow, 0.0))
        if len(self._finish) >= FLOWS_MAX and flow not in self._finish:
            self._finish = {f: tag for f, tag in self._finish.items() if tag > self.now}
        self._finish[flow] = start + cost
        return start

    def served(self, start_tag: float) -> None:
        """The request with this tag was dispatched."""
        self.now = max(self.now, start_tag)

    def withdrawn(self, flow: str, cost: int) -> None:
        """A request left the queue unserved: its flow is not to pay for it."""
        finish = self._finish.get(flow)
        if finish is not None:
            self._finish[flow] = max(self.now, finish - cost)

    def idle(self) -> None:
        """Nobody waits: history ends."""
        self._finish.clear()
        self.now = 0.0
