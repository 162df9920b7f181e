"""Five hundred streams for a minute, and clients that leave again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.streams import MIB, check_streams, leaving, stream

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


def test_five_hundred_streams_of_fifty_chunks_a_second(tmp_path: Path) -> None:
    seen = stream(tmp_path, streams=500, tokens_each=3_000, step_s=0.02)
    print(f"{seen.chunks_per_s:.0f} chunks/s, {seen.cpu_us_per_chunk:.1f} µs of the gateway's CPU per chunk")
    check_streams(seen, growth_most=4 * MIB)


def test_clients_leave_in_waves(tmp_path: Path) -> None:
    leaving(tmp_path, clients=200, rounds=20)
