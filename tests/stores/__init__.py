"""Stores for tests: a new SQLite file, or a new database of a PostgreSQL server of our own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .postgres import Postgres


@contextmanager
def new_store(kind: str, folder: Path) -> Iterator[str]:
    """The URL of an empty store, for as long as the block lasts."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'store.db'}"
        return
    server = Postgres()
    try:
        yield server.url()
    finally:
        server.remove()
