"""The tables of the hub's database. Times are Unix seconds; digests are lower-case hex unless prefixed ``sha256:``."""

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
"""Column type of 64-bit row ids; SQLite assigns row ids by itself only if the column type is INTEGER."""


class UInt64(TypeDecorator[int]):
    """An unsigned 64-bit integer in a signed column (two's complement), since stock SuperLink node ids use all bits."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        return value - 2**64 if value is not None and value >= 2**63 else value

    def process_result_value(self, value: int | None, dialect: Dialect) -> int | None:
        return value + 2**64 if value is not None and value < 0 else value


def _the_one_before(row: DefaultExecutionContext) -> int:
    """Return the default parent of a version: the height below its own."""
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

# The time at which an account first declared an object, before its first byte arrived.
commitments = _table(
    "commitments",
    Column("contributor", String, primary_key=True),
    Column("sha256", String, primary_key=True),
    Column("committed_at", Float, nullable=False),
)

# Accounts that may read an object: its uploader, and everyone once a task or a version refers to it.
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
    Column("spec", Text),  # TaskSpec, from state collecting on
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
    Column("ledger_sequence", Integer, nullable=False),  # entry of the verdict at admission
    Column("received_at", Float, nullable=False),
    Column("committed_at", Float),  # time at which its digest was declared; null if it was not
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
    Column("residual", String),  # file of the server's error feedback, if the soup's codec is lossy
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

# Result of each update of a committed round, for scores and reputations.
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
    Column("heldout", String, primary_key=True),  # digest of the held-out rows and of the prices
    Column("height", Integer, primary_key=True, autoincrement=False),
    Column("parts", Text, nullable=False),  # JSON list: nats by block of held-out rows
    Column("chance", Float, nullable=False),  # variance of the score of random directions
    Column("earned", BigInteger, nullable=False),  # credits paid for it
)

# Provisional pay of a contributor from before it could be compared with others, and its debt from that pay.
settlements = _table(
    "settlements",
    Column("contributor", String, primary_key=True),
    Column("provisional", BigInteger),  # credits; null once compared
    Column("owed", BigInteger, nullable=False),  # credits
)

reputations = _table(
    "reputations",
    Column("contributor", String, primary_key=True),
    Column("value", Float, nullable=False),  # at the creation of version `height`
    Column("height", Integer, nullable=False),
)

# Secure aggregation: the stages of a round, and the replies to all of them except training.
secure_stages = _table(
    "secure_stages",
    Column("server_round", Integer, primary_key=True),
    Column("stage", String, primary_key=True),  # advertise | share | train | confirm | unmask
    Column("members", Text),  # JSON list of node ids; null for all connected nodes
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

# Accounts named in each entry: an index that is built from the ledger and checked against it.
ledger_subjects = _table(
    "ledger_subjects",
    Column("sequence", Integer, primary_key=True),
    Column("contributor", String, primary_key=True, index=True),
)

# Credits for the use of versions, one row per contributor and usage report.
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
    Column("valid_until", Float),  # time at which it was replaced or revoked
)

# One row for each recorded refusal of a revoked key, so that repeated refusals do not flood the ledger.
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
    Column("hold_seconds", Float, nullable=False),  # hold period at the time of the request
    Column("asked_at", Float, nullable=False),
    Column("closed_at", Float),
    UniqueConstraint("sender", "nonce"),
)

# Noise seeds, visible only to the operator, one per list of updates for which a merge began.
privacy_seeds = _table(
    "privacy_seeds",
    Column("server_round", Integer, primary_key=True),
    Column("merging", String, primary_key=True),  # digest of the list and of the merge settings
    Column("seed", LargeBinary, nullable=False),
    Column("seed_sha256", String, nullable=False, unique=True),
)

# Seeds that select the rows on which a round's soup is evaluated; secret until the round is over.
evaluation_seeds = _table(
    "evaluation_seeds",
    Column("server_round", Integer, primary_key=True),
    Column("seed", LargeBinary, nullable=False),
)

# Privacy costs by round and contributor, for rounds whose noised sum was revealed.
privacy_spending = _table(
    "privacy_spending",
    Column("server_round", Integer, primary_key=True),
    Column("contributor", String, primary_key=True),
    Column("mechanism", String, nullable=False),
    Column("noise_multiplier", Float, nullable=False),
    Index("ix_privacy_spending_contributor", "contributor", "mechanism", "noise_multiplier"),
)

# Variants that the hub stores for their owners. The row of a removed variant is kept without its document, so that
# documents signed earlier cannot be replayed.
variants = _table(
    "variants",
    Column("owner", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column(
        "slot", String, nullable=False, unique=True
    ),  # id of the variant in the ledger, which does not contain its name
    Column("revision", BigInteger, nullable=False),
    Column("document", Text),  # document signed by the owner; null after removal
    Column("document_sha256", String, nullable=False),
    Column("public_key", LargeBinary, nullable=False),  # key that signed the document
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

# Variants that the coordinator took down; the owner cannot upload this name or these bytes until the row is deleted.
variant_takedowns = _table(
    "variant_takedowns",
    Column("owner", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("delta_sha256", String, primary_key=True),
    Column("reason", Text, nullable=False),
)

# Digests of the tensors of exported versions, so that variants trained on such a model folder are recognised.
published = _table(
    "published", Column("digest", String, primary_key=True), Column("height", Integer, nullable=False)
)
