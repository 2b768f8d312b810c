"""The schema of release 0.1, which called it "2"; a database of its schema "1" becomes one here.

The tables are written out: a migration records what was, independent of today's ``tables.py``. Release 0.1 made
tables that were only new without counting its schema up, so any of them may be missing.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    inspect,
    literal_column,
    select,
)
from sqlalchemy.schema import SchemaItem

from gym_fed.trust.ledger.entries import subjects

revision = "0001"
down_revision = None

schema = MetaData()


def upgrade() -> None:
    """Make what is missing, and move the signatures of single entries to a table of their own.

    Schema 2 signs heads, which stand for every entry before them. The old signatures are kept until ``Ledger`` has
    checked them and signed the first head.
    """
    tx = op.get_bind()
    schema.create_all(tx)
    ledger, moved, named = (schema.tables[n] for n in ("ledger", "ledger_signatures", "ledger_subjects"))
    if "signature" not in {column["name"] for column in inspect(tx).get_columns("ledger")}:
        return
    copied = select(ledger.c.sequence, literal_column("signature", LargeBinary))
    tx.execute(moved.insert().from_select(["sequence", "signature"], copied))
    op.drop_column("ledger", "signature")
    for sequence, body in tx.execute(select(ledger.c.sequence, ledger.c.body)).all():
        for contributor in sorted(subjects(body)):
            tx.execute(named.insert().values(sequence=sequence, contributor=contributor))


def _table(name: str, *columns: SchemaItem) -> None:
    Table(name, schema, *columns)


_table("settings", Column("key", String, primary_key=True), Column("value", Text, nullable=False))
_table(
    "accounts",
    Column("contributor", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("public_key", LargeBinary, nullable=False, unique=True),
    Column("status", String, nullable=False),
    Column("enrolled_at", Float, nullable=False),
)
_table(
    "invites",
    Column("token_hash", String, primary_key=True),
    Column("note", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("used_by", String),
)
_table(
    "nodes",
    Column("node_id", Integer, primary_key=True, autoincrement=True),
    Column("contributor", String, nullable=False),
    Column("instance", String, nullable=False),
    Column("connected_until", Float, nullable=False, default=0.0),
    UniqueConstraint("contributor", "instance"),
)
_table(
    "objects",
    Column("sha256", String, primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
)
_table(
    "uploads",
    Column("contributor", String, primary_key=True),
    Column("sha256", String, primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
)
_table(
    "readers",
    Column("sha256", String, primary_key=True),
    Column("contributor", String, primary_key=True),
)
_table(
    "messages",
    Column("message_id", String, primary_key=True),
    Column("node_id", Integer, nullable=False, index=True),
    Column("group_id", String, nullable=False),
    Column("message_type", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("ttl_seconds", Float, nullable=False),
    Column("fingerprint", String, nullable=False, index=True),
    Column("content", LargeBinary, nullable=False),
    Column("state", String, nullable=False, index=True),
    Column("lease_until", Float, nullable=False),
    Column("progress", String, nullable=False, default=""),
    Column("reply", LargeBinary),
    Column("receipt", Text),
    Column("replied_at", Float),
)
_table(
    "rounds",
    Column("server_round", Integer, primary_key=True),
    Column("state", String, nullable=False),
    Column("spec", Text),
    Column("base_height", Integer, nullable=False),
    Column("opened_at", Float, nullable=False),
    Column("deadline", Float),
    Column("merging", Text),
    Column("reason", Text, nullable=False, default=""),
    Column("closed_at", Float),
)
_table(
    "round_tasks",
    Column("server_round", Integer, primary_key=True),
    Column("node_id", BigInteger, primary_key=True),
    Column("message_id", String, nullable=False),
    Column("outcome", String, nullable=False, default=""),
)
_table(
    "updates",
    Column("update_id", String, primary_key=True),
    Column("contributor", String, nullable=False),
    Column("server_round", Integer, nullable=False, index=True),
    Column("message_id", String, nullable=False),
    Column("manifest", Text, nullable=False),
    Column("signature", LargeBinary, nullable=False),
    Column("nonce", String, nullable=False),
    Column("delta_sha256", String, nullable=False),
    Column("delta_bytes", BigInteger, nullable=False),
    Column("norm", Float),
    Column("verdict", String, nullable=False),
    Column("code", String, nullable=False, default=""),
    Column("reason", Text, nullable=False, default=""),
    Column("heldout_change", Float),
    Column("ledger_sequence", Integer, nullable=False),
    Column("received_at", Float, nullable=False),
    UniqueConstraint("contributor", "nonce"),
)
_table(
    "versions",
    Column("height", Integer, primary_key=True),
    Column("digest", String, nullable=False, unique=True),
    Column("server_round", Integer, nullable=False, unique=True),
    Column("soup_sha256", String, nullable=False),
    Column("soup_bytes", BigInteger, nullable=False),
    Column("residual", String),
    Column("heldout_before", Float),
    Column("heldout_after", Float),
    Column("num_updates", Integer, nullable=False),
    Column("committed_at", Float, nullable=False),
)
_table(
    "credits",
    Column("server_round", Integer, primary_key=True),
    Column("contributor", String, primary_key=True),
    Column("amount", Integer, nullable=False),
)
_table(
    "contributions",
    Column("update_id", String, primary_key=True),
    Column("contributor", String, nullable=False, index=True),
    Column("server_round", Integer, nullable=False, index=True),
    Column("method", String, nullable=False),
    Column("score", Float),
    Column("similarity", Float),
    Column("reputation", Float, nullable=False),
)
_table(
    "reputations",
    Column("contributor", String, primary_key=True),
    Column("value", Float, nullable=False),
    Column("height", Integer, nullable=False),
)
_table(
    "secure_stages",
    Column("server_round", Integer, primary_key=True),
    Column("stage", String, primary_key=True),
    Column("members", Text),
    Column("started_at", Float, nullable=False),
)
_table(
    "secure_messages",
    Column("server_round", Integer, primary_key=True),
    Column("stage", String, primary_key=True),
    Column("node_id", Integer, primary_key=True),
    Column("message_id", String, nullable=False),
    Column("outcome", String, nullable=False, default=""),
    Column("reply", Text),
    Column("replied_at", Float),
)
_table(
    "ledger",
    Column("sequence", Integer, primary_key=True),
    Column("kind", String, nullable=False),
    Column("body", Text, nullable=False),
    Column("previous_hash", String, nullable=False),
    Column("hash", String, nullable=False, unique=True),
)
_table(
    "ledger_heads",
    Column("size", Integer, primary_key=True),
    Column("head", Text, nullable=False),
    Column("frontier", Text, nullable=False),
)
_table(
    "ledger_signatures",
    Column("sequence", Integer, primary_key=True),
    Column("signature", LargeBinary, nullable=False),
)
_table(
    "ledger_subjects",
    Column("sequence", Integer, primary_key=True),
    Column("contributor", String, primary_key=True, index=True),
)
_table(
    "royalties",
    Column("usage", String, primary_key=True),
    Column("contributor", String, primary_key=True, index=True),
    Column("amount", Integer, nullable=False),
    Column("recorded_at", Float, nullable=False),
)
_table(
    "account_keys",
    Column("public_key", LargeBinary, primary_key=True),
    Column("contributor", String, nullable=False, index=True),
    Column("status", String, nullable=False),
    Column("valid_from", Float, nullable=False),
    Column("valid_until", Float),
)
_table(
    "key_refusals",
    Column("contributor", String, primary_key=True),
    Column("server_round", Integer, primary_key=True),
)
_table(
    "transfers",
    Column("transfer", String, primary_key=True),
    Column("sender", String, nullable=False, index=True),
    Column("recipient", String, nullable=False, index=True),
    Column("amount", Integer, nullable=False),
    Column("nonce", String, nullable=False),
    Column("status", String, nullable=False, index=True),
    Column("hold_seconds", Float, nullable=False),
    Column("asked_at", Float, nullable=False),
    Column("closed_at", Float),
    UniqueConstraint("sender", "nonce"),
)
_table(
    "privacy_seeds",
    Column("server_round", Integer, primary_key=True),
    Column("merging", String, primary_key=True),
    Column("seed", LargeBinary, nullable=False),
    Column("seed_sha256", String, nullable=False, unique=True),
)
_table(
    "privacy_spending",
    Column("server_round", Integer, primary_key=True),
    Column("contributor", String, primary_key=True),
    Column("mechanism", String, nullable=False),
    Column("noise_multiplier", Float, nullable=False),
)
_table(
    "variants",
    Column("owner", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("slot", String, nullable=False, unique=True),
    Column("revision", BigInteger, nullable=False),
    Column("document", Text),
    Column("document_sha256", String, nullable=False),
    Column("public_key", LargeBinary, nullable=False),
    Column("delta_sha256", String, nullable=False, index=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("base_digest", String, nullable=False),
    Column("ledger_sequence", Integer, nullable=False),
    Column("put_at", Float, nullable=False),
)
_table(
    "variant_readers",
    Column("owner", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("reader", String, primary_key=True, index=True),
)
_table(
    "variant_takedowns",
    Column("owner", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("delta_sha256", String, primary_key=True),
    Column("reason", Text, nullable=False),
)
_table(
    "published",
    Column("digest", String, primary_key=True),
    Column("height", Integer, nullable=False),
)
