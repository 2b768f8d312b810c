"""Seeds that draw the rows of evaluations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add their table."""
    op.create_table(
        "evaluation_seeds",
        sa.Column("server_round", sa.Integer(), primary_key=True),
        sa.Column("seed", sa.LargeBinary(), nullable=False),
    )
