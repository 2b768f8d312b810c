"""The hub's SQL database: SQLite in WAL mode with full synchronisation, or PostgreSQL.

Write transactions are serialised on both. SQLite's ``BEGIN IMMEDIATE`` takes its lock before it reads. On PostgreSQL an
advisory lock is taken before the transaction begins, so that its snapshot includes the writes of the previous one. The
transactions are also SERIALIZABLE: if a program that ignores the lock writes to the database, the transaction is rolled
back, and ``rerun`` runs it again. Threads of one process first queue for an in-process lock, since a thread that waits
for SQLite's lock sleeps up to 100 ms at a time and is overtaken by later ones.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, Table, create_engine, event, select, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DatabaseError

from gym_fed.core.errors import ErrorCode, GymError
from gym_server.observe.instruments import DATABASE_SECONDS, timed
from gym_server.store.failures import lock_timeout, mapped_errors, parse_url, shown
from gym_server.store.schema import check_version, create_tables
from gym_server.store.tables import settings
from gym_server.store.unavailable import StoreUnavailable, WriteConflict

LOCK_SECONDS = 30
"""How long a write transaction waits for the previous one, in seconds."""
WRITERS, HUBS = 0x67796D01, 0x67796D02
"""Ids of the PostgreSQL advisory locks of write transactions and of the running hub."""
_ATTEMPTS = 6
_FIRST_PAUSE_SECONDS = 0.05
_VALUES_AT_ONCE = 500

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")


def rerun(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method that is one write transaction, to retry it a few times if the database rolls it back.

    Nothing has been acknowledged before a retry. If the last attempt fails, its ``WriteConflict`` (``BUSY``) is raised.
    """

    @functools.wraps(method)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        for attempt in range(_ATTEMPTS - 1):
            with suppress(WriteConflict):
                return method(*args, **kwargs)
            time.sleep(random.uniform(0.5, 1.5) * _FIRST_PAUSE_SECONDS * 2**attempt)
        return method(*args, **kwargs)

    return again


class Database:
    """Transactions over one SQLAlchemy engine. A write transaction is durable when its block ends.

    Args:
        url: SQLAlchemy URL.
        read_only: Refuse write transactions; settings that are not stored have their defaults.
    """

    def __init__(self, url: str, read_only: bool = False) -> None:
        self._url = parse_url(url)
        self.read_only = read_only
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        self._turn = threading.Lock()
        self.engine = _sqlite(self._url, read_only) if self._is_sqlite else _postgresql(self._url)
        self.at_begin: list[Callable[[Connection], object]] = []
        """Functions called inside every write transaction, at its start; an exception aborts the transaction."""
        self.before_commit: list[Callable[[Connection], object]] = []
        """Functions called inside every write transaction, at its end."""
        self.after_commit: list[Callable[[Connection], object]] = []
        """Functions called once a write transaction is durable."""

    @classmethod
    def open(cls, url: str, folder: Path, read_only: bool = False) -> Database:
        """Open an existing or new database; a relative SQLite path is inside ``folder``.

        Raises:
            GymError: ``CONFIG_INVALID`` for an unusable URL, ``STATE_CORRUPT`` if the file is not a database or has a
                different version; ``UNAVAILABLE`` if the server does not answer.
        """
        prefix = "sqlite:///"
        if url.startswith(prefix) and not url.startswith(prefix + "/"):
            path = (folder / url.removeprefix(prefix)).resolve()
            if read_only and not path.exists():
                raise GymError(
                    ErrorCode.FILE_NOT_FOUND, f"no database {path}", "check that this is the hub's folder"
                )
            if not path.exists() and path.parent.is_dir():
                path.touch(mode=0o600)  # files that SQLite creates next to it get the same mode
            url = prefix + str(path)
        database = cls(url, read_only)
        try:
            if read_only:
                with database.reading() as tx:
                    check_version(tx, database.shown)
            else:
                with database.transaction() as tx:
                    create_tables(tx, database.shown)
        except StoreUnavailable as away:
            raise away.refusal from None
        except DatabaseError as error:
            raise GymError(
                ErrorCode.STATE_CORRUPT, f"cannot open the database {database.shown}: {error.orig}"
            ) from error
        return database

    @property
    def shown(self) -> str:
        """Return the URL for messages, without a password."""
        return shown(self._url)

    @property
    def url(self) -> str:
        """Return the URL with the password, for connecting; never put it into a message."""
        return self._url.render_as_string(hide_password=False)

    @property
    def sqlite_path(self) -> Path | None:
        """Return the file of a SQLite database; None for other databases, or one in memory."""
        return Path(self._url.database) if self._is_sqlite and self._url.database else None

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Run one write transaction: commit at the end of the block, roll back on any exception.

        Raises:
            GymError: ``PERMISSION_DENIED`` if the database was opened read-only.
            StoreUnavailable: If the database is unreachable; it is then unknown whether a running commit was stored.
        """
        if self.read_only:
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                "the hub's folder was opened read-only",
                "use the dashboard of the running hub: gym-server run --dashboard HOST:PORT",
            )
        with (
            timed(DATABASE_SECONDS, "write"),
            mapped_errors(self._url),
            self.engine.connect() as connection,
        ):
            with self._in_turn(), self._alone(connection), connection.begin():
                for call in self.at_begin:
                    call(connection)
                yield connection
                for call in self.before_commit:
                    call(connection)
            for call in self.after_commit:
                call(connection)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Run queries on one consistent snapshot of the database, without the write lock."""
        options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}  # see _begin
        if not self._is_sqlite:
            options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with (
            timed(DATABASE_SECONDS, "read"),
            mapped_errors(self._url),
            self.engine.connect().execution_options(**options) as connection,
        ):
            yield connection

    @contextmanager
    def change_counter(self) -> Iterator[Callable[[], int | None]]:
        """Yield a function, for one thread, whose value changes after each commit; it returns None if changes are
        unknown.

        SQLite reports changes by others per connection (``PRAGMA data_version``), so one connection stays open.
        """
        if not self._is_sqlite:
            yield lambda: None
            return
        connection = self.engine.raw_connection()
        try:
            yield lambda: int(connection.execute("PRAGMA data_version").fetchone()[0])
        finally:
            connection.close()

    def setting(self, key: str, default: str) -> str:
        """Return the stored value of ``key``; store ``default`` on first use."""
        with self.reading() if self.read_only else self.transaction() as tx:
            value = tx.scalar(select(settings.c.value).where(settings.c.key == key))
            if value is None and not self.read_only:
                tx.execute(settings.insert().values(key=key, value=default))
        return default if value is None else str(value)

    def set(self, key: str, value: str) -> None:
        """Store a setting in a separate transaction."""
        with self.transaction() as tx:
            put_setting(tx, key, value)

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Hold this process's write lock for the block."""
        if not self._turn.acquire(timeout=LOCK_SECONDS):
            raise lock_timeout(self._url)
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def _alone(self, connection: Connection) -> Iterator[None]:
        """Hold the write lock around a PostgreSQL transaction.

        The lock belongs to the session and is taken before the transaction begins. If the transaction took it with a
        query, its snapshot would be older than the lock and lack the previous writer's changes.
        """
        if self._is_sqlite:
            yield
            return
        _outside(connection, f"SELECT pg_advisory_lock({WRITERS})")
        try:
            yield
        finally:
            if not connection.invalidated and not connection.closed:
                try:
                    _outside(connection, f"SELECT pg_advisory_unlock({WRITERS})")
                except BaseException:
                    connection.invalidate()  # closing the session releases the lock
                    raise


def insert_if_absent(tx: Connection, table: Table, **values: Any) -> None:
    """Insert a row unless a row with its key exists."""
    dialect = import_module(f"sqlalchemy.dialects.{tx.dialect.name}")
    tx.execute(dialect.insert(table).values(**values).on_conflict_do_nothing())


def chunks(values: Iterable[V]) -> list[list[V]]:
    """Split the values of an SQL ``IN`` into lists; SQLite accepts 32,766 parameters, and older versions 999."""
    rest = list(values)
    return [rest[start : start + _VALUES_AT_ONCE] for start in range(0, len(rest), _VALUES_AT_ONCE)]


def put_setting(tx: Connection, key: str, value: str) -> None:
    """Store a setting, replacing its current value."""
    tx.execute(settings.delete().where(settings.c.key == key))
    tx.execute(settings.insert().values(key=key, value=value))


def _outside(connection: Connection, statement: str) -> None:
    """Execute a statement outside of any transaction."""
    connection.execution_options(isolation_level="AUTOCOMMIT")
    connection.execute(text(statement))
    connection.commit()
    connection.execution_options(isolation_level="SERIALIZABLE")


def _postgresql(url: URL) -> Engine:
    if url.get_backend_name() != "postgresql":
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"storage.database: {url.get_backend_name()} is neither sqlite nor postgresql",
            "write sqlite:///hub.db, or postgresql+psycopg://USER@HOST/DATABASE",
        )
    engine = create_engine(
        url,
        isolation_level="SERIALIZABLE",
        pool_pre_ping=True,  # tolerates a restart of the server in the meantime
        pool_size=8,
        max_overflow=32,
        hide_parameters=True,
        # Whatever the database's encoding is: the driver returns the texts of one in SQL_ASCII as bytes otherwise.
        connect_args={"connect_timeout": 10, "application_name": "gym-server", "client_encoding": "utf8"},
    )

    @event.listens_for(engine, "connect")
    def _session(connection: Any, _: Any) -> None:
        with connection.cursor() as cursor:
            # An acknowledged commit must be on disk, regardless of the server's default.
            cursor.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
            cursor.execute(f"SET lock_timeout = '{LOCK_SECONDS}s'")
            # Locks of an unreachable machine are released within half a minute.
            for name, seconds in (("idle", 10), ("interval", 5), ("count", 3)):
                cursor.execute(f"SET tcp_keepalives_{name} = {seconds}")
        connection.commit()

    return engine


def _sqlite(url: URL, read_only: bool) -> Engine:
    engine = create_engine(url, hide_parameters=True)

    @event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions are begun by the listener below
        wait = f"busy_timeout={1000 * LOCK_SECONDS}"
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", wait):
            connection.execute(f"PRAGMA {pragma}")
        if read_only:
            connection.execute("PRAGMA query_only=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A deferred transaction reads one snapshot from its first select on, and does not block writers.
        only_reads = connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
        connection.exec_driver_sql("BEGIN" if only_reads else "BEGIN IMMEDIATE")

    return engine
