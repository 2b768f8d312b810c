"""The hub's tables. Times are Unix seconds, digests lower-case hex unless prefixed ``sha256:``."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Dialect,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.engine.default import DefaultExecutionContext
from sqlalchemy.schema import SchemaItem

metadata = MetaData()

Int64 = BigInteger().with_variant(Integer(), "sqlite")
"""SQLite's integers have 64 bits, and only a column that is called INTEGER numbers its rows itself."""


class UInt64(TypeDecorator[int]):
    """An unsigned 64-bit number in a signed column (two's complement): a stock SuperLink's node ids use every bit."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        return value - 2**64 if value is not None and value >= 2**63 else value

    def process_result_value(self, value: int | None, dialect: Dialect) -> int | None:
        return value + 2**64 if value is not None and value < 0 else value


def _the_one_before(row: DefaultExecutionContext) -> int:
    """The parent of a version where nothing says another."""
    return int(row.get_current_parameters()["height"]) - 1  # type: ignore[no-untyped-call]


def _table(name: str, *columns: SchemaItem) -> Table:
    return Table(name, metadata, *columns)


settings = _table("settings", Column("key", String, primary_key=True), Column("value", Text, nullable=False))

accounts = _table(
    "accounts",
    Column("contributor", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("public_key", LargeBinary, nullable=False, unique=True),
    Column("status", String, nullable=False),  # active | left | revoked
    Column("enrolled_at", Float, nullable=False),
)

invites = _table(
    "invites",
    Column("token_hash", String, primary_key=True),
    Column("note", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("used_by", String),
)

nodes = _table(
    "nodes",
    Column("node_id", Int64, primary_key=True, autoincrement=True),
    Column("contributor", String, nullable=False),
    Column("instance", String, nullable=False),
    Column("connected_until", Float, nullable=False, default=0.0),
    UniqueConstraint("contributor", "instance"),
)

objects = _table(
    "objects",
    Column("sha256", String, primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
)

uploads = _table(
    "uploads",
    Column("contributor", String, primary_key=True),
    Column("sha256", String, primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
)

# When an account first declared an object: before the first byte of it came.
commitments = _table(
    "commitments",
    Column("contributor", String, primary_key=True),
    Column("sha256", String, primary_key=True),
    Column("committed_at", Float, nullable=False),
)

# Who may read an object: its uploader, and everyone once a task or a version names it.
readers = _table(
    "readers",
    Column("sha256", String, primary_key=True),
    Column("contributor", String, primary_key=True),  # "*" is everyone enrolled
)

messages = _table(
    "messages",
    Column("message_id", String, primary_key=True),
    Column("node_id", Int64, nullable=False, index=True),
    Column("group_id", String, nullable=False),
    Column("message_type", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("ttl_seconds", Float, nullable=False),
    Column("fingerprint", String, nullable=False, index=True),  # makes pushes idempotent
    Column("content", LargeBinary, nullable=False),
    Column("state", String, nullable=False, index=True),  # queued | leased | replied | lost
    Column("lease_until", Float, nullable=False),
    Column("progress", String, nullable=False, default=""),
    Column("reply", LargeBinary),
    Column("receipt", Text),
    Column("replied_at", Float),
)

rounds = _table(
    "rounds",
    Column("server_round", Integer, primary_key=True),
    Column("state", String, nullable=False),
    Column("spec", Text),  # TaskSpec, from collecting on
    Column("base_height", Integer, nullable=False),
    Column("opened_at", Float, nullable=False),
    Column("deadline", Float),
    Column("merging", Text),  # JSON list of update ids, frozen when merging begins
    Column("reason", Text, nullable=False, default=""),
    Column("closed_at", Float),
)

round_tasks = _table(
    "round_tasks",
    Column("server_round", Integer, primary_key=True),
    Column("node_id", UInt64, primary_key=True),
    Column("message_id", String, nullable=False),
    Column("outcome", String, nullable=False, default=""),  # "" while open | replied | failed | lost
)

updates = _table(
    "updates",
    Column("update_id", String, primary_key=True),  # digest of the manifest
    Column("contributor", String, nullable=False),
    Column("server_round", Integer, nullable=False, index=True),
    Column("message_id", String, nullable=False),
    Column("manifest", Text, nullable=False),
    Column("signature", LargeBinary, nullable=False),
    Column("nonce", String, nullable=False),
    Column("delta_sha256", String, nullable=False),
    Column("delta_bytes", BigInteger, nullable=False),
    Column("norm", Float),
    Column("verdict", String, nullable=False),  # refused | admitted | merged | rejected | aborted
    Column("code", String, nullable=False, default=""),
    Column("reason", Text, nullable=False, default=""),
    Column("heldout_change", Float),
    Column("ledger_sequence", Integer, nullable=False),  # of the verdict at admission
    Column("received_at", Float, nullable=False),
    Column(
        "committed_at", Float
    ),  # when its digest was declared; null for an update without such a declaration
    UniqueConstraint("contributor", "nonce"),
    Index("ix_updates_contributor", "contributor", "server_round"),
)

versions = _table(
    "versions",
    Column("height", Integer, primary_key=True),
    Column("digest", String, nullable=False, unique=True),
    Column("server_round", Integer, nullable=False, unique=True),
    Column("soup_sha256", String, nullable=False),
    Column("soup_bytes", BigInteger, nullable=False),
    Column("residual", String),  # file of the server's error feedback, when the soup's codec loses something
    Column("heldout_before", Float),
    Column("heldout_after", Float),
    Column("num_updates", Integer, nullable=False),
    Column("committed_at", Float, nullable=False),
    Column("parent", Integer, nullable=False, default=_the_one_before),  # height; 0 is the base
)

credits = _table(
    "credits",
    Column("server_round", Integer, primary_key=True),
    Column("contributor", String, primary_key=True),
    Column("amount", Int64, nullable=False),
    Index("ix_credits_contributor", "contributor", "amount"),
)

# What an update of a committed round came to, in the eyes of the rewards.
contributions = _table(
    "contributions",
    Column("update_id", String, primary_key=True),
    Column("contributor", String, nullable=False, index=True),
    Column("server_round", Integer, nullable=False, index=True),
    Column("method", String, nullable=False),
    Column("score", Float),  # nats of held-out loss
    Column("error", Float),  # standard error of the score
    Column("similarity", Float),  # to the most similar other update of the round
    Column("reputation", Float, nullable=False),  # of the contributor, after the round
)

# Running scores of each contributor on the same held-out rows, as of each version with an update of theirs. Contributor
# "" is the whole run.
running_scores = _table(
    "running_scores",
    Column("contributor", String, primary_key=True),
    Column("heldout", String, primary_key=True),  # digest of the held-out rows
    Column("height", Integer, primary_key=True, autoincrement=False),
    Column("parts", Text, nullable=False),  # JSON list: nats by block of held-out rows
    Column("chance", Float, nullable=False),  # variance of what blind directions bring
    Column("earned", BigInteger, nullable=False),  # credits that were paid for it
)

reputations = _table(
    "reputations",
    Column("contributor", String, primary_key=True),
    Column("value", Float, nullable=False),  # as it was when version `height` was made
    Column("height", Integer, nullable=False),
)

# Secure aggregation: the stages of a round, and what was said in all but training.
secure_stages = _table(
    "secure_stages",
    Column("server_round", Integer, primary_key=True),
    Column("stage", String, primary_key=True),  # advertise | share | train | confirm | unmask
    Column("members", Text),  # JSON list of node ids; null for all that are connected
    Column("started_at", Float, nullable=False),
)

secure_messages = _table(
    "secure_messages",
    Column("server_round", Integer, primary_key=True),
    Column("stage", String, primary_key=True),
    Column("node_id", Int64, primary_key=True),
    Column("message_id", String, nullable=False),
    Column("outcome", String, nullable=False, default=""),  # "" while open | replied | failed | lost
    Column("reply", Text),
    Column("replied_at", Float),
)

ledger = _table(
    "ledger",
    Column("sequence", Integer, primary_key=True),
    Column("kind", String, nullable=False),
    Column("body", Text, nullable=False),
    Column("previous_hash", String, nullable=False),
    Column("hash", String, nullable=False, unique=True),
    Index("ix_ledger_kind", "kind", "sequence"),
)

# One signed head per size. The next head's root is computed from the frontier (gym_fed.trust.ledger.merkle).
ledger_heads = _table(
    "ledger_heads",
    Column("size", Integer, primary_key=True),
    Column("head", Text, nullable=False),
    Column("frontier", Text, nullable=False),
)

# Who is named in an entry: an index over the ledger, made from it and checked against it.
ledger_subjects = _table(
    "ledger_subjects",
    Column("sequence", Integer, primary_key=True),
    Column("contributor", String, primary_key=True, index=True),
)

# Credits for the use of versions, one row a contributor of a usage report.
royalties = _table(
    "royalties",
    Column("usage", String, primary_key=True),
    Column("contributor", String, primary_key=True, index=True),
    Column("amount", Int64, nullable=False),
    Column("recorded_at", Float, nullable=False),
)

# Every key that an account has had. An account's current key is also `accounts.public_key`.
account_keys = _table(
    "account_keys",
    Column("public_key", LargeBinary, primary_key=True),
    Column("contributor", String, nullable=False, index=True),
    Column("status", String, nullable=False),  # active | rotated | revoked
    Column("valid_from", Float, nullable=False),
    Column("valid_until", Float),  # when it was replaced or revoked
)

# One row for each refusal of a revoked key that the ledger records, so that refusals cannot flood it.
key_refusals = _table(
    "key_refusals",
    Column("contributor", String, primary_key=True),
    Column("server_round", Integer, primary_key=True),
)

transfers = _table(
    "transfers",
    Column("transfer", String, primary_key=True),  # digest of the statement
    Column("sender", String, nullable=False, index=True),
    Column("recipient", String, nullable=False, index=True),
    Column("amount", Int64, nullable=False),
    Column("nonce", String, nullable=False),
    Column("status", String, nullable=False, index=True),  # pending | settled | cancelled
    Column("hold_seconds", Float, nullable=False),  # as it was at the request
    Column("asked_at", Float, nullable=False),
    Column("closed_at", Float),
    UniqueConstraint("sender", "nonce"),
)

# Seeds of the noise, for the operator alone: one for each list of updates that a merge began with.
privacy_seeds = _table(
    "privacy_seeds",
    Column("server_round", Integer, primary_key=True),
    Column("merging", String, primary_key=True),  # digest of the list and of what it is merged by
    Column("seed", LargeBinary, nullable=False),
    Column("seed_sha256", String, nullable=False, unique=True),
)

# Seeds that draw the rows which a round's soup is evaluated on, for the operator alone until the round is over.
evaluation_seeds = _table(
    "evaluation_seeds",
    Column("server_round", Integer, primary_key=True),
    Column("seed", LargeBinary, nullable=False),
)

# What every round whose noised sum was looked at cost each of its contributors.
privacy_spending = _table(
    "privacy_spending",
    Column("server_round", Integer, primary_key=True),
    Column("contributor", String, primary_key=True),
    Column("mechanism", String, nullable=False),
    Column("noise_multiplier", Float, nullable=False),
    Index("ix_privacy_spending_contributor", "contributor", "mechanism", "noise_multiplier"),
)

# Variants that the hub keeps for their owners. A removed one stays as a row without its document, so that what was
# signed before cannot come back.
variants = _table(
    "variants",
    Column("owner", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column(
        "slot", String, nullable=False, unique=True
    ),  # names it in the ledger, which does not hold its name
    Column("revision", BigInteger, nullable=False),
    Column("document", Text),  # what the owner signed; null when it was removed
    Column("document_sha256", String, nullable=False),
    Column("public_key", LargeBinary, nullable=False),  # that signed
    Column("delta_sha256", String, nullable=False, index=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("base_digest", String, nullable=False),
    Column("ledger_sequence", Integer, nullable=False),
    Column("put_at", Float, nullable=False),
)

variant_readers = _table(
    "variant_readers",
    Column("owner", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("reader", String, primary_key=True, index=True),  # "*" is everyone enrolled
)

# What the coordinator took down: its owner puts it neither under this name nor as these bytes, until it is allowed.
variant_takedowns = _table(
    "variant_takedowns",
    Column("owner", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("delta_sha256", String, primary_key=True),
    Column("reason", Text, nullable=False),
)

# Digests of the tensors of versions that were written as model folders: variants can be made on such a folder.
published = _table(
    "published", Column("digest", String, primary_key=True), Column("height", Integer, nullable=False)
)
