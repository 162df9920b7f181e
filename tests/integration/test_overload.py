"""Sustained overload of a real gateway process before a real engine process. Its long version is in tests/soak."""

from __future__ import annotations

from pathlib import Path

from .overload import check, overload


def test_hybrid_keeps_its_promises_at_ten_times_the_capacity(tmp_path: Path) -> None:
    check(overload(tmp_path, seconds=8.0))
