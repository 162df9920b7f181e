"""What a limit that learns is shown of its engine, summed from one view to the next."""

from __future__ import annotations

from collections.abc import Collection

from forebay.core.dispatch.peak import peak_tokens
from forebay.core.instant import Instant
from forebay.core.limits.limit import View
from forebay.core.model import Lease


class Watch:
    """The sums of one engine."""

    __slots__ = (
        "decoding_ns", "generated", "in_flight_most", "prefill_since", "prefilled", "prefilling_ns", "seen_at"
    )  # fmt: skip

    def __init__(self) -> None:
        self.prefill_since: Instant = 0  # when the first of the prompts that are being prefilled came
        self.begin(0, 0)

    def begin(self, in_flight: int, now: Instant) -> None:
        """Sum anew from here."""
        self.seen_at, self.in_flight_most = now, in_flight
        self.decoding_ns = self.generated = self.prefilled = self.prefilling_ns = 0

    def count(self, lease: Lease, now: Instant) -> None:
        """Take in what a lease streamed since it was last counted, and the time that it streamed."""
        first = lease.ticket.first_token
        if first and lease.generated:
            self.decoding_ns += now - (first if first > self.seen_at else self.seen_at)
            self.generated += lease.generated - lease.counted
            lease.counted = lease.generated

    def view(self, leases: Collection[Lease], prefilling: int, tokens: int, now: Instant) -> View:
        """What was seen since the last view, which ends here; `prefilling` and `tokens` are sums over open leases."""
        for lease in leases:
            self.count(lease, now)
        prefilling_ns = self.prefilling_ns + (now - self.prefill_since if prefilling else 0)
        view = View(
            now - self.seen_at,
            len(leases),
            self.in_flight_most,
            False,
            self.decoding_ns,
            self.generated,
            self.prefilled,
            prefilling_ns,
            prefilling,
            tokens,
            peak_tokens(leases),
        )
        self.begin(len(leases), now)
        self.prefill_since = now
        return view
