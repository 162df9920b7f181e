"""Alembic's entry: runs the scripts in the transaction that the caller opened, under the caller's lock."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
