"""Endpoints that every gateway has: health, metrics, status, snapshot, explanations, and a reload."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from forebay.core.snapshot import Snapshot
from forebay.errors import ForebayError
from forebay.ingress.api.table import Asked, Endpoint, Problem, Reply

log = logging.getLogger(__name__)

PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


class BaseEndpoints:
    """Answers from the running gateway. `status` returns plain JSON data."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        status: Callable[[], dict[str, Any]],
        registry: CollectorRegistry,
        reload: Callable[[], tuple[str, ...]] | None,
        explain: Callable[[str], dict[str, Any] | None] | None,
        tuners: Callable[[bool | None], dict[str, Any]],
    ) -> None:
        self._snapshot = snapshot
        self._status = status
        self._registry = registry
        self._reload = reload
        self._explain = explain
        self._tuners = tuners

    def endpoints(self) -> Iterator[Endpoint]:
        """Each with what it gives."""
        yield Endpoint("GET", "/healthz", "Is the process alive?", self._alive, open=True)
        yield Endpoint("GET", "/metrics", "Metrics for Prometheus.", self._metrics, kind=PROMETHEUS)
        yield Endpoint("GET", "/api/v1/status", "What is in force, and what is degraded.", self._say_status)
        yield Endpoint("GET", "/api/v1/snapshot", "Every figure of the core, at one instant.", self._say_snapshot)
        yield Endpoint(
            "GET", "/api/v1/explain/{id}", "Every figure behind the decision on one request.", self._explained,
            errors=(404,),
        )  # fmt: skip
        yield Endpoint(
            "POST", "/api/v1/config/reload", "Read the configuration anew, and take it whole or not at all.",
            self._reloaded, errors=(409,),
        )  # fmt: skip

        tuner = "/api/v1/tuner"
        yield Endpoint("GET", tuner, "What the depth tuners found.", self._say_tuners)
        yield Endpoint("POST", f"{tuner}/freeze", "Keep the depths where they are.", self._freeze)
        yield Endpoint("POST", f"{tuner}/unfreeze", "Let the depth tuners go on.", self._unfreeze)

    async def _alive(self, asked: Asked) -> Reply:
        del asked
        return Reply(200, b'{"status":"alive"}')

    async def _say_status(self, asked: Asked) -> Reply:
        del asked
        return Reply(200, msgspec.json.encode(self._status()))

    async def _say_snapshot(self, asked: Asked) -> Reply:
        del asked
        return Reply(200, msgspec.json.encode(self._snapshot()))

    async def _explained(self, asked: Asked) -> Reply:
        found = self._explain(asked.place) if self._explain is not None else None
        if found is None:
            raise Problem(404, "not_kept", "no decision on this request is kept; see [telemetry] explain")
        return Reply(200, msgspec.json.encode(found))

    async def _reloaded(self, asked: Asked) -> Reply:
        del asked
        try:
            warnings = self._reload() if self._reload is not None else ()
        except ForebayError as error:
            raise Problem(409, "not_reloaded", f"nothing has changed: {error}") from None
        log.info("the configuration was reloaded")
        return Reply(200, msgspec.json.encode({"reloaded": True, "warnings": warnings}))

    async def _say_tuners(self, asked: Asked) -> Reply:
        del asked
        return Reply(200, msgspec.json.encode(self._tuners(None)))

    async def _freeze(self, asked: Asked) -> Reply:
        del asked
        log.info("the depth tuners were frozen")
        return Reply(200, msgspec.json.encode(self._tuners(True)))

    async def _unfreeze(self, asked: Asked) -> Reply:
        del asked
        log.info("the depth tuners were let go on")
        return Reply(200, msgspec.json.encode(self._tuners(False)))

    async def _metrics(self, asked: Asked) -> Reply:
        """Family by family, with the loop free in between: a scrape never delays the data port noticeably."""
        del asked
        parts = []
        for family in self._registry.collect():
            parts.append(generate_latest(cast("CollectorRegistry", _Single(family))))
            await asyncio.sleep(0)
        return Reply(200, b"".join(parts), PROMETHEUS)


class _Single(Collector):
    """A registry of one family: the encoder asks for nothing but `collect`."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family
