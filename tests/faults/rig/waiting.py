"""Waiting by condition with a deadline, and many callers at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
V = TypeVar("V")


def eventually(condition: Callable[[], T], within: float = 2.0, what: str = "") -> T:
    """The first truthy value of `condition`, asked until `within` seconds have passed; fails with the last one."""
    deadline = time.monotonic() + within
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"not so within {within} s: {what or condition!r}; last value {value!r}")
        time.sleep(0.01)  # between two looks at another process


def in_parallel(work: Callable[[T], V], items: Iterable[T]) -> list[V]:
    """Run `work` on every item at the same time, one thread each; results in the order of the items."""
    listed = list(items)
    with ThreadPoolExecutor(max_workers=max(1, len(listed))) as crowd:
        return list(crowd.map(work, listed))
