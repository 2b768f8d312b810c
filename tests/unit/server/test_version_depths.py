"""How many versions lead to the current one is worked out from each row once, however often a hub is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_server.rounds.versions import VersionDepths, heights_to, newest_to, versions_to
from gym_server.store.database import Database
from gym_server.store.tables import versions
from sqlalchemy import Connection, event

PARENTS = {1: 0, 2: 1, 3: 2, 4: 1, 5: 4, 6: 5, 7: 0}
"""The coordinator went back to version 1 after 3, and to the base after 6."""


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    found = Database.open("sqlite:///hub.db", tmp_path)
    with found.transaction() as tx:
        for height, parent in PARENTS.items():
            add(tx, height, parent)
    yield found
    found.close()


def add(tx: Connection, height: int, parent: int) -> None:
    row = {
        "height": height,
        "parent": parent,
        "digest": f"sha256:{height}",
        "server_round": height,
        "soup_sha256": "ab",
        "soup_bytes": 1,
        "num_updates": 1,
        "committed_at": 0.0,
    }
    tx.execute(versions.insert().values(row))


def rows_read(tx: Connection, work: Any) -> tuple[Any, list[Any]]:
    """What ``work`` returns, and the bounds of its statements."""
    bounds: list[Any] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("SELECT"):  # and not what begins a transaction
            bounds.append(parameters)

    event.listen(tx, "before_cursor_execute", note)
    found = work()
    event.remove(tx, "before_cursor_execute", note)
    return found, bounds


def test_depths_are_those_of_the_lineage_through_every_rollback(database: Database) -> None:
    depths = VersionDepths()
    with database.reading() as tx:
        assert [depths.of(tx, height) for height in range(8)] == [0, 1, 2, 3, 2, 3, 4, 1]
        assert all(depths.of(tx, height) == len(heights_to(tx, height)) for height in PARENTS)


def test_a_row_is_read_once(database: Database) -> None:
    depths = VersionDepths()
    with database.reading() as tx:
        assert rows_read(tx, lambda: depths.of(tx, 6)) == (4, [(0,)])
        assert rows_read(tx, lambda: (depths.of(tx, 6), depths.of(tx, 3))) == ((4, 3), [])
    with database.transaction() as tx:
        add(tx, 8, 6)
        assert rows_read(tx, lambda: depths.of(tx, 8)) == (5, [(7,)])


def test_the_newest_of_a_lineage_are_found_without_the_others(database: Database) -> None:
    with database.reading() as tx:
        assert newest_to(tx, 6, 3) == [6, 5, 4]
        assert newest_to(tx, 6, 9) == [6, 5, 4, 1]
        assert newest_to(tx, 0, 3) == []
        assert len(rows_read(tx, lambda: newest_to(tx, 6, 2))[1]) == 1
        assert [version.height for version in versions_to(tx, 6, 9)] == [6, 5, 4, 1]
