"""Credits, leases, journals and usage."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

WHOLE = sa.BigInteger().with_variant(sa.Integer, "sqlite")
ADDED_ONLY = ("transfers", "entries")


def upgrade() -> None:
    _accounts_and_leases()
    _transfers()
    op.create_table(
        "usage",
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("period", sa.String(8), nullable=False),
        sa.Column("start", sa.Integer, nullable=False),
        sa.Column("requests", WHOLE, nullable=False),
        sa.Column("input_tokens", WHOLE, nullable=False),
        sa.Column("output_tokens", WHOLE, nullable=False),
        sa.PrimaryKeyConstraint("key_id", "period", "start", name="pk_usage"),
    )
    op.create_index("ix_usage_period_start", "usage", ["period", "start"])
    for table in ADDED_ONLY:
        _refuse_changes(table)


def _accounts_and_leases() -> None:
    op.create_table(
        "accounts",
        sa.Column("id", WHOLE, nullable=False, autoincrement=True),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("balance", WHOLE, nullable=False),
        sa.Column("transfers", WHOLE, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_accounts"),
        sa.UniqueConstraint("key_id", "kind", name="uq_accounts_key_id_kind"),
        sa.CheckConstraint("kind IN ('issued', 'debt') OR balance >= 0", name="ck_accounts_not_below_zero"),
        sa.CheckConstraint("kind NOT IN ('issued', 'debt') OR balance <= 0", name="ck_accounts_not_above_zero"),
    )
    op.create_table(
        "journals",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("gateway", sa.String(128), nullable=False),
        sa.Column("posted", WHOLE, nullable=False),
        sa.Column("opened_ms", WHOLE, nullable=False),
        sa.Column("posted_ms", WHOLE, nullable=False),
        sa.Column("closed_ms", WHOLE, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_journals"),
    )
    op.create_table(
        "leases",
        sa.Column("id", WHOLE, nullable=False, autoincrement=True),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("journal", sa.String(32), nullable=False),
        sa.Column("granted", WHOLE, nullable=False),
        sa.Column("captured", WHOLE, nullable=False),
        sa.Column("returned", WHOLE, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("opened_ms", WHOLE, nullable=False),
        sa.Column("expires_ms", WHOLE, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_leases"),
        sa.ForeignKeyConstraint(["journal"], ["journals.id"], name="fk_leases_journal"),
        sa.CheckConstraint(
            "captured >= 0 AND returned >= 0 AND captured + returned <= granted", name="ck_leases_within"
        ),
        sa.CheckConstraint("state = 'open' OR captured + returned = granted", name="ck_leases_closed_whole"),
    )
    op.create_index("ix_leases_journal_state", "leases", ["journal", "state"])
    op.create_index("ix_leases_state_expires_ms", "leases", ["state", "expires_ms"])
    is_open = sa.text("state = 'open'")
    op.create_index(
        "ux_leases_open", "leases", ["key_id", "journal"], unique=True, sqlite_where=is_open, postgresql_where=is_open
    )


def _transfers() -> None:
    op.create_table(
        "transfers",
        sa.Column("id", WHOLE, nullable=False, autoincrement=True),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("number", WHOLE, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("amount", WHOLE, nullable=False),
        sa.Column("lease_id", WHOLE, nullable=True),
        sa.Column("idempotency", sa.String(160), nullable=False),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("at_ms", WHOLE, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_transfers"),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.id"], name="fk_transfers_lease_id"),
        sa.UniqueConstraint("idempotency", name="uq_transfers_idempotency"),
        sa.UniqueConstraint("key_id", "number", name="uq_transfers_key_id_number"),
    )
    op.create_index("ix_transfers_lease_id", "transfers", ["lease_id"])
    op.create_table(
        "entries",
        sa.Column("transfer_id", WHOLE, nullable=False),
        sa.Column("account_id", WHOLE, nullable=False),
        sa.Column("amount", WHOLE, nullable=False),
        sa.PrimaryKeyConstraint("transfer_id", "account_id", name="pk_entries"),
        sa.ForeignKeyConstraint(["transfer_id"], ["transfers.id"], name="fk_entries_transfer_id"),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_entries_account_id"),
    )
    op.create_index("ix_entries_account_id", "entries", ["account_id"])


def _refuse_changes(table: str) -> None:
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} are only ever added'); END"
            )
        return
    op.execute(
        f"CREATE FUNCTION {table}_added_only() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{table} are only ever added'; END $$"
    )
    op.execute(
        f"CREATE TRIGGER {table}_added_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_added_only()"
    )
