"""The tables of the store, the same on SQLite and PostgreSQL.

Times are integers of milliseconds since 1970 in UTC, credits are tokens. JSON is text: nothing is searched inside it.
Transfers and entries are only ever added; triggers of the migration refuse to change or delete them. A key
is named by its id and not referred to: the ledger outlives it.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

HEAD = "0003"
"""Newest migration; a test holds it to the scripts."""

Whole = BigInteger().with_variant(Integer, "sqlite")
"""64 bits on both; SQLite counts up only what it calls INTEGER."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# ---- credits -----------------------------------------------------------------------------------------------------

accounts = Table(
    "accounts",  # five of each key, which add up to zero: what was issued to it is what it has, had and owes
    metadata,
    Column("id", Whole, primary_key=True, autoincrement=True),
    Column("key_id", String(64), nullable=False),
    Column("kind", String(16), nullable=False),  # issued | available | held | spent | debt
    Column("balance", Whole, nullable=False),
    Column("transfers", Whole, nullable=False),  # of the key so far; counted on its `available` account
    UniqueConstraint("key_id", "kind"),
    CheckConstraint("kind IN ('issued', 'debt') OR balance >= 0", name="not_below_zero"),
    CheckConstraint("kind NOT IN ('issued', 'debt') OR balance <= 0", name="not_above_zero"),
)

leases = Table(
    "leases",  # credit that one gateway may spend without asking
    metadata,
    Column("id", Whole, primary_key=True, autoincrement=True),
    Column("key_id", String(64), nullable=False),
    Column("journal", String(32), ForeignKey("journals.id"), nullable=False),
    Column("granted", Whole, nullable=False),
    Column("captured", Whole, nullable=False),
    Column("returned", Whole, nullable=False),
    Column("state", String(16), nullable=False),  # open | released | expired
    Column("opened_ms", Whole, nullable=False),
    Column("expires_ms", Whole, nullable=False),
    CheckConstraint("captured >= 0 AND returned >= 0 AND captured + returned <= granted", name="within"),
    CheckConstraint("state = 'open' OR captured + returned = granted", name="closed_whole"),
    Index(None, "journal", "state"),
    Index(None, "state", "expires_ms"),
)

Index(
    "ux_leases_open",  # one open lease of a key at each gateway
    leases.c.key_id,
    leases.c.journal,
    unique=True,
    sqlite_where=leases.c.state == "open",
    postgresql_where=leases.c.state == "open",
)

transfers = Table(
    "transfers",
    metadata,
    Column("id", Whole, primary_key=True, autoincrement=True),
    Column("key_id", String(64), nullable=False),
    Column("number", Whole, nullable=False),  # 1, 2, 3 … of the key: a gap is a row that was taken away
    Column("kind", String(16), nullable=False),  # top_up | adjust | hold | capture | release | expire
    Column("amount", Whole, nullable=False),
    Column("lease_id", Whole, ForeignKey("leases.id"), nullable=True),
    Column("idempotency", String(160), nullable=False, unique=True),
    Column("actor", String(128), nullable=False),
    Column("note", Text, nullable=False),
    Column("at_ms", Whole, nullable=False),
    UniqueConstraint("key_id", "number"),
    Index(None, "lease_id"),
)

entries = Table(
    "entries",  # those of one transfer add up to zero
    metadata,
    Column("transfer_id", Whole, ForeignKey("transfers.id"), primary_key=True),
    Column("account_id", Whole, ForeignKey("accounts.id"), primary_key=True),
    Column("amount", Whole, nullable=False),
    Index(None, "account_id"),
)

journals = Table(
    "journals",  # how far the journal of each gateway has been posted
    metadata,
    Column("id", String(32), primary_key=True),
    Column("gateway", String(128), nullable=False),  # host and path, for a person
    Column("posted", Whole, nullable=False),  # sequence of the last record that the store holds
    Column("opened_ms", Whole, nullable=False),
    Column("posted_ms", Whole, nullable=False),
    Column("closed_ms", Whole, nullable=True),
)

usage = Table(
    "usage",  # what each key used, by calendar period in UTC
    metadata,
    Column("key_id", String(64), primary_key=True),
    Column("period", String(8), primary_key=True),  # day | month
    Column("start", Integer, primary_key=True),  # 20261130, 202611
    Column("requests", Whole, nullable=False),
    Column("input_tokens", Whole, nullable=False),
    Column("output_tokens", Whole, nullable=False),
    Index(None, "period", "start"),
)

model_usage = Table(
    "model_usage",  # what of that was of one model; only where a quota counts the days of that model apart
    metadata,
    Column("key_id", String(64), primary_key=True),
    Column("model", String(512), primary_key=True),
    Column("period", String(8), primary_key=True),
    Column("start", Integer, primary_key=True),
    Column("requests", Whole, nullable=False),
    Column("input_tokens", Whole, nullable=False),
    Column("output_tokens", Whole, nullable=False),
    Index(None, "period", "start"),
)

# ---- keys --------------------------------------------------------------------------------------------------------

keys = Table(
    "keys",
    metadata,
    Column("id", String(64), primary_key=True),  # the public id: what credentials, logs and the ledger name it by
    Column("verifier", LargeBinary, nullable=False),  # salt and hash of the secret, which nothing keeps
    Column("name", String(128), nullable=False),
    Column("team", String(64), nullable=True),
    Column("class", String(64), nullable=False),
    Column("mode", String(16), nullable=True),
    Column("models", Text, nullable=True),  # JSON list; NULL: any
    Column("routes", Text, nullable=True),  # JSON list; NULL: any
    Column("limits", Text, nullable=True),  # JSON object of what is set; NULL: those of [limits.default]
    Column("cap_output_tokens", Whole, nullable=True),
    Column("prepaid", Integer, nullable=False),  # 1: it spends credit
    Column("created_ms", Whole, nullable=False),
    Column("expires_ms", Whole, nullable=True),
    Column("revoked_ms", Whole, nullable=True),
    Column("change", Whole, nullable=False),  # number of the change that it last took part in
    Index(None, "created_ms", "id"),
    Index(None, "team"),
    Index(None, "change"),
)

changes = Table(
    "changes",  # one row: the number of the last change of any key; whoever changes one holds its lock first
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("number", Whole, nullable=False),
)

audit = Table(
    "audit",  # who changed what
    metadata,
    Column("id", Whole, primary_key=True, autoincrement=True),
    Column("at_ms", Whole, nullable=False),
    Column("actor", String(128), nullable=False),
    Column("action", String(32), nullable=False),
    Column("key_id", String(64), nullable=False),
    Column("detail", Text, nullable=False),  # JSON: each changed field with its value before and after
    Index(None, "key_id", "id"),
)

requests = Table(
    "requests",  # changes that were asked for with an idempotency key, so that none is made twice
    metadata,
    Column("idempotency", String(128), primary_key=True),
    Column("asked", LargeBinary, nullable=False),  # hash of the request
    Column("key_id", String(64), nullable=False),  # the key that it changed
    Column("at_ms", Whole, nullable=False),
    Index(None, "at_ms"),
)
