"""Each version names its parent, which may be an earlier one than the version before it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Until now every version followed from the one before it."""
    with op.batch_alter_table("versions") as table:
        table.add_column(sa.Column("parent", sa.Integer(), nullable=True))
    op.execute("UPDATE versions SET parent = height - 1")
    with op.batch_alter_table("versions") as table:
        table.alter_column("parent", existing_type=sa.Integer(), nullable=False)
