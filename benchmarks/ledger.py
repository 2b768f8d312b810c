"""A hub's ledger: how long anyone needs to verify all of it, and one entry of it; the peer signs every entry.

The rounds are of ten contributors: a head is signed for every receipt and at the round's end. The peer is what the
ledger was before: the same entries from the same database, each with an Ed25519 signature over its own hash.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _report import Report, options
from gym_server.ledger import Ledger
from gym_server.ledger.chain import entries_from, entry_of
from gym_server.store.database import Database
from gym_server.store.tables import credits, updates, versions
from sqlalchemy import Connection, insert

from gym_fed.config.soup import SoupRecipe
from gym_fed.identity.canonical import canonical_digest
from gym_fed.identity.keys import SigningKey, contributor_id, verify_signature
from gym_fed.ledger import Chain, verify_file
from gym_fed.ledger.export import first_line, lines

CONTRIBUTORS = [contributor_id(bytes([number]) * 32) for number in range(10)]
REPEATS = 3


def main() -> None:
    """Fill a ledger, and verify it in both ways."""
    arguments = options(__doc__.splitlines()[0]).parse_args()
    wanted = 2_000 if arguments.quick else 10_000
    report = Report("ledger", peer="one Ed25519 signature an entry")
    with tempfile.TemporaryDirectory() as folder:
        database, key = Database.open("sqlite:///hub.db", Path(folder)), SigningKey.generate()
        ledger = Ledger(database, key)
        began = time.process_time()
        size = fill(database, ledger, wanted)
        writing = time.process_time() - began
        signatures = [key.sign({"ledger": entry.hash}) for entry in ledger.entries()]
        found = ledger.verify()
        ours = best(ledger.verify)
        theirs = best(lambda: one_by_one(database, key.public_key, signatures))
        report.compare(f"verify {size} entries from SQLite", ours, theirs, unit="s")
        file = Path(folder) / "ledger.jsonl"
        told = [first_line(key.public_key), *lines(ledger.entries(), ledger.heads())]
        file.write_text("".join(line + "\n" for line in told), encoding="utf-8")
        report.compare(f"verify {size} entries of an export", best(lambda: verify_file(file)), unit="s")
        ledger.proof(1)  # builds the tree
        report.compare("make and verify one proof", best(lambda: one_proof(ledger, size // 3)), unit="s")
        proof_bytes = len(json.dumps(ledger.proof(size // 3).to_dict()))
        report.compare("bytes of a proof, of the whole ledger", proof_bytes, file.stat().st_size, unit="B")
        report.compare("write an entry, its rows and a share of the heads", writing / size, unit="s")
        report.figure("heads", found["heads"])
        database.close()
    if not arguments.quick:
        report.aim("10,000 entries and their heads, from SQLite (s)", figure=ours, aim=1.0, better="lower")
    report.finish(arguments)


def fill(database: Database, ledger: Ledger, wanted: int) -> int:
    """Rounds until there are as many entries as wanted; returns how many there are."""
    size = server_round = 0
    while size < wanted:
        server_round += 1
        ids = [canonical_digest([server_round, who]) for who in CONTRIBUTORS]
        for who, update in zip(CONTRIBUTORS, ids, strict=True):
            with database.transaction() as tx:
                ledger.append(tx, "verdict", verdict(update, who, server_round, "admitted"))
                ledger.sign_head(tx)
        with database.transaction() as tx:
            size = finish_round(tx, ledger, server_round, ids)
    return size


def finish_round(tx: Connection, ledger: Ledger, server_round: int, ids: list[str]) -> int:
    """Verdicts, version and credits of a round, with their rows, under a head."""
    for number, (who, update) in enumerate(zip(CONTRIBUTORS, ids, strict=True)):
        entry = ledger.append(tx, "verdict", verdict(update, who, server_round, "merged"))
        row = {"update_id": update, "contributor": who, "server_round": server_round, "message_id": update}
        row |= {"manifest": "", "signature": b"", "nonce": update, "delta_sha256": update, "delta_bytes": 1}
        row |= {"verdict": "merged", "ledger_sequence": entry.sequence, "received_at": 0.0}
        tx.execute(insert(updates).values(**row))
        credit = {"server_round": server_round, "contributor": who, "amount": 100 + number}
        ledger.append(tx, "credit", credit)
        tx.execute(insert(credits).values(**credit))
    digest = "sha256:" + canonical_digest(server_round)
    told = {"height": server_round, "digest": digest, "server_round": server_round}
    losses = {"heldout_before": 2.0 / server_round, "heldout_after": 2.0 / (server_round + 1)}
    body = {"soup": digest[7:], "recipe": SoupRecipe().model_dump(mode="json"), "merged": ids, "updates": ids}
    last = ledger.append(tx, "version", {**told, **losses, **body})
    row = {"soup_sha256": digest[7:], "soup_bytes": 1, "num_updates": len(ids), "committed_at": 0.0}
    tx.execute(insert(versions).values(**told, **losses, **row))
    ledger.sign_head(tx)
    return last.sequence


def verdict(update: str, who: str, server_round: int, word: str) -> dict[str, Any]:
    """A verdict's body."""
    told = {"update": update, "contributor": who, "server_round": server_round, "verdict": word, "reason": ""}
    return {**told, "delta": update}


def one_by_one(database: Database, public_key: bytes, signatures: list[bytes]) -> None:
    """The peer: the chain, and a signature of each entry."""
    chain = Chain()
    with database.reading() as tx:
        for row, signature in zip(tx.execute(entries_from(1)), signatures, strict=True):
            chain.add(entry_of(row))
            verify_signature(public_key, {"ledger": row.hash}, signature)


def one_proof(ledger: Ledger, sequence: int) -> None:
    """A proof of an entry, made and checked."""
    ledger.proof(sequence).verify(ledger.public_key)


def best(action: Callable[[], object]) -> float:
    """The fastest of a few runs, in seconds of one core: what else runs on the machine does not count."""
    seconds = []
    for _ in range(REPEATS):
        began = time.process_time()
        action()
        seconds.append(time.process_time() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
