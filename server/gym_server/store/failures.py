"""Mapping of database errors to error codes with hints. No message contains the database's password."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.system_errors import system_error
from gym_server.store.unavailable import StoreUnavailable, WriteConflict

_CONFLICTS = {"40001", "40P01"}  # serialization_failure, deadlock_detected
_LOCK_TIMEOUT = "55P03"
_GONE = (
    "08",
    "57P",
    "53300",
)  # lost connections, shutdowns and too many connections, by prefix of the SQLSTATE
_CODES = {
    "53100": (ErrorCode.DISK_FULL, "free space on the database's disk; then run the hub again"),
    "25006": (ErrorCode.NOT_WRITABLE, "storage.database is a standby or a read-only database"),
    "42501": (ErrorCode.NOT_WRITABLE, "grant the role the right to create and change tables in the database"),
}


def parse_url(text: str) -> URL:
    """Parse a database URL; the error does not quote an invalid URL, which may contain a password.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    try:
        url = make_url(text)
        url.get_dialect().import_dbapi()
        return url
    except (ArgumentError, NoSuchModuleError, ValueError):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            "storage.database is not a database URL (not shown, since it may contain a password)",
            "write sqlite:///hub.db, or postgresql+psycopg://USER@HOST/DATABASE with the password in PGPASSFILE",
        ) from None
    except ImportError as error:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"storage.database needs a driver that is not installed: {error.name}",
            "pip install 'gym-fed[postgres]', and begin the URL with postgresql+psycopg://",
        ) from None


def shown(url: URL) -> str:
    """Return the URL without its password, including one in the query parameters."""
    secret = {name: "***" for name in url.query if name not in ("host", "port", "user", "sslmode")}
    return url.update_query_dict(secret).render_as_string(hide_password=True)


@contextmanager
def mapped_errors(url: URL) -> Iterator[None]:
    """Convert database errors inside the block to ``StoreUnavailable`` or ``GymError``.

    Raises:
        StoreUnavailable: If the database is unreachable, too busy, full or read-only, or rolled the transaction back
            (``WriteConflict``).
        GymError: ``USAGE`` for text that the database cannot store.
    """
    try:
        yield
    except PoolTimeout:
        raise _away(shown(url), "every connection is in use") from None
    except DBAPIError as error:
        meaning = _meaning(url, error)
        if meaning is None:
            raise
        raise meaning from None


def _meaning(url: URL, error: DBAPIError) -> Exception | None:
    name, cause = shown(url), _text(url, error)
    state = str(getattr(error.orig, "sqlstate", None) or "")
    if state in _CONFLICTS:
        return WriteConflict(name)
    if state == _LOCK_TIMEOUT:
        return lock_timeout(url)
    if state in _CODES:
        code, hint = _CODES[state]
        return _away(name, cause, code, hint)
    if isinstance(error, DataError) and not url.drivername.startswith("sqlite"):
        return GymError(ErrorCode.USAGE, f"the database cannot store a text or number: {cause}")
    if not state and type(error).__name__ == "ProgrammingError" and hasattr(error.orig, "sqlstate"):
        return GymError(ErrorCode.CONFIG_INVALID, f"storage.database: {cause}", "correct the URL's options")
    if error.connection_invalidated or state.startswith(_GONE) or _never_connected(error, state):
        hint = "check the database; the password is read from PGPASSFILE or ~/.pgpass if the URL has none"
        return _away(name, cause, ErrorCode.UNAVAILABLE, hint)
    refused = system_error(error) if url.drivername.startswith("sqlite") else None
    return None if refused is None else _away(name, refused.message, refused.code, refused.hint)


def lock_timeout(url: URL) -> StoreUnavailable:
    """Create the error for a write transaction that waited too long for the previous one."""
    return _away(shown(url), "another transaction has held the lock for too long")


def _away(
    name: str, what: str, code: ErrorCode = ErrorCode.BUSY, hint: str = "try later"
) -> StoreUnavailable:
    return StoreUnavailable(GymError(code, f"{name}: {what}", hint))


def _never_connected(error: DBAPIError, state: str) -> bool:
    """Return True if no connection was established; PostgreSQL drivers then raise an error without an SQLSTATE."""
    return not state and type(error).__name__ == "OperationalError" and hasattr(error.orig, "sqlstate")


def _text(url: URL, error: DBAPIError) -> str:
    """Return the driver's message on one line."""
    text = " ".join(str(error.orig).split())
    return text.replace(url.password, "***") if url.password else text
