"""The lock that `gym-server run` holds on its database, so that only one hub runs on it across folders and machines.

On PostgreSQL it is an advisory lock of a separate session. A hub may lose that session because of a server restart or a
network failure, and another hub may take over. Each hub therefore writes a token into the database when it starts, and
checks it in every write transaction. Two hubs can never both write.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from sqlalchemy import Connection, select, text
from sqlalchemy.exc import DBAPIError

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.file_lock import lock
from gym_server.store.database import HUBS, Database
from gym_server.store.tables import settings
from gym_server.store.unavailable import StoreUnavailable

_TOKEN = "running_hub"
_STALE_LOCK_SECONDS = 2.0


class HubLock:
    """The exclusive lock for running a database's rounds, held from construction until ``release``.

    Raises:
        GymError: ``STATE_LOCKED`` if another hub runs on it.
        StoreUnavailable: If the database is unreachable.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._file: IO[str] | None = None
        self._session: Connection | None = None
        if database.engine.dialect.name == "sqlite":
            path = database.sqlite_path
            self._file = None if path is None else locked_file(Path(f"{path}.lock"), _locked(database))
            return
        end = time.monotonic() + _STALE_LOCK_SECONDS
        while (session := self._take()) is None:  # the lock of a killed hub is released shortly
            if time.monotonic() > end:
                raise _locked(database)
            time.sleep(0.1)
        self._session = session
        self._token = secrets.token_hex(16)
        database.set(_TOKEN, self._token)
        database.at_begin.append(self._check)

    def keep(self) -> None:
        """Check and renew the lock; call it every few seconds.

        Raises:
            GymError: ``STATE_LOCKED`` if another hub has taken over the database.
            StoreUnavailable: If the database is unreachable.
        """
        if self._file is not None:
            return
        try:
            if self._session is not None:
                self._session.execute(text("SELECT 1"))
                return
        except DBAPIError:
            self._drop()
        with self._database.reading() as tx:
            self._check(tx)
        self._session = self._take()
        if self._session is None:
            what = f"{self._database.shown}: the lock of this hub's broken connection is not released yet"
            raise StoreUnavailable(GymError(ErrorCode.BUSY, what))

    def release(self) -> None:
        """Release the lock, so that another hub can start."""
        if self._file is not None:
            self._file.close()
        self._drop()
        if self._check in self._database.at_begin:
            self._database.at_begin.remove(self._check)

    def _take(self) -> Connection | None:
        """Return a session that holds the lock; None if another session holds it."""
        from gym_server.store.failures import mapped_errors

        with mapped_errors(self._database.engine.url):
            session = self._database.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            try:
                session.detach()  # must not return to the pool
                taken = session.scalar(text(f"SELECT pg_try_advisory_lock({HUBS})"))
            except BaseException:
                session.close()
                raise
        if taken is not True:
            session.close()
            return None
        return session

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with suppress(DBAPIError):  # already closed
                session.close()

    def _check(self, tx: Connection) -> None:
        if tx.scalar(select(settings.c.value).where(settings.c.key == _TOKEN)) != self._token:
            raise _locked(self._database)


def locked_file(path: Path, refusal: GymError) -> IO[str]:
    """Open a file and lock it until it is closed; the kernel also releases the lock when the process ends.

    Raises:
        GymError: The given ``refusal``, if another process has locked the file.
    """
    file = open(path, "a")  # noqa: SIM115 (held by the caller)
    try:
        lock(file)
    except OSError as error:
        file.close()
        raise refusal from error
    return file


def _locked(database: Database) -> GymError:
    return GymError(
        ErrorCode.STATE_LOCKED,
        f"another gym-server is running on the database {database.shown}",
        "stop it first; every hub needs its own database",
    )
