"""Backends and gateways that live as long as one test, and end with their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from .rig import FakeBackend, GatewayProcess

StartGateway = Callable[..., GatewayProcess]


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    fake = FakeBackend()
    yield fake
    fake.close()


@pytest.fixture
def other_backend() -> Iterator[FakeBackend]:
    fake = FakeBackend()
    yield fake
    fake.close()


@pytest.fixture(scope="module")
def shared_backend() -> Iterator[FakeBackend]:
    """The backend of a module's shared gateway; `fresh_backend` gives it to one test at a time."""
    fake = FakeBackend()
    yield fake
    fake.close()


@pytest.fixture
def fresh_backend(shared_backend: FakeBackend) -> FakeBackend:
    """The shared backend as new: healthy, with an empty log."""
    shared_backend.restart()
    return shared_backend


@pytest.fixture
def start_gateway(tmp_path: Path) -> Iterator[StartGateway]:
    """Start gateways from configs; at the end each must stop with status 0 and without a traceback."""
    started: list[GatewayProcess] = []

    def start(config: Mapping[str, Any], *, ready: bool = True, **how: Any) -> GatewayProcess:
        gateway = GatewayProcess(config, tmp_path / f"gateway-{len(started)}", ready=ready, **how)
        started.append(gateway)
        return gateway

    yield start
    try:
        for gateway in started:
            gateway.stop()
    finally:
        for gateway in started:
            gateway.kill()
