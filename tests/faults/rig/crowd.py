"""Many connections held by one thread: what is measured is the gateway, not threads that wait for each other."""

from __future__ import annotations

import selectors
import time
from types import TracebackType
from typing import Self

from .client import EndedShortError, Head, RawClient


class Crowd:
    """`size` open connections. `heads` holds the answers' heads by number, `sent` and `ended` times by number."""

    def __init__(self, port: int, size: int) -> None:
        self.clients = [RawClient(port) for _ in range(size)]
        self.sent: dict[int, float] = {}
        self.heads: dict[int, Head] = {}
        self.ended: dict[int, str] = {}
        """How a connection ended on which no answer came: "fin" or "rst"."""
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._selector.close()
        for client in self.clients:
            client.close()

    def send(self, number: int, data: bytes) -> None:
        """Send on one connection and expect an answer there."""
        client = self.clients[number]
        self.sent[number] = time.monotonic()
        client.send(data)
        self._selector.register(client.sock, selectors.EVENT_READ, number)

    def read(self, within: float, *, until: int | None = None) -> None:
        """Read heads until so many answers (all that are expected) are here or have failed, or the time is up."""
        deadline = time.monotonic() + within
        while self._selector.get_map() and (until is None or len(self.heads) + len(self.ended) < until):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            for key, _ in self._selector.select(left):
                number = key.data
                self._selector.unregister(key.fileobj)
                try:
                    self.heads[number] = self.clients[number].read_head(1.0)
                except EndedShortError as end:
                    self.ended[number] = end.how

    def took(self, number: int) -> float:
        """Seconds from the request to the head of its answer."""
        return self.heads[number].at - self.sent[number]

    def with_status(self, *statuses: int) -> list[int]:
        """Numbers of the connections that were answered so."""
        return [number for number, head in self.heads.items() if head.status in statuses]
