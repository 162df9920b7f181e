"""The time to come back, as clients read it."""

from __future__ import annotations

import pytest

from forebay.core.instant import MILLISECOND, SECOND
from forebay.ingress.status import retry_headers


@pytest.mark.parametrize(
    ("wait_ns", "lines"),
    [
        (None, b"x-should-retry: false\r\n"),
        (0, b"retry-after: 1\r\nretry-after-ms: 1\r\nx-should-retry: true\r\n"),
        (1, b"retry-after: 1\r\nretry-after-ms: 1\r\nx-should-retry: true\r\n"),
        (1500 * MILLISECOND, b"retry-after: 2\r\nretry-after-ms: 1500\r\nx-should-retry: true\r\n"),
        (60 * SECOND, b"retry-after: 60\r\nretry-after-ms: 60000\r\nx-should-retry: true\r\n"),
        (61 * SECOND, b"retry-after: 61\r\nretry-after-ms: 61000\r\nx-should-retry: false\r\n"),
    ],
)
def test_waits_are_rounded_up_and_long_ones_tell_sdks_to_stop(wait_ns: int | None, lines: bytes) -> None:
    assert retry_headers(wait_ns) == lines
