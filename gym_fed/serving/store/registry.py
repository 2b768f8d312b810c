"""The table of variants: one SQLite file that several processes read and write, so that a server sees every change.

Plain ``sqlite3``: every request looks a name up, in a tenth of the time that a query builder takes.
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

from gym_fed.errors import ErrorCode, GymError
from gym_fed.files import disk_full, fsync_folder
from gym_fed.serving.store.records import VariantRecord, is_encodable
from gym_fed.system_errors import system_error

_SCHEMA_VERSION = 1
_BUSY_SECONDS = 30.0
_PAGE_ROWS = 500
_log = logging.getLogger(__name__)
_COLUMNS = ", ".join(field.name for field in fields(VariantRecord))
_PLACES = ", ".join("?" for _ in fields(VariantRecord))
_SELECT = f"SELECT {_COLUMNS} FROM variants"
_SCHEMA = (
    """CREATE TABLE variants (
        name TEXT PRIMARY KEY, owner TEXT NOT NULL, sha256 TEXT NOT NULL, size_bytes INTEGER NOT NULL,
        base_model TEXT NOT NULL, base_digest TEXT NOT NULL, revision INTEGER NOT NULL,
        created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL, manifest TEXT, note TEXT NOT NULL)""",
    "CREATE INDEX variants_owner ON variants (owner, name)",
    "CREATE INDEX variants_sha256 ON variants (sha256)",
    """CREATE TABLE keys (
        owner TEXT NOT NULL, public_key TEXT NOT NULL, revoked INTEGER NOT NULL, added_at INTEGER NOT NULL,
        PRIMARY KEY (owner, public_key))""",
    f"PRAGMA user_version = {_SCHEMA_VERSION}",
)


class VariantRegistry:
    """The rows of variants, and the keys that may sign for an owner beside the one its id is the hash of."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._idle: deque[sqlite3.Connection] = deque()
        self._closed = False
        if not path.exists():
            path.touch(mode=0o600)  # what SQLite puts beside it gets the same mode
            fsync_folder(path.parent)
        with self._connection() as connection:
            self._prepare(connection)

    def get(self, name: str) -> VariantRecord | None:
        """The row of a name as it is now; tens of microseconds.

        Raises:
            GymError: ``STATE_CORRUPT`` for a damaged row.
        """
        with self._connection() as connection:
            return Transaction(connection).get(name)

    def list(self, owner: str | None = None) -> Iterator[VariantRecord]:
        """All rows by name, or those of an owner; a page is held at a time.

        A damaged row is logged and left out, so that the others stay readable; ``get`` refuses it.
        """
        for row in self._rows(_SELECT, owner):
            try:
                record = VariantRecord.of_row(row)
            except GymError as error:
                _log.error("%s", error.message)
                continue
            yield record

    def names(self) -> Iterator[str]:
        """All names, those of damaged rows too."""
        for row in self._rows("SELECT name FROM variants"):
            yield str(row[0])

    def _rows(self, select: str, owner: str | None = None) -> Iterator[tuple[Any, ...]]:
        """Rows by name, which is their first column."""
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
        """How many there are."""
        with self._connection() as connection:
            return int(connection.execute("SELECT count(*) FROM variants").fetchone()[0])

    def key_state(self, owner: str, public_key: bytes) -> str | None:
        """``trusted`` or ``revoked``, the state of a key of an owner; None: unknown."""
        with self._connection() as connection:
            return Transaction(connection).key_state(owner, public_key)

    def set_key(self, owner: str, public_key: bytes, *, revoked: bool) -> None:
        """Set the state of a key of an owner; a revoked one stays revoked.

        Raises:
            GymError: ``KEY_REVOKED`` when a revoked key is to be trusted.
        """
        with self.writing() as transaction:
            transaction.set_key(owner, public_key, revoked=revoked)

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        """One write transaction: no other process writes meanwhile; durable when the block ends."""
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield Transaction(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection that no other thread has meanwhile."""
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
            name = getattr(error, "sqlite_errorname", "")  # what Python itself raises has none
            if name == "SQLITE_FULL":
                raise disk_full(self.path) from error
            if name.startswith("SQLITE_BUSY"):
                raise GymError(
                    ErrorCode.STATE_LOCKED,
                    f"{self.path} was locked by another process for {_BUSY_SECONDS:.0f} s",
                    "try again when it is done",
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
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if _version(connection) == 0:
            connection.execute("BEGIN IMMEDIATE")
            if _version(connection) == 0:  # nobody was faster
                for statement in _SCHEMA:
                    connection.execute(statement)
            connection.execute("COMMIT")
        found = _version(connection)
        if found != _SCHEMA_VERSION:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{self.path} has schema {found}, this version reads {_SCHEMA_VERSION}",
                "use the release of gym-fed that wrote it, or a newer one",
            )

    def _corrupt(self, error: sqlite3.Error) -> GymError:
        return GymError(
            ErrorCode.STATE_CORRUPT,
            f"{self.path} cannot be used: {error}",
            "take it from a backup; the deltas beside it are whole",
        )


class Transaction:
    """What can be read on a connection, and be changed inside ``VariantRegistry.writing``."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, name: str) -> VariantRecord | None:
        """As ``VariantRegistry.get``."""
        if not is_encodable(name):  # no column can hold it
            return None
        row = self._connection.execute(f"{_SELECT} WHERE name = ?", (name,)).fetchone()
        return None if row is None else VariantRecord.of_row(row)

    def put(self, record: VariantRecord) -> None:
        """Insert a row, or put it in place of the one of that name."""
        values = tuple(getattr(record, field.name) for field in fields(VariantRecord))
        self._connection.execute(f"INSERT OR REPLACE INTO variants ({_COLUMNS}) VALUES ({_PLACES})", values)

    def delete(self, name: str) -> None:
        self._connection.execute("DELETE FROM variants WHERE name = ?", (name,))

    def is_used(self, sha256: str) -> bool:
        """Whether any variant has this delta."""
        found = self._connection.execute("SELECT 1 FROM variants WHERE sha256 = ? LIMIT 1", (sha256,))
        return found.fetchone() is not None

    def has_keys(self, owner: str) -> bool:
        """Whether the state of any key of an owner is known."""
        found = self._connection.execute("SELECT 1 FROM keys WHERE owner = ? LIMIT 1", (owner,))
        return found.fetchone() is not None

    def key_state(self, owner: str, public_key: bytes) -> str | None:
        """As ``VariantRegistry.key_state``."""
        row = self._connection.execute(
            "SELECT revoked FROM keys WHERE owner = ? AND public_key = ?", (owner, public_key.hex())
        ).fetchone()
        return None if row is None else ("revoked" if row[0] else "trusted")

    def set_key(self, owner: str, public_key: bytes, *, revoked: bool) -> None:
        """As ``VariantRegistry.set_key``."""
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
        if revoked:  # another row: servers that have the variant in memory verify it again
            self._connection.execute(
                "UPDATE variants SET updated_at = max(updated_at + 1, ?) WHERE owner = ?",
                (int(time.time()), owner),
            )


def _text(raw: bytes) -> str:
    """Of a column; what is not UTF-8 is found by ``VariantRecord.of_row``, which can name the row."""
    return raw.decode("utf-8", "surrogateescape")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])
