"""Stores for tests: a new SQLite file each, or a new database of a PostgreSQL server of our own."""
