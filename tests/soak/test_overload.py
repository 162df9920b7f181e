"""Half a minute of ten times the capacity."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.overload import check, overload


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_hybrid_keeps_its_promises_for_half_a_minute(tmp_path: Path) -> None:
    check(overload(tmp_path, seconds=30.0))
