"""What keys use of models whose days are counted apart."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

WHOLE = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "model_usage",
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("model", sa.String(512), nullable=False),
        sa.Column("period", sa.String(8), nullable=False),
        sa.Column("start", sa.Integer, nullable=False),
        sa.Column("requests", WHOLE, nullable=False),
        sa.Column("input_tokens", WHOLE, nullable=False),
        sa.Column("output_tokens", WHOLE, nullable=False),
        sa.PrimaryKeyConstraint("key_id", "model", "period", "start", name="pk_model_usage"),
    )
    op.create_index("ix_model_usage_period_start", "model_usage", ["period", "start"])
