"""Metrics of the ledger, read when Prometheus asks; only a gateway with a store has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class LedgerFigures(Protocol):
    """What the ledger's desk says of itself."""

    waiting: int  # requests that wait for their keys' credit
    refused: int  # requests of prepaid keys that got no credit in time, or could not

    @property
    def journal_bytes(self) -> int:
        """Size of the journal."""
        ...

    @property
    def lost(self) -> int:
        """Settlements that could be kept nowhere."""
        ...

    @property
    def posted(self) -> int:
        """Settlements that the store has taken since the start."""
        ...

    @property
    def writable(self) -> bool:
        """Can the journal be written?"""
        ...

    @property
    def store_up(self) -> bool:
        """Does the store answer?"""
        ...

    def lag_s(self) -> float:
        """Age of the oldest settlement that the store does not have."""
        ...


class LedgerMetrics(Collector):
    """The ledger's figures as metrics."""

    def __init__(self, desk: LedgerFigures) -> None:
        self._desk = desk

    def describe(self) -> Iterable[Metric]:
        """Names are not asked for before there are figures."""
        return ()

    def collect(self) -> Iterable[Metric]:
        desk = self._desk
        for name, text, value in (
            ("ledger_lag_seconds", "Age of the oldest settlement that the store does not have.", desk.lag_s()),
            ("ledger_journal_bytes", "Size of the journal.", desk.journal_bytes),
            ("ledger_journal_writable", "1 while the journal can be written.", desk.writable),
            ("ledger_store_up", "1 while the store answers.", desk.store_up),
            ("ledger_waiting", "Requests that wait for their keys' credit.", desk.waiting),
        ):
            yield GaugeMetricFamily(f"forebay_{name}", text, value=float(value))
        for name, text, value in (
            ("ledger_posted", "Settlements that the store has taken.", desk.posted),
            ("ledger_refused", "Requests of prepaid keys that got no credit in time.", desk.refused),
            ("ledger_lost", "Settlements that neither journal nor memory could hold.", desk.lost),
        ):
            yield CounterMetricFamily(f"forebay_{name}", text, value=float(value))
