"""Indexes for what the dashboard and the status ask of a long ledger."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Entries by kind; updates, credits and privacy costs by contributor."""
    op.create_index("ix_ledger_kind", "ledger", ["kind", "sequence"])
    op.create_index("ix_updates_contributor", "updates", ["contributor", "server_round"])
    op.create_index("ix_credits_contributor", "credits", ["contributor", "amount"])
    op.create_index(
        "ix_privacy_spending_contributor",
        "privacy_spending",
        ["contributor", "mechanism", "noise_multiplier"],
    )
