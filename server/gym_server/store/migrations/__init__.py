"""Databases of earlier releases are brought to today's schema when they are opened, by alembic, in one transaction.

A change of ``tables.py`` comes with a file in ``versions/``: ``rNNNN_what.py`` with ``revision = "NNNN"``, the
``down_revision`` before it and ``upgrade()``, and with ``HEAD`` below. Both databases are to understand it: SQLite
alters little in place, ``op.batch_alter_table`` does the rest. A new database is made from ``tables.py``, and a test
holds that the migrated one is the same.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, String, Table, inspect, select

from gym_fed.core.errors import ErrorCode, GymError
from gym_server.store.tables import metadata, settings

HEAD = "0006"
"""The newest revision; known here, so that nobody waits for alembic whose database is up to date."""
BY_ALEMBIC = "alembic"
"""Schema version in the settings, which release 0.1 reads, and refuses."""

_version = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))


def bring_up_to_date(tx: Connection, shown: str) -> None:
    """Make the tables of a new database, or change those of an earlier release.

    Args:
        tx: A write transaction.
        shown: What messages call the database.

    Raises:
        GymError: ``STATE_CORRUPT`` for a database of a later release, or of something else.
    """
    names = set(inspect(tx).get_table_names())
    if settings.name not in names:
        if both := sorted(names & set(metadata.tables)):
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{shown} has a table {both[0]!r} that is not of a hub",
                "give the hub a database of its own",
            )
        metadata.create_all(tx)
        _version.create(tx)
        tx.execute(_version.insert().values(version_num=HEAD))
        tx.execute(settings.insert().values(key="schema_version", value=BY_ALEMBIC))
        return
    found = tx.scalar(select(_version.c.version_num)) if _version.name in names else None
    if found == HEAD:
        return
    schema = tx.scalar(select(settings.c.value).where(settings.c.key == "schema_version"))
    if found is None and schema not in (None, "1", "2"):
        raise _unknown(shown, str(schema))
    _upgrade(tx, found, shown)
    tx.execute(settings.delete().where(settings.c.key == "schema_version"))
    tx.execute(settings.insert().values(key="schema_version", value=BY_ALEMBIC))


def require_up_to_date(tx: Connection, shown: str) -> None:
    """What ``bring_up_to_date`` would leave as it is.

    Raises:
        GymError: ``STATE_CORRUPT`` for any other database.
    """
    names = set(inspect(tx).get_table_names())
    found = tx.scalar(select(_version.c.version_num)) if _version.name in names else None
    if found != HEAD:
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"{shown} is not of this release, and is not changed by who only reads it",
            "gym-server status --dir HUB brings it up to date",
        )


def _upgrade(tx: Connection, found: str | None, shown: str) -> None:
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    script = ScriptDirectory(str(Path(__file__).parent))
    if found is not None and found not in {step.revision for step in script.walk_revisions()}:
        raise _unknown(shown, found)

    def steps(revision: object, context: object) -> object:
        return script._upgrade_revs("head", found or "base")

    with EnvironmentContext(Config(), script, fn=steps, destination_rev="head") as environment:
        environment.configure(connection=tx, target_metadata=metadata)
        environment.run_migrations()


def _unknown(shown: str, schema: str) -> GymError:
    return GymError(
        ErrorCode.STATE_CORRUPT,
        f"{shown} has schema {schema[:40]}, which this version of gym-server does not know",
        "a later version wrote it: install that one (docs/install.md), or put an earlier backup back",
    )
