"""A hub's ledger: how long anyone needs to verify all of it; the peer signs every entry.

The rounds have ten contributors; a head is signed for every receipt and at the end of the round. The peer is an earlier
form of the ledger: the same entries from the same database, each with an Ed25519 signature over its own hash.
"""

from __future__ import annotations

import json
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

from _peer import clocked
from _report import Report, options
from gym_server.ledger.chain import Ledger
from gym_server.ledger.columns import record_of, round_of
from gym_server.ledger.rows import entries_from, entry_of
from gym_server.store.database import Database
from gym_server.store.tables import account_keys, accounts, credits, rounds, updates, versions
from sqlalchemy import Connection, insert

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.config.hub.task import next_digest
from gym_fed.core.json_files import canonical_digest
from gym_fed.trust.identity.keys import SigningKey, verify_signature
from gym_fed.trust.identity.manifest import UpdateManifest, new_nonce
from gym_fed.trust.ledger.entries import Chain

KEYS = [SigningKey.generate() for _ in range(10)]
CONTRIBUTORS = [key.contributor for key in KEYS]
BEGAN = time.time()
REPEATS = 3


def main() -> None:
    arguments = options(__doc__).parse_args()
    wanted = 2_000 if arguments.quick else 10_000
    report = Report("ledger", peer="one Ed25519 signature an entry")
    with tempfile.TemporaryDirectory() as folder:
        database, key = Database.open("sqlite:///hub.db", Path(folder)), SigningKey.generate()
        ledger = Ledger(database, key)
        size = fill(database, ledger, wanted)
        signatures = [key.sign({"ledger": entry.hash}) for entry in ledger.entries()]
        found = ledger.verify()
        peer = partial(one_by_one, database, key.public_key, signatures)
        ours, theirs = map(min, clocked({"ours": ledger.verify, "peer": peer}, REPEATS).values())
        report.compare(f"verify {size} entries from SQLite", ours, theirs, unit="s")
        report.figure("heads", found["heads"])
        database.close()
    if not arguments.quick:
        report.aim("10,000 entries and their heads, from SQLite (s)", ours, 1.0)
    report.finish(arguments)


def fill(database: Database, ledger: Ledger, wanted: int) -> int:
    """Add rounds until there are at least ``wanted`` entries; return their number."""
    with database.transaction() as tx:
        for key in KEYS:
            enrol(tx, ledger, key)
    size = server_round = 0
    while size < wanted:
        server_round += 1
        rows = [update_row(number, server_round) for number in range(len(KEYS))]
        for row in rows:
            with database.transaction() as tx:
                body = {**verdict(row, "admitted"), "delta": row["delta_sha256"], "record": record_of(row)}
                row["ledger_sequence"] = ledger.append(tx, "verdict", body).sequence
                ledger.sign_head(tx)
        with database.transaction() as tx:
            size = finish_round(tx, ledger, server_round, rows)
    return size


def enrol(tx: Connection, ledger: Ledger, key: SigningKey) -> None:
    who = {"contributor": key.contributor, "public_key": key.public_key}
    tx.execute(insert(accounts).values(**who, name="n", status="active", enrolled_at=BEGAN))
    tx.execute(insert(account_keys).values(**who, status="active", valid_from=BEGAN))
    body = {"contributor": key.contributor, "name": "n", "public_key": key.public_key.hex()}
    ledger.append(tx, "enrolled", body)


def update_row(number: int, server_round: int) -> dict[str, Any]:
    """Return the row of a signed update."""
    task, now = f"task-{server_round}-{number}", int(time.time())
    manifest = UpdateManifest(
        contributor=CONTRIBUTORS[number],
        server="s" + "0" * 16,
        task=task,
        server_round=server_round,
        base_digest="sha256:" + "0" * 64,
        delta_sha256=canonical_digest(task),
        delta_bytes=1000,
        nonce=new_nonce(),
        issued_at_seconds=now,
        expires_at_seconds=now + 86_400,
        num_examples=10,
        metrics={"train_loss": 1.5, "first_loss": 2.5, "num_steps": 50.0},
    )
    said = ("contributor", "server_round", "nonce", "delta_sha256", "delta_bytes")
    row = {name: getattr(manifest, name) for name in said}
    row |= {"update_id": manifest.digest, "message_id": task, "manifest": manifest.model_dump_json()}
    row |= {"signature": manifest.sign(KEYS[number]), "norm": 1.25, "code": "", "reason": ""}
    return {**row, "received_at": time.time()}


def finish_round(tx: Connection, ledger: Ledger, server_round: int, sent: list[dict[str, Any]]) -> int:
    """Write the verdicts, version and credits of a round with their ledger entries, and sign a head."""
    for number, row in enumerate(sent):
        ledger.append(tx, "verdict", verdict(row, "merged"))
        tx.execute(insert(updates).values(**row, verdict="merged"))
        credit = {"server_round": server_round, "contributor": row["contributor"], "amount": 100 + number}
        ledger.append(tx, "credit", credit)
        tx.execute(insert(credits).values(**credit))
    ids = [row["update_id"] for row in sent]
    version: dict[str, Any] = {"height": server_round, "server_round": server_round}
    version["digest"] = digest_of(server_round)
    losses = {"heldout_before": 2.0 / server_round, "heldout_after": 2.0 / (server_round + 1)}
    ended = {
        "server_round": server_round,
        "state": "committed",
        "spec": "{}",
        "base_height": server_round - 1,
    }
    ended |= {"opened_at": time.time(), "deadline": None, "merging": json.dumps(ids), "reason": ""}
    body: dict[str, Any] = {
        "parent": digest_of(server_round - 1),
        "soup": canonical_digest(server_round),
        "recipe": SoupRecipe().model_dump(mode="json"),
        "merged": ids,
        "updates": ids,
    }
    body |= {"soup_bytes": 1, "state": {}, "round": round_of(ended)}
    last = ledger.append(tx, "version", {**version, **losses, **body})
    tx.execute(insert(rounds).values(**ended, closed_at=time.time()))
    row = {
        "soup_sha256": canonical_digest(server_round),
        "soup_bytes": 1,
        "num_updates": len(ids),
        "committed_at": time.time(),
    }
    tx.execute(insert(versions).values(**version, **losses, **row))
    ledger.sign_head(tx)
    return last.sequence


@cache
def digest_of(height: int) -> str:
    """Return the digest of the version at a height, which the round of that number creates."""
    if height == 0:
        return "sha256:" + "0" * 64
    return next_digest(digest_of(height - 1), canonical_digest(height), height)


def verdict(row: dict[str, Any], word: str) -> dict[str, Any]:
    body = {"update": row["update_id"], "contributor": row["contributor"], "verdict": word, "reason": ""}
    return {**body, "server_round": row["server_round"]}


def one_by_one(database: Database, public_key: bytes, signatures: list[bytes]) -> None:
    """Verify the peer's form of the ledger: the chain, and a signature per entry."""
    chain = Chain()
    with database.reading() as tx:
        for row, signature in zip(tx.execute(entries_from(1)), signatures, strict=True):
            chain.add(entry_of(row))
            verify_signature(public_key, {"ledger": row.hash}, signature)


if __name__ == "__main__":
    main()
