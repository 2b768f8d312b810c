"""`ledger verify` finds a change of any column of any table that the ledger stands for, and says which it does not."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gym_client.variants import push_variant, sign_variant
from gym_server.evaluations.seeds import promise_seed
from gym_server.ledger import pace
from gym_server.ledger.columns import UNCOVERED, record_of
from gym_server.rewards.running_scores import RUN, recorded, write_running_scores
from gym_server.rewards.settlements import Settlement, recorded_settlements, write_settlements
from gym_server.rounds.admission import UpdateSubmission
from gym_server.rounds.soup_record import Judgement, SoupRecord
from gym_server.store.tables import (
    contributions,
    metadata,
    privacy_seeds,
    privacy_spending,
    reputations,
    rounds,
    updates,
)
from gym_server.strategy.tasks import new_task
from sqlalchemy import select, update

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.soup.credit import RunningScore
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.manifest import UpdateManifest, lifetime, new_nonce
from gym_fed.trust.identity.statements import TransferOrder
from tests.support.loopback_hub import LoopbackHub, manifest_of, some_delta

KEYS = [SigningKey.generate() for _ in range(3)]
MUST_HAVE_ROWS = (
    "accounts",
    "account_keys",
    "updates",
    "versions",
    "rounds",
    "credits",
    "contributions",
    "running_scores",
    "reputations",
    "settlements",
    "royalties",
    "transfers",
    "privacy_spending",
    "privacy_seeds",
    "evaluation_seeds",
    "variants",
    "ledger",
    "ledger_heads",
    "ledger_subjects",
)


class Filled:
    """A hub of which every table that the ledger stands for has a row."""

    def __init__(self, folder: Path) -> None:
        self.hub = LoopbackHub(folder / "hub", rewards={"hold_seconds": 0})
        self.fed, self.folder = self.hub.fed, folder
        self.ids = [self.fed.accounts.get_or_create(key.public_key) for key in KEYS]
        self.round(1, committed=True)
        self.round(2, committed=False)
        self.others()

    def send(self, number: int, who: int, **changes: Any) -> str:
        """An update through admission; returns its id."""
        path = some_delta(self.folder, seed=10 * number + who, digest=self.fed.round_store.head().digest)
        issued, expires = lifetime(time.time())
        said: dict[str, Any] = {
            "contributor": self.ids[who],
            "server": self.fed.server,
            "task": f"task-{number}-{who}",
            "server_round": number,
            "base_digest": self.fed.round_store.head().digest,
            "delta_sha256": self.fed.store.put_file(path),
            "delta_bytes": path.stat().st_size,
            "nonce": new_nonce(),
            "issued_at_seconds": issued,
            "expires_at_seconds": expires,
            "num_examples": 3,
        }
        manifest = UpdateManifest(**{**said, **changes})
        signature = manifest.sign(KEYS[who])
        return self.judge(who, number, manifest.model_dump_json(), signature, said["task"]).update

    def judge(self, who: int, number: int, text: str, signature: bytes, task: str) -> Any:
        submission = UpdateSubmission(self.ids[who], KEYS[who].public_key, task, number, text, signature)
        return self.fed.admission.judge(submission, lambda tx, receipt: None)

    def round(self, number: int, committed: bool) -> None:
        round_store = self.fed.round_store
        round_store.open_next()
        with self.fed.database.transaction() as tx:
            promise_seed(tx, self.fed.ledger, number)
        round_store.start_collecting(
            number, new_task(self.fed.state, self.fed.config, self.fed.max_update_bytes, number)
        )
        sent = [self.send(number, who) for who in (0, 1)]
        self.send(number, 2, server_round=number + 7)  # refused
        if not committed:
            round_store.abort(number, "too few")
            return
        merging = round_store.start_merging(number)
        judgements = [
            Judgement(sent[0], self.ids[0], "merged", "", 1000, -0.25, score=0.5, error=0.1),
            Judgement(sent[1], self.ids[1], "rejected", "its loss is worse", 0, 0.5),
        ]
        soup = self.fed.store.put_file(some_delta(self.folder, seed=99))
        residual, state = f"round-{number}.safetensors", {"residual": "ab"}
        record = SoupRecord(soup, 100, {}, 2.0, 1.5, residual, None, judgements, state)
        round_store.commit(merging, record, self.spent)

    def spent(self, tx: Any) -> None:
        """What scores and privacy leave."""
        row = {
            "server_round": 1,
            "contributor": self.ids[0],
            "mechanism": "gaussian",
            "noise_multiplier": 1.5,
        }
        tx.execute(privacy_spending.insert().values(**row))
        body = {
            "server_round": 1,
            "contributors": [self.ids[0]],
            "mechanism": "gaussian",
            "noise_multiplier": 1.5,
        }
        self.fed.ledger.append(tx, "privacy", body)
        update_id = tx.exec_driver_sql("SELECT update_id FROM updates WHERE verdict = 'merged'").scalar()
        scores = {"update_id": update_id, "contributor": self.ids[0], "server_round": 1, "method": "estimate"}
        figures = {"score": 0.5, "error": 0.1, "similarity": 0.25, "reputation": 0.75}
        tx.execute(contributions.insert().values(**scores, **figures))
        brought = {self.ids[0]: RunningScore(np.array([0.2, 0.3]), 0.01, 800), RUN: RunningScore(np.ones(2))}
        write_running_scores(tx, "rows", 1, brought)
        tx.execute(reputations.insert().values(contributor=self.ids[0], value=0.75, height=1))
        write_settlements(tx, settled := {self.ids[0]: Settlement(800, 5)})
        body = {"server_round": 1, "height": 1, "method": "estimate", "scores": {update_id: 0.5}}
        body |= {"similarity": {update_id: 0.25}, "reputations": {self.ids[0]: 0.75}}
        body |= {"errors": {update_id: 0.1}, "basis": "rows", "settlements": recorded_settlements(settled)}
        body |= {"running_scores": recorded(brought, np.array([0.5, 0.5]))}
        self.fed.ledger.append(tx, "contribution", body)
        import hashlib

        digest = hashlib.sha256(b"seed").hexdigest()
        seed = {"server_round": 1, "merging": "ab", "seed": b"seed", "seed_sha256": digest}
        tx.execute(privacy_seeds.insert().values(**seed))

    def others(self) -> None:
        """A royalty, a transfer that settled, one that waits, a variant."""
        from gym_server.ledger.royalties import attribute_use, record

        record(
            self.fed.state, "use-1", attribute_use(self.fed.base, self.fed.database, {"1": 1}, 50, "equal")
        )
        for amount in (5, 6):
            order = TransferOrder(
                sender=self.ids[0],
                to=self.ids[1],
                amount=amount,
                server=self.fed.server,
                tls=self.fed.fingerprint,
                issued_at=int(time.time()),
            )
            self.fed.payouts.request(self.ids[0], order.to_json(), order.sign(KEYS[0]))
        self.fed.payouts.settle_due()
        client = self.hub.client(self.folder / "owner")
        path = some_delta(self.folder, seed=5)
        push_variant(client, path, sign_variant(client, manifest_of(path)))
        client.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    found = Filled(tmp_path_factory.mktemp("filled"))
    yield found
    found.hub.close()


def covered() -> list[tuple[str, str]]:
    return [
        (table.name, column.name)
        for table in metadata.sorted_tables
        for column in table.columns
        if table.name not in UNCOVERED and f"{table.name}.{column.name}" not in UNCOVERED
    ]


def changed(value: Any) -> Any:
    if value is None:
        return 12345
    if isinstance(value, bytes):
        return (bytes([value[0] ^ 1]) + value[1:]) if value else b"x"
    if isinstance(value, float):
        return value + 1000.0
    if isinstance(value, int):
        return value + 1
    return (chr(ord(value[0]) ^ 1) + value[1:]) if value else "x"


def test_every_table_and_column_is_covered_or_named_with_a_reason() -> None:
    names = {table.name for table in metadata.sorted_tables}
    known = names | {f"{t.name}.{c.name}" for t in metadata.sorted_tables for c in t.columns}
    assert set(UNCOVERED) <= known
    assert all(len(reason) > 10 for reason in UNCOVERED.values())
    assert {table for table, _ in covered()} == set(MUST_HAVE_ROWS)


@pytest.mark.parametrize(("table", "column"), covered())
def test_a_change_of_any_covered_column_is_found(filled: Filled, table: str, column: str) -> None:
    assert filled.fed.ledger.verify()["entries"] > 10
    file = sqlite3.connect(filled.folder / "hub" / "hub.db", isolation_level=None)
    rows = file.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
    assert rows, f"{table} has no row"
    missed = []
    for rowid, value in rows:
        moved = changed(value)
        try:
            file.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (moved, rowid))
        except sqlite3.IntegrityError:
            continue  # the database itself refuses it
        where = moved if isinstance(value, int) and is_rowid(file, table, column) else rowid
        try:
            filled.fed.ledger.verify()
            missed.append(value)
        except GymError as error:
            if error.code is not ErrorCode.STATE_CORRUPT:
                raise
        finally:
            file.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (value, where))
    assert filled.fed.ledger.verify()
    file.close()
    assert missed == []


def is_rowid(file: sqlite3.Connection, table: str, column: str) -> bool:
    keys = [row for row in file.execute(f"PRAGMA table_info({table})") if row[5]]
    return len(keys) == 1 and keys[0][1] == column and keys[0][2] == "INTEGER"


def test_an_update_that_no_key_of_its_contributor_signed_is_found(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the hub itself wrote the signature into its record, so that no digest differs."""
    with filled.fed.database.reading() as tx:
        records = {row["update_id"]: record_of(row) for row in tx.execute(select(updates)).mappings()}
    file = sqlite3.connect(filled.folder / "hub" / "hub.db", isolation_level=None)
    rowid, text, signature = file.execute("SELECT rowid, manifest, signature FROM updates").fetchone()
    other = UpdateManifest.parse(text).sign(SigningKey.generate())
    file.execute("UPDATE updates SET signature = ? WHERE rowid = ?", (other, rowid))
    try:
        with pytest.raises(GymError, match="signature, norm, message or code does not match its verdict"):
            filled.fed.ledger.verify()
        monkeypatch.setattr("gym_server.ledger.columns.record_of", lambda row: records[row["update_id"]])
        with pytest.raises(GymError, match=r"no key that .* had at the time signed its manifest"):
            filled.fed.ledger.verify()
    finally:
        file.execute("UPDATE updates SET signature = ? WHERE rowid = ?", (signature, rowid))
        file.close()


def test_a_hundred_forged_submissions_are_two_entries_of_the_ledger(tmp_path: Path) -> None:
    found = Filled(tmp_path)
    try:
        number = found.fed.round_store.open_next().server_round
        before = found.fed.ledger.newest_head()
        for attempt in range(100):
            text = "{}" if attempt % 2 else json.dumps({"format": "gym-update-1", "contributor": "x"})
            with pytest.raises(GymError):
                found.judge(0, number, text, b"forged", "task")
        kinds = [entry for entry in found.fed.ledger.entries((before.size if before else 0) + 1)]
        assert [(entry.kind, entry.body["verdict"]) for entry in kinds] == [("verdict", "refused")]
        found.fed.round_store.abort(number, "nobody came")
        summary = [entry.body for entry in found.fed.ledger.entries() if entry.kind == pace.SUMMARY]
        assert len(summary) == 1
        assert summary[0]["server_round"] == number
        assert summary[0]["refused"] == {found.ids[0]: {"update-refused": 100}}
        found.fed.round_store.abort(found.fed.round_store.open_next().server_round, "nobody came")
        assert [e.kind for e in found.fed.ledger.entries()].count(pace.SUMMARY) == 1
        assert found.fed.ledger.verify()
    finally:
        found.hub.close()


def test_entries_of_before_there_were_digests_are_held_to_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_server.ledger.chain import Ledger

    write = Ledger.append

    def as_before(self: Ledger, tx: Any, kind: str, body: dict[str, Any]) -> Any:
        old = {
            key: value
            for key, value in body.items()
            if key not in ("record", "round", "heldout_change", "seal")
        }
        return write(self, tx, kind, old)

    monkeypatch.setattr(Ledger, "append", as_before)
    found = Filled(tmp_path)
    try:
        assert found.fed.ledger.verify()["updates"] == 6
        with found.fed.database.transaction() as tx:
            tx.execute(update(rounds).where(rounds.c.server_round == 1).values(state="aborted"))
        with pytest.raises(GymError, match="rounds: 1 is aborted"):
            found.fed.ledger.verify()
    finally:
        found.hub.close()
