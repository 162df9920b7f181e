"""A prepaid key's request on its way to the pipeline: where its credit has to be leased first, it waits for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.core.model import Lease, Request
from forebay.ingress.status import TABLE, Rejection, retry_headers

if TYPE_CHECKING:
    from forebay.ingress.http.inbound import Inbound
    from forebay.ledger.desk import Desk

NOT_IN_TIME = "this key's credit was not leased in time"


class Prepaid:
    """One request, as the desk's waiter."""

    __slots__ = ("_desk", "_inbound", "_request", "waits_for_credit")

    def __init__(self, inbound: Inbound, request: Request, desk: Desk) -> None:
        self.waits_for_credit = False
        self._inbound, self._request, self._desk = inbound, request, desk

    def offer(self) -> None:
        """Go on, wait, or be refused, as the desk says."""
        if self._desk.arrive(self._request, self):
            self._inbound.site.gateway.offer(self._request)
        elif not self.waits_for_credit:
            self._refuse(self._desk.why_closed())

    def credit_came(self) -> None:
        """The key's credit has changed: ask again."""
        self.offer()

    def no_credit_came(self) -> None:
        """It did not come in time."""
        self._refuse(NOT_IN_TIME)

    def dispatched(self, lease: Lease) -> None:
        """What a stream generates is written down while it runs."""
        if self._request.stream:
            self._desk.streams(lease)

    def leave(self) -> None:
        """The client has gone."""
        self._desk.leave(self)

    def _refuse(self, text: str) -> None:
        inbound, reason = self._inbound, Rejection.LEDGER_AWAY.value
        extra = retry_headers(self._desk.come_back_ns())
        inbound.reject(inbound.site.overload_status, reason, f"{text}; {TABLE[reason].advice}.", extra=extra)
        inbound.answer()
