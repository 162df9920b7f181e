"""What the engines of one pool hold and may hold together, kept as it changes: decisions ask for it all the time."""

from __future__ import annotations


class Totals:
    """The engines move them; the invariants compare them with the engines."""

    __slots__ = ("below_limit", "in_flight", "places")

    def __init__(self) -> None:
        self.in_flight = 0  # leases open
        self.places = 0  # most leases, or batches, that the limits allow
        self.below_limit = 0  # engines that hold fewer than their limit allows
