"""Metrics of the gateway, cheap to keep and bounded in number.

While requests run, only integers and lists of integers are touched; metric objects are made when Prometheus asks.
Labels come from closed enums and from names in the configuration; anything a client can choose folds to `other`, so
the number of series never grows with traffic. docs/metrics.md lists every metric, and a test holds it to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from forebay.core.dispatch.health import Readiness
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.model import Refusal, Request, Ticket
from forebay.core.outcome import Outcome, ShedReason
from forebay.core.snapshot import EngineSnapshot, PoolSnapshot, Snapshot
from forebay.telemetry.histogram import Histogram

OTHER = "other"

_WAIT_MS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000)
_TIME_MS = (5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 120_000, 300_000, 600_000)
WAIT_BOUNDS_NS = tuple(int(bound * MILLISECOND) for bound in _WAIT_MS)
TIME_BOUNDS_NS = tuple(int(bound * MILLISECOND) for bound in _TIME_MS)
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)

# Looking a member up on its enum class costs more than all else in a comparison.
_COMPLETED = Outcome.COMPLETED
_SHED = Outcome.SHED
_QUEUE_WAIT = ShedReason.QUEUE_WAIT

STATUSES = frozenset({400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 417, 429, 431, 500, 501, 502, 503, 505, 529})


class GpuShares(Protocol):
    """One GPU, as last read: shares from 0 to 1, None where it is not told."""

    @property
    def memory_share(self) -> float | None: ...
    @property
    def busy_share(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Sources:
    """Where figures that nobody reports are read from at scrape time."""

    snapshot: Callable[[], Snapshot]
    connections: Callable[[], int] = lambda: 0  # of clients, open now
    buffered_body_bytes: Callable[[], int] = lambda: 0
    retry_tickets: Callable[[], Mapping[str, int]] = dict  # what became of them -> how many; empty when there are none
    signal_ages_s: Callable[[], Mapping[str, float]] = dict  # name of a signal -> seconds since it was last heard
    gpus: Callable[[], Mapping[str, GpuShares]] = dict  # as the configuration names them


class Metrics(Collector):
    """Counts what the pipeline and the HTTP layer tell it, and is read by a Prometheus registry."""

    def __init__(
        self,
        sources: Sources,
        *,
        routes: Iterable[str],
        classes: Iterable[str],
        reasons: Iterable[str],
        version: str,
        models: Iterable[str] = (),
    ) -> None:
        """`routes`, `classes`, `models` and `reasons` (of the HTTP layer) are the closed sets of the labels."""
        self._sources = sources
        self._routes = frozenset(routes)
        self._classes = frozenset(classes) | {"default"}
        self._reasons = frozenset(reasons)
        self._version = version
        self._requests: dict[tuple[str, str, str, str | None], int] = {}
        self._rejected: dict[tuple[str, str], int] = {}
        self._passed: dict[str, int] = {}
        self._queue_wait = Histogram(WAIT_BOUNDS_NS, SECOND)
        self._predicted_wait = Histogram(WAIT_BOUNDS_NS, SECOND)
        self._ttft = Histogram(TIME_BOUNDS_NS, SECOND)
        self._duration: dict[str, Histogram] = {
            outcome: Histogram(TIME_BOUNDS_NS, SECOND) for outcome in Outcome if outcome is not Outcome.SHED
        }
        self._batch_size = Histogram(BATCH_BOUNDS)
        self._estimate_ratios = {model: Histogram(RATIO_BOUNDS) for model in (*models, OTHER)}
        self._estimated = 0
        self._reserved = 0
        self._used = 0
        self._refunded = 0
        self._wasted = 0

    def know_classes(self, classes: Iterable[str]) -> None:
        """Count these priority classes by their names from now on, beside those known before."""
        self._classes |= frozenset(classes)

    # ---- the hot path ----------------------------------------------------------------------------------------

    def closed(self, ticket: Ticket) -> None:
        """Count the end of an admitted request."""
        request, demand, outcome = ticket.request, ticket.demand, ticket.outcome
        assert outcome is not None
        key = (request.route, request.priority_class, outcome, ticket.reason)
        try:
            self._requests[key] += 1
        except KeyError:
            self._count_new(key)
        arrived, closed = ticket.arrived, ticket.closed
        self._queue_wait.observe((ticket.dispatched or closed) - arrived)
        self._duration[outcome].observe(closed - arrived)
        if ticket.met_queue:
            self._predicted_wait.observe(ticket.predicted_wait_ns)
        if ticket.first_token:
            self._ttft.observe(ticket.first_token - arrived)
        estimated = demand.input_tokens + demand.output_tokens
        reserved = demand.input_tokens + demand.output_reserved
        self._estimated += estimated
        self._reserved += reserved
        usage = ticket.usage
        if usage is None:
            self._refunded += reserved
        else:
            used = usage.input_tokens + usage.output_tokens
            self._used += used
            if used < reserved:
                self._refunded += reserved - used
            if outcome is not _COMPLETED:
                self._wasted += used
            elif usage.exact and estimated:
                ratios = self._estimate_ratios
                (ratios.get(request.model) or ratios[OTHER]).observe(used / estimated)
        lease = ticket.lease
        if lease is not None and (batch := lease.batch) is not None and not batch.open:
            self._batch_size.observe(batch.size)  # told once, by the last of the batch

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        """Count a refusal by the pipeline."""
        key = (request.route, request.priority_class, _SHED, refusal.reason)
        try:
            self._requests[key] += 1
        except KeyError:
            self._count_new(key)
        if refusal.reason is _QUEUE_WAIT:
            self._predicted_wait.observe(predicted_wait_ns)

    def rejected(self, status: int, reason: str) -> None:
        """Count a request that the HTTP layer refused before it was offered."""
        key = (str(status) if status in STATUSES else OTHER, reason if reason in self._reasons else OTHER)
        self._rejected[key] = self._rejected.get(key, 0) + 1

    def passed(self, route: str) -> None:
        """Count a control request, which no room decides about."""
        route = route if route in self._routes else OTHER
        self._passed[route] = self._passed.get(route, 0) + 1

    def _count_new(self, key: tuple[str, str, str, str | None]) -> None:
        """Count under names that are known to be few."""
        route, priority_class, outcome, reason = key
        folded = (
            route if route in self._routes else OTHER,
            priority_class if priority_class in self._classes else OTHER,
            outcome,
            reason,
        )
        self._requests[folded] = self._requests.get(folded, 0) + 1

    # ---- the scrape ------------------------------------------------------------------------------------------

    def describe(self) -> Iterator[Metric]:
        """Nothing: a registry that checks names must not take a snapshot for it."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Everything, as metric families."""
        yield self._build_info()
        yield from self._request_families()
        yield from self._time_families()
        yield from self._token_families()
        yield from self._gauges()

    def _build_info(self) -> Metric:
        info = InfoMetricFamily("forebay_build", "Version of the running gateway.")
        info.add_metric([], {"version": self._version})
        return info

    def _request_families(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "forebay_requests",
            "Requests that the pipeline decided, by outcome and reason.",
            labels=["route", "class", "outcome", "reason"],
        )
        for (route, priority_class, outcome, reason), count in list(self._requests.items()):
            requests.add_metric([route, priority_class, str(outcome), str(reason or "")], count)
        yield requests
        rejected = CounterMetricFamily(
            "forebay_rejected",
            "Requests that the HTTP layer refused before they reached the pipeline.",
            labels=["status", "reason"],
        )
        for (status, why), count in list(self._rejected.items()):
            rejected.add_metric([status, why], count)
        yield rejected
        passed = CounterMetricFamily(
            "forebay_control_requests", "Control requests passed on without a decision.", labels=["route"]
        )
        for route, count in list(self._passed.items()):
            passed.add_metric([route], count)
        yield passed
        tickets = CounterMetricFamily(
            "forebay_retry_tickets", "Retry tickets issued, and shown, by what became of them.", labels=["result"]
        )
        for result, count in self._sources.retry_tickets().items():
            tickets.add_metric([result], count)
        yield tickets

    def _time_families(self) -> Iterator[Metric]:
        yield _histogram(
            "forebay_queue_wait_seconds",
            "Arrival to dispatch of admitted requests, or to their end when they were never dispatched.",
            self._queue_wait,
        )
        yield _histogram(
            "forebay_predicted_wait_seconds",
            "Queue wait forecast for requests that met a queue or were refused for it.",
            self._predicted_wait,
        )
        yield _histogram("forebay_ttft_seconds", "Arrival to the first byte of the answer.", self._ttft)
        durations = HistogramMetricFamily(
            "forebay_request_seconds", "Arrival to the end of admitted requests.", labels=["outcome"]
        )
        for outcome, histogram in self._duration.items():
            histogram.add_to(durations, [str(outcome)])
        yield durations
        yield _histogram("forebay_batch_size", "Requests per batch that dynamic batching formed.", self._batch_size)

    def _token_families(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            "forebay_tokens", "Tokens of ended requests, in and out, by how they are counted.", labels=["kind"]
        )
        kinds: tuple[tuple[Literal["estimated", "reserved", "used", "refunded"], int], ...] = (
            ("estimated", self._estimated),
            ("reserved", self._reserved),
            ("used", self._used),
            ("refunded", self._refunded),
        )
        for kind, count in kinds:
            tokens.add_metric([kind], count)
        yield tokens
        yield _counter("forebay_wasted_tokens", "Tokens spent on requests that did not complete.", self._wasted)
        ratios = HistogramMetricFamily(
            "forebay_estimate_error_ratio",
            "Tokens used ÷ tokens estimated, of completed requests whose engine told its usage.",
            labels=["model"],
        )
        for model, histogram in self._estimate_ratios.items():
            histogram.add_to(ratios, [model])
        yield ratios

    def _gauges(self) -> Iterator[Metric]:
        snapshot = self._sources.snapshot()
        yield _counter("forebay_offered", "Requests offered to the pipeline.", snapshot.offered)
        yield _gauge("forebay_queued", "Requests that wait now.", snapshot.queued)
        yield _gauge("forebay_draining", "1 while the gateway ends without admitting.", snapshot.draining)
        yield _gauge("forebay_known_keys", "Keys whose limits are held in memory.", snapshot.keys)
        yield _gauge("forebay_client_connections", "Client connections open now.", self._sources.connections())
        yield _gauge(
            "forebay_buffered_body_bytes", "Request bodies held in memory.", self._sources.buffered_body_bytes()
        )
        yield from _pool_gauges(snapshot)
        yield from _tuner_families(snapshot)
        yield _shadow_decisions(snapshot)
        yield from _engine_gauges(snapshot)
        ages = GaugeMetricFamily("forebay_signal_age_seconds", "Time since a signal was last heard.", labels=["signal"])
        for signal, age in self._sources.signal_ages_s().items():
            ages.add_metric([signal], age)
        yield ages
        yield from _gpu_gauges(self._sources.gpus())


_POOL_GAUGES: tuple[tuple[str, str, Callable[[PoolSnapshot], float]], ...] = (
    ("forebay_queue_depth", "Requests that wait.", lambda p: p.queue_depth),
    ("forebay_queue_depth_limit", "Most requests that may wait.", lambda p: p.queue_depth_limit),
    ("forebay_queue_tokens", "Expected tokens that wait.", lambda p: p.queue_tokens),
    ("forebay_queue_bytes", "Bytes of request bodies that wait.", lambda p: p.queue_bytes),
    ("forebay_drain_rate", "Releases per second that the forecast reckons with.", lambda p: p.drain_rate_per_s),
    (
        "forebay_wait_budget_seconds",
        "Largest predicted wait at which a request is still admitted.",
        lambda p: p.wait_budget_ns / SECOND,
    ),
    (
        "forebay_wait_correction_ratio",
        "Factor by which measured lateness corrects the forecast.",
        lambda p: p.wait_correction,
    ),
)

_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineSnapshot], float]], ...] = (
    ("forebay_in_flight", "Leases open now.", lambda e: e.in_flight),
    ("forebay_tokens_in_flight", "Expected tokens of the open leases.", lambda e: e.tokens_in_flight),
    ("forebay_concurrency_limit", "Most that may be in flight.", lambda e: e.concurrency_limit),
    ("forebay_concurrency_window", "Of that, as much as may be used now.", lambda e: e.window),
    ("forebay_others_in_flight", "Requests that reached it past this gateway, as it says.", lambda e: e.others),
    (
        "forebay_saturation",
        "Used share of the concurrency limit; may exceed 1.",
        lambda e: e.places / e.concurrency_limit if e.concurrency_limit else 0.0,
    ),
    ("forebay_engine_up", "1 when the engine is ready.", lambda e: e.readiness == Readiness.UP),
    ("forebay_engine_ejected", "1 while the engine is kept from work for failing.", lambda e: e.ejected),
)


def _pool_gauges(snapshot: Snapshot) -> Iterator[Metric]:
    for name, help_text, read in _POOL_GAUGES:
        family = GaugeMetricFamily(name, help_text, labels=["pool"])
        for pool in snapshot.pools:
            family.add_metric([pool.name], read(pool))
        yield family


def _tuner_families(snapshot: Snapshot) -> Iterator[Metric]:
    changes = CounterMetricFamily("forebay_tuner_changes", "Changes of the queue depth.", labels=["pool"])
    frozen = GaugeMetricFamily("forebay_tuner_frozen", "1 while the tuner may not move the depth.", labels=["pool"])
    looked = GaugeMetricFamily("forebay_tuner_look_age_seconds", "Time since the tuner looked last.", labels=["pool"])
    changed = GaugeMetricFamily("forebay_tuner_change_age_seconds", "Time since the depth changed.", labels=["pool"])
    shadow = GaugeMetricFamily(
        "forebay_shadow_queue_depth_limit", "Queue depth that the tuner in shadow would have set.", labels=["pool"]
    )
    for pool in snapshot.pools:
        tuner, labels = pool.tuner, [pool.name]
        changes.add_metric(labels, tuner.changes)
        frozen.add_metric(labels, tuner.frozen)
        if tuner.looked_ns is not None:
            looked.add_metric(labels, tuner.looked_ns / SECOND)
        if tuner.changed_ns is not None:
            changed.add_metric(labels, tuner.changed_ns / SECOND)
        if tuner.shadow_depth is not None:
            shadow.add_metric(labels, tuner.shadow_depth)
    yield from (changes, frozen, looked, changed, shadow)


def _shadow_decisions(snapshot: Snapshot) -> Metric:
    family = CounterMetricFamily(
        "forebay_shadow_decisions",
        "Requests by what a setting in shadow would have said of them, beside the acting one.",
        labels=["pool", "policy", "verdict"],
    )
    for pool in snapshot.pools:
        for policy, verdicts in pool.shadow_decisions.items():
            for verdict, count in verdicts.items():
                family.add_metric([pool.name, policy, verdict], count)
    return family


def _engine_gauges(snapshot: Snapshot) -> Iterator[Metric]:
    for name, help_text, read in _ENGINE_GAUGES:
        family = GaugeMetricFamily(name, help_text, labels=["engine"])
        for pool in snapshot.pools:
            for engine in pool.engines:
                family.add_metric([engine.name], read(engine))
        yield family
    # A metric of its own: sums over the acting limits stay what they are.
    shadow = GaugeMetricFamily(
        "forebay_shadow_concurrency_limit", "Most that a limit in shadow would let in flight.", labels=["engine"]
    )
    for pool in snapshot.pools:
        for engine in pool.engines:
            if engine.shadow_limit is not None:
                shadow.add_metric([engine.name], engine.shadow_limit)
    yield shadow


def _gpu_gauges(gpus: Mapping[str, GpuShares]) -> Iterator[Metric]:
    memory = GaugeMetricFamily("forebay_gpu_memory_used_ratio", "Used share of its memory.", labels=["gpu"])
    busy = GaugeMetricFamily("forebay_gpu_busy_ratio", "Share of time in which any kernel ran.", labels=["gpu"])
    for name, gpu in gpus.items():
        if gpu.memory_share is not None:
            memory.add_metric([name], gpu.memory_share)
        if gpu.busy_share is not None:
            busy.add_metric([name], gpu.busy_share)
    yield memory
    yield busy


def _histogram(name: str, help_text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, help_text, labels=[])
    histogram.add_to(family)
    return family


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value=value)


def registry(metrics: Metrics, *more: Collector) -> CollectorRegistry:
    """A registry of the gateway's metrics, of `more` of its parts, and those of its process."""
    made = CollectorRegistry(auto_describe=False)
    for collector in (metrics, *more):
        made.register(collector)
    ProcessCollector(registry=made)
    made.register(PLATFORM_COLLECTOR)
    made.register(GC_COLLECTOR)
    return made
