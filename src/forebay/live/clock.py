"""Where a live gateway gets its time from. Tests and the clock-jumping loop pass their own."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

from forebay.core.instant import Instant

Clock = Callable[[], Instant]

monotonic: Clock = monotonic_ns
