"""The table of variants in a SQLite file that several processes share, so that a server sees every change.

Plain ``sqlite3`` is used because every request looks up a name, which takes ten times as long with a query builder.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import disk_full, fsync_folder
from gym_fed.core.system_errors import system_error
from gym_fed.serving.store.records import VariantRecord, is_digest, is_encodable

_SCHEMA_VERSION = 2
_BUSY_SECONDS = 30.0
_PAGE_ROWS = 500
_log = logging.getLogger(__name__)
_COLUMNS = ", ".join(field.name for field in fields(VariantRecord))
_PLACES = ", ".join("?" for _ in fields(VariantRecord))
_SELECT = f"SELECT {_COLUMNS} FROM variants"
_ROW = """owner TEXT NOT NULL, sha256 TEXT NOT NULL, size_bytes INTEGER NOT NULL,
        base_model TEXT NOT NULL, base_digest TEXT NOT NULL, revision INTEGER NOT NULL,
        created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL, manifest TEXT, note TEXT NOT NULL"""
_SCHEMA = (
    f"CREATE TABLE variants (name TEXT PRIMARY KEY, {_ROW})",
    "CREATE INDEX variants_owner ON variants (owner, name)",
    "CREATE INDEX variants_sha256 ON variants (sha256)",
    """CREATE TABLE keys (
        owner TEXT NOT NULL, public_key TEXT NOT NULL, revoked INTEGER NOT NULL, added_at INTEGER NOT NULL,
        PRIMARY KEY (owner, public_key))""",
    f"""CREATE TABLE revisions (
        position INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, {_ROW}, figures TEXT,
        UNIQUE (name, revision))""",
    "CREATE INDEX revisions_sha256 ON revisions (sha256)",
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",
    f"PRAGMA user_version = {_SCHEMA_VERSION}",
)
"""``revisions`` has every kept revision, including the newest, in order of insertion."""
_KEPT = "kept_revisions"
DEFAULT_KEPT = 10


class VariantRegistry:
    """The rows of variants, and the additional signing keys of owners, whose id is the hash of the first key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._idle: deque[sqlite3.Connection] = deque()
        self._closed = False
        if not path.exists():
            path.touch(mode=0o600)  # SQLite gives its other files the same mode
            fsync_folder(path.parent)
        with self._connection() as connection:
            self._prepare(connection)

    def get(self, name: str) -> VariantRecord | None:
        """Return the current row of a name, or None; this takes tens of microseconds.

        Raises:
            GymError: ``STATE_CORRUPT`` for a damaged row.
        """
        with self._connection() as connection:
            return Transaction(connection).get(name)

    def list(self, owner: str | None = None) -> Iterator[VariantRecord]:
        """Iterate over all rows by name, or those of an owner; one page is in memory at a time.

        A damaged row is logged and skipped, so that the others stay readable; ``get`` refuses it.
        """
        for row in self._rows(_SELECT, owner):
            try:
                record = VariantRecord.of_row(row)
            except GymError as error:
                _log.error("%s", error.message)
                continue
            yield record

    def names(self) -> Iterator[str]:
        """Yield all names, including those of damaged rows."""
        for row in self._rows("SELECT name FROM variants"):
            yield str(row[0])

    def _rows(self, select: str, owner: str | None = None) -> Iterator[tuple[Any, ...]]:
        """Yield rows by name, which is their first column."""
        last = ""
        while True:
            query, values = f"{select} WHERE name > ?", [last]
            if owner is not None:
                query, values = f"{query} AND owner = ?", [last, owner]
            with self._connection() as connection:
                rows = connection.execute(f"{query} ORDER BY name LIMIT {_PAGE_ROWS}", values).fetchall()
            yield from rows
            if len(rows) < _PAGE_ROWS:
                return
            last = rows[-1][0]

    def count(self) -> int:
        """Return the number of variants."""
        with self._connection() as connection:
            return int(connection.execute("SELECT count(*) FROM variants").fetchone()[0])

    def key_state(self, owner: str, public_key: bytes) -> str | None:
        """Return the state of an owner's key, ``trusted`` or ``revoked``; None if unknown."""
        with self._connection() as connection:
            return Transaction(connection).key_state(owner, public_key)

    def set_key(self, owner: str, public_key: bytes, *, revoked: bool) -> None:
        """Set the state of an owner's key; a revoked one stays revoked.

        Raises:
            GymError: ``KEY_REVOKED`` when trusting a revoked key.
        """
        with self.writing() as transaction:
            transaction.set_key(owner, public_key, revoked=revoked)

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """Open a read transaction, in which all reads see the same state."""
        with self._connection() as connection:
            connection.execute("BEGIN")
            try:
                yield Transaction(connection)
            finally:
                if connection.in_transaction:  # False if an error has ended it
                    connection.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        """Open a write transaction, which excludes other writers and is durable when the block ends."""
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield Transaction(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def forget_pages(self) -> None:
        """Remove deleted data from the write-ahead log; in the database itself it is already zeroed."""
        with self._connection() as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Take a connection that no other thread is using."""
        if self._closed:
            raise GymError(ErrorCode.USAGE, f"{self.path} is closed", "open the store again")
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
            try:
                yield connection
            except sqlite3.Error:
                connection.close()
                raise
            except BaseException:
                self._give_back(connection)
                raise
            self._give_back(connection)
        except sqlite3.OperationalError as error:
            name = getattr(error, "sqlite_errorname", "")  # errors raised by Python itself do not have it
            if name == "SQLITE_FULL":
                raise disk_full(self.path) from error
            if name.startswith("SQLITE_BUSY"):
                raise GymError(
                    ErrorCode.STATE_LOCKED,
                    f"{self.path} was locked by another process for {_BUSY_SECONDS:.0f} s",
                    "try again when it has finished",
                ) from error
            refused = system_error(error)
            if refused is not None:
                raise GymError(refused.code, f"{self.path}: {refused.message}", refused.hint) from error
            raise self._corrupt(error) from error
        except sqlite3.DatabaseError as error:
            raise self._corrupt(error) from error

    def _give_back(self, connection: sqlite3.Connection) -> None:
        if self._closed:
            connection.close()
        else:
            self._idle.append(connection)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.text_factory = _text
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if _version(connection) == 0:
            connection.execute("BEGIN IMMEDIATE")
            if _version(connection) == 0:  # otherwise another process has created the tables
                for statement in _SCHEMA:
                    connection.execute(statement)
            connection.execute("COMMIT")
        version = _version(connection)
        if version != _SCHEMA_VERSION:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{self.path} has schema version {version}, but this release supports {_SCHEMA_VERSION}",
                "use the release of gym-fed that wrote it, or a newer one",
            )

    def _corrupt(self, error: sqlite3.Error) -> GymError:
        return GymError(
            ErrorCode.STATE_CORRUPT,
            f"{self.path} cannot be used: {error}",
            "restore it from a backup; the deltas are intact",
        )


class Transaction:
    """Reads through one connection, and changes inside ``VariantRegistry.writing``."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, name: str) -> VariantRecord | None:
        """Like ``VariantRegistry.get``."""
        if not is_encodable(name):  # no row can have this name
            return None
        row = self._connection.execute(f"{_SELECT} WHERE name = ?", (name,)).fetchone()
        return None if row is None else VariantRecord.of_row(row)

    def put(self, record: VariantRecord, figures: str | None = None) -> set[str]:
        """Insert a row, or replace the one with its name, which stays among the revisions.

        Returns:
            The deltas of revisions that are no longer kept; other variants may use them.
        """
        values = tuple(getattr(record, field.name) for field in fields(VariantRecord))
        self._connection.execute(f"INSERT OR REPLACE INTO variants ({_COLUMNS}) VALUES ({_PLACES})", values)
        gone = self._delete("name = ? AND revision = ?", (record.name, record.revision))
        into = f"INSERT INTO revisions ({_COLUMNS}, figures) VALUES ({_PLACES}, ?)"
        self._connection.execute(into, (*values, figures))
        return gone | self.prune(record.name)

    def revisions(self, name: str) -> list[tuple[VariantRecord, str | None]]:
        """Return every kept revision of a name, newest first, with its figures.

        Raises:
            GymError: ``STATE_CORRUPT`` for a damaged row.
        """
        if not is_encodable(name):
            return []
        select = f"SELECT {_COLUMNS}, figures FROM revisions WHERE name = ? ORDER BY position DESC"
        rows = self._connection.execute(select, (name,)).fetchall()
        return [(VariantRecord.of_row(row[:-1]), row[-1]) for row in rows]

    def kept(self) -> int:
        """Return the number of revisions that are kept of each variant."""
        row = self._connection.execute("SELECT value FROM settings WHERE name = ?", (_KEPT,)).fetchone()
        return DEFAULT_KEPT if row is None else max(1, int(row[0]))

    def keep(self, number: int) -> None:
        """Set the number of revisions to keep; the next ``prune`` removes the others."""
        self._connection.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (_KEPT, number))

    def prune(self, name: str | None = None) -> set[str]:
        """Delete the oldest revisions of a variant, or of all; return their deltas."""
        where = "" if name is None else "WHERE name = ?"
        counted = (
            "SELECT position FROM (SELECT position, row_number() OVER "
            f"(PARTITION BY name ORDER BY position DESC) AS age FROM revisions {where}) WHERE age > ?"
        )
        values = (self.kept(),) if name is None else (name, self.kept())
        return self._delete(f"position IN ({counted})", values)

    def delete(self, name: str) -> set[str]:
        """Delete a variant with all its revisions; return their deltas."""
        cursor = self._connection.execute("DELETE FROM variants WHERE name = ? RETURNING sha256", (name,))
        return _digests(cursor) | self._delete("name = ?", (name,))

    def _delete(self, where: str, values: tuple[object, ...]) -> set[str]:
        cursor = self._connection.execute(f"DELETE FROM revisions WHERE {where} RETURNING sha256", values)
        return _digests(cursor)

    def is_used(self, sha256: str) -> bool:
        """Return True if a revision of any variant has this delta."""
        return any(
            self._connection.execute(f"SELECT 1 FROM {table} WHERE sha256 = ? LIMIT 1", (sha256,)).fetchone()
            for table in ("variants", "revisions")
        )

    def has_keys(self, owner: str) -> bool:
        """Return True if the state of any of an owner's keys is known."""
        cursor = self._connection.execute("SELECT 1 FROM keys WHERE owner = ? LIMIT 1", (owner,))
        return cursor.fetchone() is not None

    def key_state(self, owner: str, public_key: bytes) -> str | None:
        """Like ``VariantRegistry.key_state``."""
        row = self._connection.execute(
            "SELECT revoked FROM keys WHERE owner = ? AND public_key = ?", (owner, public_key.hex())
        ).fetchone()
        return None if row is None else ("revoked" if row[0] else "trusted")

    def set_key(self, owner: str, public_key: bytes, *, revoked: bool) -> None:
        """Like ``VariantRegistry.set_key``."""
        key = public_key.hex()
        if not revoked and self.key_state(owner, public_key) == "revoked":
            raise GymError(
                ErrorCode.KEY_REVOKED,
                f"key {key[:16]} of {owner} was revoked in this store",
                "use a newer key",
            )
        self._connection.execute(
            "INSERT OR REPLACE INTO keys (owner, public_key, revoked, added_at) VALUES (?, ?, ?, ?)",
            (owner, key, int(revoked), int(time.time())),
        )
        if revoked:  # change the variants' rows, so that servers with them in memory verify them again
            self._connection.execute(
                "UPDATE variants SET updated_at = max(updated_at + 1, ?) WHERE owner = ?",
                (int(time.time()), owner),
            )


def _digests(cursor: sqlite3.Cursor) -> set[str]:
    """Return the digests of deleted rows, except damaged ones, which do not name files."""
    return {row[0] for row in cursor.fetchall() if is_digest(row[0])}


def _text(raw: bytes) -> str:
    """Decode a column; invalid UTF-8 is reported by ``VariantRecord.of_row``, which can name the row."""
    return raw.decode("utf-8", "surrogateescape")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])
