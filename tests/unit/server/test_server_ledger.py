"""The hub's ledger: heads are signed once, every change is found, databases of before are taken over."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gym_server.ledger.chain import Ledger
from gym_server.store.database import Database
from gym_server.store.tables import credits, ledger, ledger_heads
from sqlalchemy import select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.ledger.export import LedgerCheck, first_line, lines, verify_file, verify_lines
from gym_fed.trust.ledger.heads import HEADS_BEFORE, EntryProof, SignedHead

ANN, BOB = "c" + "a" * 32, "c" + "b" * 32


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database.open("sqlite:///hub.db", tmp_path)


@pytest.fixture
def written(database: Database) -> Ledger:
    """Two entries under a head, two more under another."""
    found = Ledger(database, SigningKey.generate())
    for server_round in (1, 2):
        with database.transaction() as tx:
            found.append(tx, "note", {"contributor": ANN, "name": "Ännchen \n"})
            row = {"server_round": server_round, "contributor": BOB, "amount": 5}
            found.append(tx, "credit", row)
            tx.execute(credits.insert().values(**row))
            found.sign_head(tx)
    return found


def export(found: Ledger, path: Path) -> Path:
    text = [first_line(found.public_key), *lines(found.entries(), found.heads())]
    path.write_bytes("".join(line + "\n" for line in text).encode())
    return path


def test_a_ledger_that_nobody_touched_verifies_and_is_counted(written: Ledger) -> None:
    found = written.verify()
    assert found == {**found, "entries": 4, "heads": 2, "credits": 2, "versions": 0, "updates": 0}


def test_a_size_has_one_head_however_often_it_is_signed(written: Ledger, database: Database) -> None:
    with database.transaction() as tx:
        first, again = written.sign_head(tx), written.sign_head(tx)
    assert first == again == written.newest_head() == list(written.heads())[-1]
    with database.transaction() as tx:
        assert Ledger(database, SigningKey.generate()).sign_head(tx) == first
    assert written.verify()["heads"] == 2


def test_an_empty_ledger_has_no_head(database: Database) -> None:
    found = Ledger(database, SigningKey.generate())
    with database.transaction() as tx:
        assert found.sign_head(tx) is None
    assert found.newest_head() is None
    assert found.verify()["entries"] == 0


def test_every_entry_is_proved_under_every_head_that_holds_it(written: Ledger, database: Database) -> None:
    with database.transaction() as tx:
        written.append(tx, "note", {"contributor": ANN})
    for sequence in range(1, 6):
        for size in (0, 2, 4):
            if size and size < sequence:
                with pytest.raises(GymError, match=f"no signed head of size {size}"):
                    written.proof(sequence, size)
                continue
            proof = written.proof(sequence, size)
            proof.verify(written.public_key)
            assert proof.entry.sequence == sequence
            assert EntryProof.from_dict(json.loads(json.dumps(proof.to_dict()))) == proof
    assert written.proof(5).head.size == 5, "an entry that is under no head yet has one signed"
    for sequence in (0, 6):
        with pytest.raises(GymError, match=f"no entry {sequence}"):
            written.proof(sequence)


def test_each_byte_of_an_exported_ledger_counts(written: Ledger, tmp_path: Path) -> None:
    path = export(written, tmp_path / "ledger.jsonl")
    key, checked = verify_file(path)
    assert (key, checked.entries, checked.heads) == (written.public_key, 4, 2)
    rows = path.read_bytes().splitlines(keepends=True)
    for number, row in enumerate(rows):
        for position, byte in enumerate(row):
            # 0x20 is the other case of a letter: the same number in hex
            for flip in (0x01, 0x20) if chr(byte).isalpha() else (0x01,):
                changed = row[:position] + bytes([byte ^ flip]) + row[position + 1 :]
                lines_of_it = b"".join([*rows[:number], changed, *rows[number + 1 :]]).splitlines(True)
                named = f"line {number + 1}:" if byte != 0x0A or number + 1 == len(rows) else "line"
                with pytest.raises(GymError, match=named) as caught:
                    verify_lines(lines_of_it, "it")
                assert caught.value.code is ErrorCode.STATE_CORRUPT


@pytest.mark.parametrize("cut", ["a byte", "the last head", "a line", "everything"])
def test_an_export_that_was_cut_short_is_found(written: Ledger, tmp_path: Path, cut: str) -> None:
    path = export(written, tmp_path / "ledger.jsonl")
    rows = path.read_bytes().splitlines(keepends=True)
    kept = {"a byte": [b"".join(rows)[:-1]], "the last head": rows[:-1], "a line": rows[:2] + rows[3:]}
    path.write_bytes(b"".join(kept.get(cut, [])))
    with pytest.raises(GymError):
        verify_file(path)


def test_other_spellings_of_the_same_json_are_refused(written: Ledger, tmp_path: Path) -> None:
    path = export(written, tmp_path / "ledger.jsonl")
    whole = path.read_text()
    for old, new in ((":4", ": 4"), ('"kind":"credit"', '"kind":"c\\u0072edit"'), ("Ä", "\\u00c4")):
        assert old in whole
        path.write_text(whole.replace(old, new, 1))
        with pytest.raises(GymError, match="not canonical JSON"):
            verify_file(path)


def altered(value: Any, position: int) -> Any:
    if isinstance(value, int):
        return value ^ 1 << position
    return value[:position] + chr(ord(value[position]) ^ 1) + value[position + 1 :]


@pytest.mark.parametrize("table", ["ledger", "ledger_heads", "ledger_subjects", "credits"])
def test_each_byte_of_the_stored_ledger_counts(written: Ledger, database: Database, table: str) -> None:
    path = database.sqlite_path
    file = sqlite3.connect(path, isolation_level=None)
    file.execute("PRAGMA synchronous=OFF")
    names = [row[1] for row in file.execute(f"PRAGMA table_info({table})")]
    for rowid, *values in file.execute(f"SELECT rowid, * FROM {table}").fetchall():
        for name, value in zip(names, values, strict=True):
            change = f"UPDATE {table} SET {name} = ? WHERE rowid = ?"
            for position in range(0, 3 if isinstance(value, int) else len(value)):
                moved = rowid if name not in ("sequence", "size") or table == "ledger_subjects" else None
                try:
                    file.execute(change, (altered(value, position), rowid))
                except sqlite3.IntegrityError:
                    continue  # the database itself refuses it
                with pytest.raises(GymError) as caught:
                    written.verify()
                assert caught.value.code is ErrorCode.STATE_CORRUPT
                back = rowid if moved is not None else altered(value, position)
                file.execute(change, (value, back))
    assert written.verify()["entries"] == 4


def test_an_entry_that_is_missing_changed_or_made_up_is_named(written: Ledger, database: Database) -> None:
    with database.transaction() as tx:
        tx.execute(ledger.update().where(ledger.c.sequence == 3).values(kind="credit"))
    with pytest.raises(GymError, match=r"entry 3 \(credit\) was altered"):
        written.verify()
    with database.transaction() as tx:
        tx.execute(ledger.delete().where(ledger.c.sequence == 3))
    with pytest.raises(GymError, match=r"entry 4 \(credit\) does not follow entry 2"):
        written.verify()


@pytest.mark.parametrize("size", [2, 4])
def test_a_signed_head_that_was_deleted_is_missed_by_verify_by_the_start_and_by_an_export(
    written: Ledger, database: Database, tmp_path: Path, size: int
) -> None:
    with database.transaction() as tx:
        written.append(tx, "note", {"contributor": ANN})
    written.check_heads()
    with database.transaction() as tx:
        tx.execute(ledger_heads.delete().where(ledger_heads.c.size == size))
    missed = "entry 3 counts 1 signed heads, but 0" if size == 2 else "entry 5 counts 2 signed heads, but 1"
    with pytest.raises(GymError, match=missed):
        written.verify()
    with pytest.raises(GymError, match="entry 5 counts 3 signed heads, but 2 are stored"):
        written.check_heads()
    path = tmp_path / "ledger.jsonl"
    text = [first_line(written.public_key), *lines(written.entries(), written.heads())]
    path.write_bytes("".join(line + "\n" for line in text).encode())
    with pytest.raises(GymError, match=missed):
        verify_file(path)
    with database.transaction() as tx:
        written.append(tx, "note", {"contributor": BOB})  # counts on from the entries, not from the rows
    with pytest.raises(GymError, match="entry 6 counts 4 signed heads, but 3 are stored"):
        written.check_heads()


@pytest.mark.parametrize("count", ["many", None, [1]])
def test_a_count_of_heads_that_is_no_number_makes_an_export_invalid(written: Ledger, count: object) -> None:
    (first, *_), chain = written.entries(), LedgerCheck(written.public_key)
    chain._chain = SimpleNamespace(
        add=lambda entry: {HEADS_BEFORE: count}
    )  # a chain that signs what it likes
    with pytest.raises(GymError, match="signed heads, but 0 are stored") as caught:
        chain.entry(first)
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_the_newest_head_that_was_deleted_is_missed_at_the_start(written: Ledger, database: Database) -> None:
    with database.transaction() as tx:
        tx.execute(ledger_heads.delete().where(ledger_heads.c.size == 4))
    with pytest.raises(GymError, match="no signed head covers entries 3 to 4"):
        written.check_heads()


def test_a_ledger_whose_entries_do_not_count_heads_is_counted_from_its_rows(tmp_path: Path) -> None:
    """A ledger of before has heads that no entry counts; those signed before the first count cannot be missed."""
    database = Database.open("sqlite:///hub.db", tmp_path)
    found = Ledger(database, SigningKey.generate())
    with pytest.MonkeyPatch.context() as patched:
        follow = Entry.following
        patched.setattr(
            Entry,
            "following",
            lambda previous, kind, body: follow(
                previous, kind, {k: v for k, v in body.items() if k != "heads"}
            ),
        )
        for _ in range(3):
            with database.transaction() as tx:
                found.append(tx, "note", {"contributor": ANN})
    for _ in range(2):
        with database.transaction() as tx:
            found.append(tx, "note", {"contributor": ANN})
    assert [entry.body.get("heads") for entry in found.entries()] == [None, None, None, 3, 4]
    assert found.verify()["heads"] == 5
    found.check_heads()
    database.close()


def test_a_credit_that_the_ledger_does_not_have_is_named(written: Ledger, database: Database) -> None:
    with database.transaction() as tx:
        tx.execute(credits.insert().values(server_round=3, contributor=ANN, amount=7))
    with pytest.raises(GymError, match=f"credits: 3 {ANN[:24]} is in the database but not in the ledger"):
        written.verify()


def test_what_names_a_contributor_is_found_by_its_id(written: Ledger) -> None:
    assert [entry.sequence for entry in written.about(ANN)] == [1, 3]
    assert written.rounds_of(BOB) == {1: [2], 2: [4]}


def rewrite(database: Database, after: int) -> None:
    """Make everything behind an entry anew, as an attacker with the database and without the key would."""
    with database.transaction() as tx:
        rows = tx.execute(select(ledger).order_by(ledger.c.sequence)).all()
        previous = (after, rows[after - 1].hash) if after else None
        for row in rows[after:]:
            entry = Entry.following(
                previous, row.kind, {**json.loads(row.body), "amount": 10**6, "heads": after // 2}
            )
            previous = (entry.sequence, entry.hash)
            fields = {"body": entry.body_json, "previous_hash": entry.previous_hash, "hash": entry.hash}
            tx.execute(ledger.update().where(ledger.c.sequence == row.sequence).values(**fields))
        tx.execute(credits.update().where(credits.c.server_round > after // 2).values(amount=10**6))
        tx.execute(ledger_heads.delete().where(ledger_heads.c.size > after))


@pytest.mark.parametrize("after", [0, 2])
def test_what_was_written_without_the_key_is_found_and_never_signed(
    written: Ledger, database: Database, after: int
) -> None:
    rewrite(database, after)
    with pytest.raises(GymError, match=f"no signed head covers entries {after + 1} to 4"):
        written.verify()
    for ledger_of_it in (written, Ledger(database, written._key)):
        with (
            pytest.raises(GymError, match=f"no signed head covers entry {after + 1}"),
            database.transaction() as tx,
        ):
            ledger_of_it.append(tx, "note", {"contributor": ANN})


def test_a_head_that_was_not_signed_is_not_gone_on_from(written: Ledger, database: Database) -> None:
    rewrite(database, 2)
    with database.transaction() as tx:
        last = tx.execute(select(ledger)).all()[-1]
        head = SignedHead.from_json(tx.scalars(select(ledger_heads.c.head)).one())
        forged = replace(head, head=replace(head.head, size=4, hash=last.hash))
        tx.execute(ledger_heads.insert().values(size=4, head=forged.to_json(), frontier="0" * 64))
    with pytest.raises(GymError, match="head 4 is not signed"), database.transaction() as tx:
        written.append(tx, "note", {"contributor": ANN})


def test_what_a_transaction_appends_is_under_a_head_when_it_commits(
    written: Ledger, database: Database
) -> None:
    with database.transaction() as tx:
        written.append(tx, "note", {"contributor": ANN})
        written.append(tx, "note", {"contributor": BOB})
    assert [head.size for head in written.heads()] == [2, 4, 6]
    assert written.verify()["entries"] == 6


def test_a_database_that_was_put_back_is_noticed(tmp_path: Path) -> None:
    database, key, anchor = (
        Database.open("sqlite:///hub.db", tmp_path),
        SigningKey.generate(),
        tmp_path / "head",
    )
    found = Ledger(database, key, anchor)
    for name in ("one", "two"):
        with database.transaction() as tx:
            found.append(tx, "note", {"name": name})
    assert found.newest_head() == SignedHead.from_json(anchor.read_text())
    assert found.verify()["entries"] == 2
    with database.transaction() as tx:
        tx.execute(ledger.delete().where(ledger.c.sequence == 2))
        tx.execute(ledger_heads.delete().where(ledger_heads.c.size == 2))
    with pytest.raises(GymError, match=r"the head of entry 2 was signed.* the database ends before it"):
        found.verify()
    again = Ledger(database, key, anchor)
    with pytest.raises(GymError, match="the database ends before it"), database.transaction() as tx:
        again.append(tx, "note", {"name": "another two"})
    anchor.unlink()
    with database.transaction() as tx:
        Ledger(database, key, anchor).append(tx, "note", {"name": "another two"})
    assert found.verify()["entries"] == 2


def test_what_is_signed_while_the_ledger_is_verified_does_not_disturb(
    tmp_path: Path, monkeypatch: Any
) -> None:
    database, anchor = Database.open("sqlite:///hub.db", tmp_path), tmp_path / "head"
    found = Ledger(database, SigningKey.generate(), anchor)

    def write(name: str) -> None:
        with database.transaction() as tx:
            found.append(tx, "note", {"name": name})

    write("one")
    check = LedgerCheck.entry
    monkeypatch.setattr(LedgerCheck, "entry", lambda *args: (check(*args), write("while it is verified")))
    assert found.verify()["entries"] == 1
    assert SignedHead.from_json(anchor.read_text()).size == 2


def test_a_head_is_never_older_than_the_one_before_however_the_clock_goes(database: Database) -> None:
    clock = [2_000_000_000]
    found = Ledger(database, SigningKey.generate(), clock=lambda: clock[0])
    for now in (2_000_000_000, 1_000, 2_000_000_001):
        clock[0] = now
        with database.transaction() as tx:
            found.append(tx, "note", {"contributor": ANN})
            found.sign_head(tx)
    assert [head.head.at for head in found.heads()] == [2_000_000_000, 2_000_000_000, 2_000_000_001]
    assert found.verify()["heads"] == 3


def test_an_export_whose_heads_go_back_in_time_is_refused(database: Database, tmp_path: Path) -> None:
    """The hub signed each of them, and over the entries that it names."""
    key = SigningKey.generate()
    found = Ledger(database, key)
    for _ in range(2):
        with database.transaction() as tx:
            found.append(tx, "note", {"contributor": ANN})
            found.sign_head(tx)
    first, second = found.heads()
    for back, is_good in ((0, True), (1, False)):
        other = SignedHead.sign(key, replace(second.head, at=first.head.at - back))
        text = [first_line(found.public_key), *lines(found.entries(), [first, other])]
        path = tmp_path / "ledger.jsonl"
        path.write_bytes("".join(line + "\n" for line in text).encode())
        if is_good:
            assert verify_file(path)[1].heads == 2
            continue
        with pytest.raises(GymError, match="head 2 does not follow head 1"):
            verify_file(path)
