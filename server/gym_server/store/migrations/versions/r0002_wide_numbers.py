"""Amounts of credits and ids of nodes have 64 bits on every database; SQLite's integers have them anyway."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

WIDENED = (
    ("messages", "node_id"),
    ("nodes", "node_id"),
    ("secure_messages", "node_id"),
    ("credits", "amount"),
    ("royalties", "amount"),
    ("transfers", "amount"),
)


def upgrade() -> None:
    """Widen the columns where the database has integers of 32 bits."""
    if op.get_bind().dialect.name == "sqlite":
        return
    for table, column in WIDENED:
        op.alter_column(table, column, existing_type=sa.Integer(), type_=sa.BigInteger())
