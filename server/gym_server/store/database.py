"""The SQL side of the hub: SQLite in WAL mode with full synchronisation, or any database SQLAlchemy reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, select
from sqlalchemy.exc import DatabaseError

from gym_fed.errors import ErrorCode, GymError
from gym_fed.system_errors import system_error
from gym_server.store.migrations import SCHEMA_VERSION, migrate
from gym_server.store.tables import metadata, settings


class Database:
    """Transactions over one engine. A write transaction is durable when its block ends."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = create_engine(url)
        self.before_commit: list[Callable[[Connection], object]] = []
        """Called at the end of every write transaction, inside it."""
        self.after_commit: list[Callable[[Connection], object]] = []
        """Called when a write transaction is durable."""
        if self.engine.dialect.name == "sqlite":
            _make_sqlite_durable(self.engine)

    @classmethod
    def open(cls, url: str, folder: Path) -> Database:
        """Open an existing or new database; a relative SQLite path is inside ``folder``.

        Raises:
            GymError: ``STATE_CORRUPT`` when the file is no database or has another schema version.
        """
        prefix = "sqlite:///"
        if url.startswith(prefix) and not url.startswith(prefix + "/"):
            path = (folder / url.removeprefix(prefix)).resolve()
            if not path.exists() and path.parent.is_dir():
                path.touch(mode=0o600)  # what SQLite puts beside it gets the same mode
            url = prefix + str(path)
        database = cls(url)
        try:
            metadata.create_all(database.engine)
            found = database.setting("schema_version", SCHEMA_VERSION)
            with database.transaction() as tx:
                found = migrate(tx, found)
        except DatabaseError as error:
            refused = system_error(error)
            if refused is not None:
                raise GymError(refused.code, f"{url}: {refused.message}", refused.hint) from error
            raise GymError(
                ErrorCode.STATE_CORRUPT, f"cannot open the database {url}: {error.orig}"
            ) from error
        if found != SCHEMA_VERSION:
            raise GymError(
                ErrorCode.STATE_CORRUPT, f"{url} has schema {found}, this version reads {SCHEMA_VERSION}"
            )
        return database

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One write transaction: commits at the end, rolls back on any exception."""
        with self.engine.connect() as connection:
            with connection.begin():
                yield connection
                for call in self.before_commit:
                    call(connection)
            for call in self.after_commit:
                call(connection)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Reads without taking the write lock."""
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Reads that all see one state of the database, without taking the write lock."""
        level = "AUTOCOMMIT" if self.engine.dialect.name == "sqlite" else "REPEATABLE READ"
        with self.engine.connect().execution_options(isolation_level=level) as connection:
            yield connection

    def setting(self, key: str, default: str) -> str:
        """The stored value of ``key``, stored as ``default`` on first use."""
        with self.transaction() as tx:
            value = tx.scalar(select(settings.c.value).where(settings.c.key == key))
            if value is None:
                tx.execute(settings.insert().values(key=key, value=default))
        return default if value is None else str(value)

    def set(self, key: str, value: str) -> None:
        """Store a setting."""
        with self.transaction() as tx:
            tx.execute(settings.delete().where(settings.c.key == key))
            tx.execute(settings.insert().values(key=key, value=value))

    def close(self) -> None:
        self.engine.dispose()


def _make_sqlite_durable(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions are begun by the listener below
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=30000"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # What only reads sees one state from its first select on, and takes no lock that a writer waits for.
        only_reads = connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
        connection.exec_driver_sql("BEGIN" if only_reads else "BEGIN IMMEDIATE")
