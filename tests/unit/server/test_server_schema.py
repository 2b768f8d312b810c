"""A new database gets the tables of this version; every other database is refused and left as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from gym_server.store.database import Database
from gym_server.store.schema import SCHEMA_VERSION
from gym_server.store.tables import metadata, settings
from sqlalchemy import inspect, select, text

from gym_fed.core.errors import ErrorCode, GymError


def test_a_new_database_has_the_tables_and_the_version_of_the_schema(
    database_url: str, tmp_path: Path
) -> None:
    for _ in range(2):
        database = Database.open(database_url, tmp_path)
        with database.reading() as tx:
            assert set(inspect(tx).get_table_names()) == set(metadata.tables)
        assert database.setting("schema_version", "") == str(SCHEMA_VERSION)
        database.close()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("version", "remedy"),
    [("1", "start a new hub"), ("alembic", "start a new hub"), ("9999", "a later version wrote it")],
)
def test_a_database_of_another_version_is_refused_with_the_remedy_and_left_as_it_is(
    database_url: str, tmp_path: Path, version: str, remedy: str, read_only: bool
) -> None:
    database = Database.open(database_url, tmp_path)
    with database.transaction() as tx:
        tx.execute(settings.update().values(value=version))
    with pytest.raises(
        GymError, match=f"has schema {version}; .* reads only schema {SCHEMA_VERSION}"
    ) as refusal:
        Database.open(database_url, tmp_path, read_only)
    assert refusal.value.code is ErrorCode.STATE_CORRUPT
    assert remedy in str(refusal.value.hint)
    with database.reading() as tx:
        assert tx.scalars(select(settings.c.value)).all() == [version]


def test_a_database_of_another_program_is_refused(database_url: str, tmp_path: Path) -> None:
    made = Database(database_url.replace("///hub.db", f"///{tmp_path}/hub.db"))
    with made.transaction() as tx:
        tx.execute(text("CREATE TABLE accounts (id INTEGER)"))
    with pytest.raises(GymError, match="a separate database"):
        Database.open(database_url, tmp_path)
