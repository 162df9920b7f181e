"""Backends and gateways that live as long as one test, and end with their checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from .rig.backend import FakeBackend
from .rig.gateway import StartGateway, started


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    with closing(FakeBackend()) as fake:
        yield fake


@pytest.fixture
def other_backend() -> Iterator[FakeBackend]:
    with closing(FakeBackend()) as fake:
        yield fake


@pytest.fixture(scope="module")
def shared_backend() -> Iterator[FakeBackend]:
    """The backend of a module's shared gateway; `fresh_backend` gives it to one test at a time."""
    with closing(FakeBackend()) as fake:
        yield fake


@pytest.fixture
def fresh_backend(shared_backend: FakeBackend) -> FakeBackend:
    """The shared backend as new: healthy, with an empty log."""
    shared_backend.restart()
    return shared_backend


@pytest.fixture
def start_gateway(tmp_path: Path) -> Iterator[StartGateway]:
    with started(tmp_path) as start:
        yield start
