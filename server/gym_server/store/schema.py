"""Create the tables of a new database, and refuse a database with a different schema version.

Increase ``SCHEMA_VERSION`` with every change to ``tables.py``.
"""

from __future__ import annotations

from sqlalchemy import Connection, inspect, select

from gym_fed.core.errors import ErrorCode, GymError
from gym_server.store.tables import metadata, settings

SCHEMA_VERSION = 4
"""Version of the schema in ``tables.py``; 1 and 2 belonged to release 0.1."""
_KEY = "schema_version"


def create_tables(tx: Connection, shown: str) -> None:
    """Create the tables of a new database, or check the version of an existing one.

    Args:
        tx: A write transaction.
        shown: The database's name in messages.

    Raises:
        GymError: ``STATE_CORRUPT`` if the database has a different schema version or belongs to another program.
    """
    names = set(inspect(tx).get_table_names())
    if settings.name in names:
        check_version(tx, shown)
        return
    if shared := sorted(names & set(metadata.tables)):
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"{shown} has a table {shared[0]!r} that does not belong to a hub",
            "use a separate database for the hub",
        )
    metadata.create_all(tx)
    tx.execute(settings.insert().values(key=_KEY, value=str(SCHEMA_VERSION)))


def check_version(tx: Connection, shown: str) -> None:
    """Raise ``STATE_CORRUPT`` unless the database has schema version ``SCHEMA_VERSION``."""
    version = None
    if settings.name in inspect(tx).get_table_names():
        version = tx.scalar(select(settings.c.value).where(settings.c.key == _KEY))
    if version == str(SCHEMA_VERSION):
        return
    is_later = str(version).isdecimal() and int(str(version)) > SCHEMA_VERSION
    raise GymError(
        ErrorCode.STATE_CORRUPT,
        f"{shown} has schema {str(version)[:40]}; this version of gym-server reads only schema {SCHEMA_VERSION}",
        "a later version wrote it: install that one (docs/install.md), or restore an earlier backup"
        if is_later
        else "an earlier version wrote it: install that one, or start a new hub with gym-server init",
    )
