"""Copy the rows of a hub's tables between databases, since a backup's database is always an SQLite file.

A restore reads only rows. Triggers, views and functions, which anybody with write access to the backup may have added,
are neither copied nor executed.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import func, inspect, select, text
from sqlalchemy.exc import DatabaseError

from gym_fed.core.errors import ErrorCode, GymError
from gym_server.store.database import Database
from gym_server.store.tables import metadata, nodes, settings

_ROWS = 1000


def copy_rows(source: Database, target: Database) -> None:
    """Copy all rows from one snapshot of the source into a database with empty tables, in one transaction."""
    with source.reading() as rows, target.transaction() as tx:
        tx.execute(settings.delete())  # removes the defaults of a new database
        for table in metadata.sorted_tables:
            for part in rows.execute(select(table)).mappings().partitions(_ROWS):
                tx.execute(table.insert(), [dict(row) for row in part])
        if tx.dialect.name == "postgresql":  # explicit ids do not advance PostgreSQL's sequences
            sequence = func.pg_get_serial_sequence(nodes.name, nodes.c.node_id.name)
            tx.execute(select(func.setval(sequence, select(func.max(nodes.c.node_id)).scalar_subquery())))


def load_rows(archive: Path, url: str, folder: Path) -> None:
    """Copy a backup's database into a new one.

    Args:
        archive: The SQLite file from the backup.
        url: The new database; a relative SQLite path is inside ``folder``.
        folder: The hub's folder.

    Raises:
        GymError: ``FILE_EXISTS`` if the new database has tables; ``STATE_CORRUPT`` if the archive is not the database
            of a hub.
    """
    source = Database.open(f"sqlite:///{archive}", archive.parent, read_only=True)
    target = Database(
        url if url.startswith("postgresql") else f"sqlite:///{folder / url.removeprefix('sqlite:///')}"
    )
    try:
        with source.reading() as tx:
            kinds = {name: kind for name, kind in tx.execute(text("SELECT name, type FROM sqlite_master"))}
        if other := [name for name in metadata.tables if kinds.get(name) != "table"]:
            raise GymError(ErrorCode.STATE_CORRUPT, f"the database of the backup has no table {other[0]}")
        if target.sqlite_path is not None:
            target.sqlite_path.touch(mode=0o600)
        with target.reading() as tx:
            if inspect(tx).get_table_names():
                raise GymError(
                    ErrorCode.FILE_EXISTS,
                    f"the database {target.shown} is not empty",
                    "create a new one, and pass it with --database",
                )
        Database.open(target.url, folder).close()  # creates the tables
        copy_rows(source, target)
    except DatabaseError as error:
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"the database of the backup cannot be copied to {target.shown}: {error.orig}",
        ) from error
    finally:
        source.close()
        target.close()
