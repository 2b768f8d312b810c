"""Scores have errors and are summed up over rounds; updates are committed to before their upload."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Rounds of before have no errors, and their scores are in nobody's running score."""
    with op.batch_alter_table("contributions") as table:
        table.add_column(sa.Column("error", sa.Float(), nullable=True))
    op.create_table(
        "running_scores",
        sa.Column("contributor", sa.String(), primary_key=True),
        sa.Column("heldout", sa.String(), primary_key=True),
        sa.Column("height", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("parts", sa.Text(), nullable=False),
        sa.Column("chance", sa.Float(), nullable=False),
        sa.Column("earned", sa.BigInteger(), nullable=False),
    )
    with op.batch_alter_table("updates") as table:
        table.add_column(sa.Column("committed_at", sa.Float(), nullable=True))
    op.create_table(
        "commitments",
        sa.Column("contributor", sa.String(), primary_key=True),
        sa.Column("sha256", sa.String(), primary_key=True),
        sa.Column("committed_at", sa.Float(), nullable=False),
    )
