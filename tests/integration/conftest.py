"""What the cases before a scripted engine share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.faults.rig.backend import FakeBackend


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    with closing(FakeBackend()) as fake:
        yield fake
