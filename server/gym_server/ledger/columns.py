"""Compare every column of updates, versions and rounds with the ledger, and contributors' signatures with their keys.

Fields that an entry has in clear text are compared directly. Other columns are covered by a digest in the entry:
``record`` of the verdict at admission, and ``round`` of the entry that ends a round. ``record`` covers the manifest,
whose nonce cannot be guessed, so the digest reveals nothing about a private round. Entries older than these digests are
compared only by their clear-text fields.

``UNCOVERED`` lists every column that the ledger does not cover, with the reason.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, select

from gym_fed.core.errors import GymError
from gym_fed.core.json_files import canonical_digest
from gym_fed.trust.identity.history import History
from gym_fed.trust.identity.keys import verify_signature
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_fed.trust.identity.variant import SignedVariant
from gym_fed.trust.ledger.entries import SEALED, Entry, corrupt, seal
from gym_server.ledger.times import AT_ADMISSION, BUCKET, SLACK_SECONDS, near
from gym_server.store.tables import (
    accounts,
    contributions,
    privacy_seeds,
    rounds,
    updates,
    variants,
    versions,
)

_ENDS = {"version": "committed", "aborted": "aborted"}
_OVER = tuple(_ENDS.values())

_LOCAL = "internal to the hub; no decision depends on it"
_QUEUE = "the queue of messages, which ended rounds do not need"
UNCOVERED: dict[str, str] = {
    "settings": "internal to the hub; every manifest has the base's digest",
    "invites": "secret tokens of the coordinator",
    "nodes": _LOCAL,
    "objects": "gym-server check compares each object with its sha256",
    "uploads": "uploads in progress",
    "commitments": "signed statements, which their contributors keep",
    "updates.committed_at": "part of the signed statement in commitments",
    "readers": "read permissions are not in the ledger",
    "messages": _QUEUE,
    "round_tasks": _QUEUE,
    "secure_stages": _QUEUE,
    "secure_messages": _QUEUE,
    "key_refusals": "a counter that keeps refusals from flooding the ledger",
    "variant_readers": "read permissions are not in the ledger",
    "variant_takedowns": "names of variants are not in the ledger",
    "published": "exported folders, identified by the digest of their tensors",
    "privacy_seeds.server_round": "a wrong round, list or seed fails `gym-server ledger replay`",
    "privacy_seeds.merging": "a wrong round, list or seed fails `gym-server ledger replay`",
}
"""Tables, and columns as ``table.column``, that `ledger verify` does not compare, each with the reason."""


def record_of(row: Any) -> str:
    """Return the digest of the columns that are final at admission, from a row of ``updates`` or its values."""
    norm = None if row["norm"] is None else float(row["norm"]).hex()
    recorded = {"manifest": row["manifest"], "signature": bytes(row["signature"]).hex(), "norm": norm}
    recorded |= {key: row[key] for key in ("message_id", "server_round", "code")}
    return canonical_digest({"gym-update-record-1": recorded})


def round_of(row: Any) -> str:
    """Return the digest of the row of an ended round."""
    times = {key: None if row[key] is None else float(row[key]).hex() for key in ("opened_at", "deadline")}
    recorded = {
        key: row[key] for key in ("server_round", "state", "spec", "base_height", "merging", "reason")
    }
    return canonical_digest({"gym-round-1": {**recorded, **times}})


@dataclass(frozen=True)
class _RecordedEntry:
    sequence: int
    kind: str
    body: dict[str, Any]

    @property
    def at(self) -> tuple[int, int]:
        return self.body["at"], self.body.get(BUCKET, 0)


@dataclass
class ColumnChecks:
    """Collects a ledger's entries with ``add``, and compares the columns with them."""

    _admissions: dict[int, _RecordedEntry] = field(default_factory=dict)
    _last: dict[str, _RecordedEntry] = field(default_factory=dict)
    _ends: dict[int, _RecordedEntry] = field(default_factory=dict)
    _variants: dict[int, _RecordedEntry] = field(default_factory=dict)
    _methods: dict[str, tuple[str, int]] = field(default_factory=dict)
    _seeds: set[str] = field(default_factory=set)

    def add(self, entry: Entry, body: dict[str, Any]) -> None:
        """Add the next entry."""
        recorded = _RecordedEntry(entry.sequence, entry.kind, body)
        if entry.kind == SEALED or (entry.kind == "verdict" and body.get("update")):
            if entry.kind == SEALED or body["verdict"] in AT_ADMISSION:
                self._admissions[entry.sequence] = recorded
            if entry.kind != SEALED:
                self._last[body["update"]] = recorded
        elif entry.kind in _ENDS:
            self._ends[body["server_round"]] = recorded
            if "privacy" in body:
                self._seeds.add(body["privacy"]["seed_sha256"])
        elif entry.kind in ("variant", "variant-removed"):
            self._variants[entry.sequence] = recorded
        elif entry.kind == "contribution":
            self._methods |= dict.fromkeys(body["scores"], (body["method"], body["server_round"]))

    def compare(self, tx: Connection, history: History) -> None:
        """Raise ``STATE_CORRUPT`` naming the first row and column that differ from the ledger."""
        self._updates(tx, history)
        self._versions(tx)
        self._rounds(tx)
        self._others(tx, history)

    # ---- updates ----

    def _updates(self, tx: Connection, history: History) -> None:
        keys: dict[str, list[tuple[bytes, float, float]]] = {}
        for key, recorded in history.keys.items():
            until = float("inf") if recorded.until is None else recorded.until
            keys.setdefault(recorded.contributor, []).append((bytes.fromhex(key), recorded.since, until))
        for row in tx.execute(select(updates)).mappings():
            where = f"updates: {row['update_id'][:12]}"
            signed = _signed(row)
            if signed is None:
                raise corrupt(f"{where}: its manifest does not hash to its id")
            admission = self._admissions.get(row["ledger_sequence"])
            if admission is None or (
                admission.kind != SEALED and admission.body["update"] != row["update_id"]
            ):
                raise corrupt(f"{where}: entry {row['ledger_sequence']} is not its verdict at admission")
            for column in ("contributor", "nonce", "delta_sha256", "delta_bytes"):
                if row[column] != signed[column]:
                    raise corrupt(f"{where}: {column} does not match its manifest")
            if admission.body["server_round"] != row["server_round"]:
                raise corrupt(f"{where}: server_round does not match its verdict")
            # a continuous round accepts updates for tasks that earlier rounds handed out
            if row["verdict"] != "refused" and (
                signed["server_round"] > row["server_round"] or signed["task"] != row["message_id"]
            ):
                raise corrupt(f"{where}: server_round or message_id does not match its manifest")
            if "record" in admission.body and admission.body["record"] != record_of(row):
                raise corrupt(
                    f"{where}: manifest, signature, norm, message or code does not match its verdict"
                )
            if not near(row["received_at"], *admission.at):
                raise corrupt(f"{where}: received_at differs from its verdict's time")
            self._check_reason(where, row, admission)
            self._check_signer(where, row, signed, admission, keys.get(row["contributor"], []))

    def _check_reason(self, where: str, row: Any, admission: _RecordedEntry) -> None:
        last = self._last.get(row["update_id"])
        recorded = admission if last is None else last
        reason = row["reason"]
        if recorded.kind == SEALED:
            return  # the seal covers verdict, code and reason (``checks``)
        if "seal" in recorded.body:
            if recorded.body["seal"] != seal(row["manifest"], row["verdict"], row["code"], reason):
                raise corrupt(f"{where}: its reason does not match its verdict")
        elif BUCKET not in recorded.body:
            expected = f"{row['code']}: {reason}" if row["verdict"] == "refused" else reason
            if recorded.body["reason"] != expected or (row["code"] != "" and row["verdict"] != "refused"):
                raise corrupt(f"{where}: its reason or code does not match its verdict")
        if recorded.body.get("heldout_change") != row["heldout_change"] and "record" in admission.body:
            raise corrupt(f"{where}: its heldout_change does not match its verdict")

    def _check_signer(
        self,
        where: str,
        row: Any,
        signed: dict[str, Any],
        admission: _RecordedEntry,
        keys: list[tuple[bytes, float, float]],
    ) -> None:
        """Check that one of the keys that the account had at admission signed the update."""
        at, bucket = admission.at
        for key, since, until in keys:
            if since - SLACK_SECONDS <= at + bucket and at - bucket - SLACK_SECONDS <= until:
                try:
                    verify_signature(key, signed, row["signature"])
                except GymError:
                    continue
                return
        raise corrupt(f"{where}: no key that {row['contributor']} had at the time signed its manifest")

    # ---- versions and rounds ----

    def _versions(self, tx: Connection) -> None:
        digests = {row.height: row.digest for row in tx.execute(select(versions.c.height, versions.c.digest))}
        for row in tx.execute(select(versions)).mappings():
            recorded = self._ends[row["server_round"]]  # exists: checked before
            body, where = recorded.body, f"versions: {row['height']}"
            if body.get("soup_bytes", row["soup_bytes"]) != row["soup_bytes"]:
                raise corrupt(
                    f"{where}: soup_bytes is {row['soup_bytes']}, but the ledger says {body['soup_bytes']}"
                )
            parent = body.get("parent")
            if row["parent"] != row["height"] - 1 if parent is None else not _is_parent(row, parent, digests):
                raise corrupt(f"{where}: its parent is {row['parent']}, which differs from the ledger")
            merged = body.get("merged")
            if merged is not None and len(merged) != row["num_updates"]:
                raise corrupt(
                    f"{where}: num_updates is {row['num_updates']}, but the ledger has {len(merged)}"
                )
            state = body.get("state")
            residual = f"round-{row['server_round']}.safetensors"
            if state is not None and row["residual"] != (residual if "residual" in state else None):
                raise corrupt(f"{where}: its residual is {row['residual']}, which differs from the ledger")
            if not near(row["committed_at"], *recorded.at):
                raise corrupt(f"{where}: committed_at differs from the ledger")

    def _rounds(self, tx: Connection) -> None:
        missing = dict(self._ends)
        for row in tx.execute(select(rounds)).mappings():
            recorded = missing.pop(row["server_round"], None)
            where = f"rounds: {row['server_round']}"
            if recorded is None:
                if row["state"] in _OVER:
                    raise corrupt(f"{where} is {row['state']}, but the ledger does not say so")
                continue
            if row["state"] != _ENDS[recorded.kind]:
                raise corrupt(f"{where} is {row['state']}, but the ledger says {_ENDS[recorded.kind]}")
            if row["reason"] != recorded.body.get("reason", ""):
                raise corrupt(f"{where}: its reason differs from the ledger")
            if "updates" in recorded.body and row["merging"] != json.dumps(recorded.body["updates"]):
                raise corrupt(f"{where}: merging differs from the list in the ledger")
            if "round" in recorded.body and recorded.body["round"] != round_of(row):
                raise corrupt(f"{where}: spec, merging or another column has changed since its end")
        if missing:
            raise corrupt(
                f"rounds: {next(iter(missing))} ended according to the ledger, but is not in the database"
            )

    # ---- the rest ----

    def _others(self, tx: Connection, history: History) -> None:
        first: dict[str, int] = {}
        for recorded in history.keys.values():
            first[recorded.contributor] = min(recorded.since, first.get(recorded.contributor, recorded.since))
        for row in tx.execute(select(accounts.c.contributor, accounts.c.enrolled_at)):
            if not near(row.enrolled_at, first.get(row.contributor)):
                raise corrupt(
                    f"accounts: {row.contributor} enrolled at a different time than the ledger says"
                )
        measured = select(contributions.c.update_id, contributions.c.method, contributions.c.server_round)
        for update_id, method, server_round in tx.execute(measured):
            if self._methods.get(update_id) != (method, server_round):
                raise corrupt(f"contributions: {update_id[:12]} was measured in a different way or round")
        for row in tx.execute(select(privacy_seeds.c.seed, privacy_seeds.c.seed_sha256)):
            if hashlib.sha256(row.seed).hexdigest() != row.seed_sha256:
                raise corrupt(f"privacy_seeds: {row.seed_sha256[:12]} is not the hash of its seed")
            self._seeds.discard(row.seed_sha256)
        if self._seeds:
            raise corrupt(
                f"privacy_seeds: {next(iter(self._seeds))[:12]} is in the ledger but not in the database"
            )
        for variant in tx.execute(select(variants)).mappings():
            self._check_variant(variant)

    def _check_variant(self, row: Any) -> None:
        where = f"variants: {row['slot']}"
        recorded = self._variants.get(row["ledger_sequence"])
        if recorded is None or (recorded.body["contributor"], recorded.body["variant"]) != (
            row["owner"],
            row["slot"],
        ):
            raise corrupt(f"{where}: entry {row['ledger_sequence']} is not about this variant")
        if row["document_sha256"] != recorded.body["document"] or not near(row["put_at"], *recorded.at):
            raise corrupt(f"{where}: its digest or time differs from the ledger")
        if row["document"] is None:
            return  # a removed variant has only the columns that the entry names
        try:
            signed = SignedVariant.parse(row["document"])
            signed.verify()
        except GymError as error:
            raise corrupt(f"{where}: {error.message}") from error
        own = signed.manifest
        signed_by_owner = (own.variant, own.owner, own.delta_sha256, own.size_bytes, own.base_digest)
        columns = ("name", "owner", "delta_sha256", "size_bytes", "base_digest")
        if (
            signed_by_owner != tuple(row[column] for column in columns)
            or signed.public_key != row["public_key"]
        ):
            raise corrupt(f"{where}: it differs from what its owner signed")


def _is_parent(row: Any, parent: str, digests: dict[int, str]) -> bool:
    """Return True if a version's row has the parent that its entry names; only the base has no row."""
    if row["parent"] == 0:
        return parent not in digests.values()
    return digests.get(row["parent"]) == parent


def _signed(row: Any) -> dict[str, Any] | None:
    """Return the signed manifest if it hashes to the update's id, else None."""
    try:
        found = json.loads(row["manifest"])
        if isinstance(found, dict) and canonical_digest(found) == row["update_id"]:
            return UpdateManifest.model_validate(found).model_dump(mode="json")
        manifest = UpdateManifest.parse(row["manifest"])  # fills in default fields
    except (ValueError, TypeError, RecursionError, GymError):
        return None
    return manifest.model_dump(mode="json") if manifest.digest == row["update_id"] else None
