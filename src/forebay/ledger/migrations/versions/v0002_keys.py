"""Keys, who changed them, and the number of the last change."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

WHOLE = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    _keys()
    _trail()
    op.execute("INSERT INTO changes (id, number) VALUES (1, 0)")
    _refuse_changes_of_the_trail()


def _keys() -> None:
    op.create_table(
        "keys",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("verifier", sa.LargeBinary, nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("team", sa.String(64), nullable=True),
        sa.Column("class", sa.String(64), nullable=False),
        sa.Column("mode", sa.String(16), nullable=True),
        sa.Column("models", sa.Text, nullable=True),
        sa.Column("routes", sa.Text, nullable=True),
        sa.Column("limits", sa.Text, nullable=True),
        sa.Column("cap_output_tokens", WHOLE, nullable=True),
        sa.Column("prepaid", sa.Integer, nullable=False),
        sa.Column("created_ms", WHOLE, nullable=False),
        sa.Column("expires_ms", WHOLE, nullable=True),
        sa.Column("revoked_ms", WHOLE, nullable=True),
        sa.Column("change", WHOLE, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
    )
    op.create_index("ix_keys_created_ms_id", "keys", ["created_ms", "id"])
    op.create_index("ix_keys_team", "keys", ["team"])
    op.create_index("ix_keys_change", "keys", ["change"])


def _trail() -> None:
    op.create_table(
        "changes",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("number", WHOLE, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_changes"),
    )
    op.create_table(
        "audit",
        sa.Column("id", WHOLE, nullable=False, autoincrement=True),
        sa.Column("at_ms", WHOLE, nullable=False),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_key_id_id", "audit", ["key_id", "id"])
    op.create_table(
        "requests",
        sa.Column("idempotency", sa.String(128), nullable=False),
        sa.Column("asked", sa.LargeBinary, nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("at_ms", WHOLE, nullable=False),
        sa.PrimaryKeyConstraint("idempotency", name="pk_requests"),
    )
    op.create_index("ix_requests_at_ms", "requests", ["at_ms"])


def _refuse_changes_of_the_trail() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_no_{verb.lower()} BEFORE {verb} ON audit "
                "BEGIN SELECT RAISE(ABORT, 'the audit trail is only ever added to'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION audit_added_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the audit trail is only ever added to'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_added_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_added_only()"
    )
