"""The ledger: append-only, hash-chained, signed. Everything that was decided, in the order it was decided.

``hash = sha256(canonical{sequence, kind, body, previous_hash})``, signed by the hub's ledger key over
``{"ledger": hash}``. An entry is written in the same transaction as what it tells of.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from gym_fed.errors import ErrorCode, GymError
from gym_fed.identity.canonical import canonical_digest, canonical_json
from gym_fed.identity.keys import SigningKey, verify_signature
from gym_server.store.database import Database
from gym_server.store.tables import credits, ledger, updates, versions

GENESIS_HASH = "0" * 64


@dataclass(frozen=True)
class Entry:
    """One line of the ledger."""

    sequence: int
    kind: str
    body: dict[str, Any]
    previous_hash: str
    hash: str
    signature: bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "sequence": self.sequence,
            "kind": self.kind,
            "body": self.body,
            "previous_hash": self.previous_hash,
            "hash": self.hash,
            "signature": self.signature.hex(),
        }


class Ledger:
    """Appends inside the caller's transaction; reads and verifies on its own."""

    def __init__(self, database: Database, key: SigningKey) -> None:
        self._database = database
        self._key = key

    def append(self, tx: Connection, kind: str, body: dict[str, Any]) -> Entry:
        """Add an entry; it becomes part of the ledger when ``tx`` commits."""
        last = tx.execute(
            select(ledger.c.sequence, ledger.c.hash).order_by(ledger.c.sequence.desc()).limit(1)
        ).first()
        sequence, previous = (last.sequence + 1, last.hash) if last else (1, GENESIS_HASH)
        body = {**body, "at": int(time.time())}
        digest = _hash(sequence, kind, body, previous)
        entry = Entry(sequence, kind, body, previous, digest, self._key.sign({"ledger": digest}))
        tx.execute(
            ledger.insert().values(
                sequence=sequence,
                kind=kind,
                body=canonical_json(body).decode(),
                previous_hash=previous,
                hash=digest,
                signature=entry.signature,
            )
        )
        return entry

    def entries(self, from_sequence: int = 1) -> Iterator[Entry]:
        """All entries from a sequence number on, read in batches."""
        while True:
            with self._database.reading() as tx:
                rows = tx.execute(
                    select(ledger)
                    .where(ledger.c.sequence >= from_sequence)
                    .order_by(ledger.c.sequence)
                    .limit(500)
                ).all()
            for row in rows:
                body = json.loads(row.body)
                yield Entry(row.sequence, row.kind, body, row.previous_hash, row.hash, row.signature)
            if not rows:
                return
            from_sequence = rows[-1].sequence + 1

    def verify(self) -> dict[str, int]:
        """Check the chain, every signature, and that versions, verdicts and credits agree with it.

        Returns:
            How many entries, versions, updates and credits were compared.

        Raises:
            GymError: ``STATE_CORRUPT`` naming the first entry or row that does not fit.
        """
        told_versions: dict[int, dict[str, Any]] = {}
        told_credits: dict[tuple[int, str], int] = {}
        told_updates: dict[str, str] = {}
        previous, count = GENESIS_HASH, 0
        for entry in self.entries():
            count += 1
            verify_entry(entry, count, previous, self._key.public_key)
            previous = entry.hash
            if entry.kind == "version":
                told_versions[entry.body["height"]] = entry.body
            elif entry.kind == "credit":
                told_credits[entry.body["server_round"], entry.body["contributor"]] = entry.body["amount"]
            elif entry.kind == "verdict" and entry.body.get("update"):
                told_updates[entry.body["update"]] = entry.body["verdict"]
        with self._database.reading() as tx:
            for row in tx.execute(select(versions)):
                told = told_versions.pop(row.height, None)
                if told is None or (told["digest"], told["soup"]) != (row.digest, row.soup_sha256):
                    raise _corrupt(f"version {row.height} is not what the ledger says")
            for row in tx.execute(select(credits)):
                if told_credits.pop((row.server_round, row.contributor), None) != row.amount:
                    raise _corrupt(
                        f"credit of {row.contributor} in round {row.server_round} is not in the ledger"
                    )
            for row in tx.execute(select(updates.c.update_id, updates.c.verdict)):
                if told_updates.pop(row.update_id, None) != row.verdict:
                    raise _corrupt(f"verdict on update {row.update_id[:12]} is not what the ledger says")
            totals = {
                "entries": count,
                "versions": len(tx.execute(select(versions.c.height)).all()),
                "updates": len(tx.execute(select(updates.c.update_id)).all()),
                "credits": len(tx.execute(select(credits.c.amount)).all()),
            }
        if told_versions or told_credits or told_updates:
            raise _corrupt("the ledger tells of versions, credits or updates that the database lacks")
        return totals


def verify_entry(entry: Entry, sequence: int, previous_hash: str, public_key: bytes) -> None:
    """Check one entry against its predecessor; usable by anyone who holds the hub's public key.

    Raises:
        GymError: ``STATE_CORRUPT`` naming the entry.
    """
    if entry.sequence != sequence or entry.previous_hash != previous_hash:
        raise _corrupt(f"entry {entry.sequence} does not follow entry {sequence - 1}")
    if entry.hash != _hash(entry.sequence, entry.kind, entry.body, entry.previous_hash):
        raise _corrupt(
            f"entry {entry.sequence} ({entry.kind}) was altered: its hash does not match its content"
        )
    try:
        verify_signature(public_key, {"ledger": entry.hash}, entry.signature)
    except GymError as error:
        raise _corrupt(f"entry {entry.sequence} ({entry.kind}) is not signed by the hub's key") from error


def _hash(sequence: int, kind: str, body: dict[str, Any], previous_hash: str) -> str:
    return canonical_digest(
        {"sequence": sequence, "kind": kind, "body": body, "previous_hash": previous_hash}
    )


def _corrupt(message: str) -> GymError:
    return GymError(ErrorCode.STATE_CORRUPT, f"ledger: {message}", "restore the hub's folder from a backup")
