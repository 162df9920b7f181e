"""Metrics count what happened, under a bounded number of labels."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from forebay.core.batching.dynamic import DynamicConfig
from forebay.core.effects import Dispatch, Refuse
from forebay.core.events import EngineUp, Failed, Finished, FirstToken
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode, Refusal, Request, Ticket, Usage
from forebay.core.outcome import FailReason
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.telemetry import Observers
from forebay.telemetry.histogram import Histogram
from forebay.telemetry.ledger import LedgerMetrics
from forebay.telemetry.metrics import Metrics, Sources, registry

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


class Quiet:
    """A ledger in which nothing has happened but the last second."""

    waiting = refused = journal_bytes = lost = posted = 0
    writable = store_up = True

    def lag_s(self) -> float:
        return 0.25


class World:
    """A pipeline with metrics as its observer, on a clock that the test moves."""

    def __init__(self, limit: int = 1, mode: Mode = Mode.HYBRID, batching: DynamicConfig | None = None) -> None:
        self.now = SECOND
        self.metrics = Metrics(
            Sources(
                lambda: self.pipeline.snapshot(self.now),
                signal_ages_s=lambda: {"probe a/0": 0.5},
                retry_tickets=lambda: {"held": 3},
            ),
            routes=["chat"],
            classes=["gold"],
            reasons=["invalid_key", "malformed"],
            version="1.2.3",
            models=["m"],
        )
        pool = PoolConfig("a", ("a/0",), mode=mode, limit=FixedConfig(limit=limit))
        if batching is not None:
            pool = PoolConfig("a", ("a/0",), mode=mode, limit=FixedConfig(limit=limit), batching=batching)
        self.pipeline = Pipeline(PipelineConfig((pool,)), Random(1), Observers([self.metrics]))
        self.pipeline.report(EngineUp("a/0"), self.now)
        self.registry = registry(self.metrics, LedgerMetrics(Quiet()))

    def start(self, request: Request) -> Dispatch:
        (effect,) = self.pipeline.offer(request, self.now)
        assert isinstance(effect, Dispatch)
        return effect

    def read(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"forebay_{name}", {k.rstrip("_"): v for k, v in labels.items()})

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def chat(**fields: object) -> Request:
    return Request(key="k", route="chat", **fields)  # type: ignore[arg-type]


def test_a_completed_request_is_counted_once_in_every_figure() -> None:
    world = World()
    (lease,) = world.start(chat(max_output_tokens=100, counted_tokens=50, priority_class="gold")).leases
    assert world.read("in_flight", engine="a/0") == 1
    assert world.read("saturation", engine="a/0") == 1
    world.now += 100 * MILLISECOND
    world.pipeline.report(FirstToken(lease), world.now)
    world.now += SECOND
    world.pipeline.report(Finished(lease, Usage(50, 25)), world.now)
    assert world.read("requests_total", route="chat", class_="gold", outcome="completed", reason="") == 1
    assert world.read("request_seconds_sum", outcome="completed") == 1.1
    assert world.read("ttft_seconds_sum") == 0.1
    assert world.read("ttft_seconds_bucket", le="0.1") == 1
    assert world.read("ttft_seconds_bucket", le="0.05") == 0
    assert world.read("queue_wait_seconds_bucket", le="0.001") == 1
    assert world.read("predicted_wait_seconds_count") == 0
    assert world.read("tokens_total", kind="estimated") == 150
    assert world.read("tokens_total", kind="reserved") == 150
    assert world.read("tokens_total", kind="used") == 75
    assert world.read("tokens_total", kind="refunded") == 75
    assert world.read("estimate_error_ratio_bucket", model="other", le="0.5") == 1
    assert world.read("wasted_tokens_total") == 0
    assert world.read("offered_total") == 1
    assert world.read("in_flight", engine="a/0") == 0


def test_the_error_of_estimates_is_told_by_model_and_names_no_model_that_is_not_configured() -> None:
    world = World(limit=2)
    for model in ("m", "invented by a client"):
        (lease,) = world.start(chat(model=model, counted_tokens=100, max_output_tokens=10)).leases
        world.pipeline.report(Finished(lease, Usage(100, 10)), world.now)
    for label in ("m", "other"):
        assert world.read("estimate_error_ratio_count", model=label) == 1
    assert "invented" not in world.text()


def test_work_for_nobody_is_wasted_tokens() -> None:
    world = World(limit=2)
    (one,) = world.start(chat()).leases
    (two,) = world.start(chat()).leases
    world.pipeline.cancel(one.ticket, world.now, Usage(10, 3, exact=False))
    world.pipeline.report(Failed(two, FailReason.ENGINE_TIMEOUT, Usage(20, 4)), world.now)
    assert world.read("wasted_tokens_total") == 37
    assert world.read("estimate_error_ratio_count", model="other") == 0
    labels = {"route": "chat", "class_": "default"}
    assert world.read("requests_total", **labels, outcome="cancelled", reason="") == 1
    assert world.read("requests_total", **labels, outcome="failed", reason="engine_timeout") == 1


def test_refusals_and_waits() -> None:
    world = World(mode=Mode.ADMISSION)
    world.start(chat())
    (refused,) = world.pipeline.offer(chat(), world.now)
    assert isinstance(refused, Refuse)
    assert world.read("requests_total", route="chat", class_="default", outcome="shed", reason="queue_full") == 1
    held = World(mode=Mode.BACKPRESSURE)
    (lease,) = held.start(chat()).leases
    held.pipeline.offer(chat(), held.now)
    assert held.read("queue_depth", pool="a") == held.read("queued") == 1
    held.now += 40 * MILLISECOND
    held.pipeline.report(Finished(lease, None), held.now)
    held.now += 30 * SECOND
    held.pipeline.offer(chat(), held.now)
    held.now += 30 * SECOND
    held.pipeline.poll(held.now)
    assert held.read("requests_total", route="chat", class_="default", outcome="evicted", reason="expired") == 1
    assert held.read("queue_wait_seconds_bucket", le="30") == 2
    assert held.read("queue_wait_seconds_sum") == 30


def test_a_predicted_wait_that_refuses_is_in_the_histogram() -> None:
    world = World()
    world.metrics.shed(chat(), _refusal("queue_wait"), 80 * MILLISECOND)
    world.metrics.shed(chat(), _refusal("queue_full"), 0)
    assert world.read("predicted_wait_seconds_count") == 1
    assert world.read("predicted_wait_seconds_bucket", le="0.1") == 1


def _refusal(reason: str) -> Refusal:
    from forebay.core.outcome import ShedReason

    return Refusal(ShedReason(reason), SECOND)


def test_a_batch_is_counted_once() -> None:
    world = World(batching=DynamicConfig(max_size=3))
    (started,) = (e for e in world.pipeline.offer(chat(), world.now) if isinstance(e, Dispatch))
    (first,) = started.leases
    for _ in range(3):
        world.pipeline.offer(chat(), world.now)
    effects = world.pipeline.report(Finished(first, Usage(1, 1)), world.now)
    (batch,) = (effect for effect in effects if isinstance(effect, Dispatch))
    assert len(batch.leases) == 3
    for lease in batch.leases:
        world.pipeline.report(Finished(lease, Usage(1, 1)), world.now)
    assert world.read("batch_size_count") == 2
    assert world.read("batch_size_sum") == 4
    assert world.read("batch_size_bucket", le="1") == 1


def test_names_from_clients_fold_and_the_page_stays_small() -> None:
    """N-01: unknown names, however many, long or hostile, make one series, and the page parses."""
    world = World()
    world.metrics.shed(chat(), _refusal("queue_full"), 0)
    before = world.text()
    for number in range(500):
        hostile = f'm{number}"\n\\{{}}' + "x" * 1000
        request = Request(key=hostile, model=hostile, route=hostile, priority_class=hostile, flow=hostile)
        world.metrics.shed(request, _refusal("queue_full"), 0)
        world.metrics.rejected(1000 + number, hostile)
        world.metrics.rejected(401, "invalid_key")
        world.metrics.passed(hostile)
    after = world.text()
    assert len(after.splitlines()) - len(before.splitlines()) == 4
    assert "xxxx" not in after
    assert world.read("requests_total", route="other", class_="other", outcome="shed", reason="queue_full") == 500
    assert world.read("rejected_total", status="other", reason="other") == 500
    assert world.read("rejected_total", status="401", reason="invalid_key") == 500
    assert world.read("control_requests_total", route="other") == 500
    assert len(list(text_string_to_metric_families(after))) > 20


def test_names_follow_the_conventions() -> None:
    families = [f for f in text_string_to_metric_families(World().text()) if f.name.startswith("forebay_")]
    assert families
    for family in families:
        assert re.fullmatch(r"[a-z_]+", family.name)
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|ns|millis|kb|mb|percent)$", family.name), family.name
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples), family.name
        else:
            assert not family.name.endswith("_total"), family.name


def test_every_metric_is_in_the_docs_and_none_besides() -> None:
    world = World()
    world.metrics.shed(chat(), _refusal("queue_full"), 0)
    world.metrics.rejected(401, "invalid_key")
    world.metrics.passed("chat")
    types = (line.split()[2:] for line in world.text().splitlines() if line.startswith("# TYPE forebay_"))
    documented = re.findall(r"^\| `(forebay_\w+)` \| (\w+) ", DOCS.read_text("utf-8"), re.MULTILINE)
    assert dict(types) == dict(documented)


def test_a_gateway_at_rest_tells_its_state() -> None:
    world = World()
    assert world.read("build_info", version="1.2.3") == 1
    assert world.read("engine_up", engine="a/0") == 1
    assert world.read("engine_ejected", engine="a/0") == 0
    assert world.read("concurrency_limit", engine="a/0") == 1
    assert world.read("queue_depth_limit", pool="a") == 256
    assert world.read("wait_budget_seconds", pool="a") == 0.05
    assert world.read("signal_age_seconds", signal="probe a/0") == 0.5
    assert world.read("retry_tickets_total", result="held") == 3
    assert world.read("ledger_lag_seconds") == 0.25
    assert world.read("ledger_store_up") == 1
    assert world.read("ledger_lost_total") == 0
    world.pipeline.drain(world.now)
    assert world.read("draining") == 1


def test_histogram_bounds_are_inclusive_and_scaled() -> None:
    histogram = Histogram((10, 20), 10)
    for value in (10, 11, 21):
        histogram.observe(value)
    assert histogram.count == 3
    from prometheus_client.metrics_core import HistogramMetricFamily

    family = HistogramMetricFamily("h", "H.", labels=[])
    histogram.add_to(family)
    values = {s.labels.get("le", s.name): s.value for s in family.samples}
    assert values == {"1": 1, "2": 2, "+Inf": 3, "h_count": 3, "h_sum": 4.2}


def test_observers_are_all_told() -> None:
    class Seen:
        def __init__(self) -> None:
            self.seen: list[object] = []

        def closed(self, ticket: Ticket) -> None:
            self.seen.append(ticket)

        def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
            self.seen.append((request, refusal, predicted_wait_ns))

    one, two = Seen(), Seen()
    request, refusal = chat(), _refusal("queue_full")
    Observers([one, two]).shed(request, refusal, 7)
    assert one.seen == two.seen == [(request, refusal, 7)]
