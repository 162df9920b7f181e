"""Streams in number, and clients that leave, between real processes. The long versions are in tests/soak."""

from __future__ import annotations

from pathlib import Path

from .streams import MIB, check_streams, leaving, stream


def test_a_hundred_streams_lose_nothing_and_memory_stays_flat(tmp_path: Path) -> None:
    seen = stream(tmp_path, streams=100, tokens_each=100, step_s=0.03)
    check_streams(seen, growth_most=2 * MIB)


def test_two_hundred_clients_that_leave_give_everything_back(tmp_path: Path) -> None:
    leaving(tmp_path, clients=200, rounds=1)
