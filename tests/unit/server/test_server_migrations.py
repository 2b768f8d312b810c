"""A database of an earlier release becomes today's, on SQLite and on PostgreSQL, and its ledger stays true."""

from __future__ import annotations

import ast
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from gym_server.ledger.chain import Ledger
from gym_server.rounds.round_store import RoundStore
from gym_server.store import migrations
from gym_server.store.database import Database
from gym_server.store.migrations.versions.r0001_release_0_1 import schema
from gym_server.store.tables import accounts, credits, updates
from gym_server.store.tables import metadata as today
from sqlalchemy import Connection, create_engine, inspect, select, text

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey

GOLDEN = Path(__file__).parents[1] / "golden"
KEY = GOLDEN / "hub-0.1-ledger.pem"
SEQUENCES = "SELECT setval('nodes_node_id_seq', (SELECT max(node_id) FROM nodes))"


def written_by_0_1(url: str, folder: Path) -> None:
    """Bring what release 0.1 wrote into an empty database."""
    path = folder / ("hub.db" if url.startswith("sqlite") else "source.db")
    with sqlite3.connect(path) as file:
        file.executescript((GOLDEN / "hub-0.1.sql").read_text())
    if url.startswith("sqlite"):
        return
    source, target = create_engine(f"sqlite:///{path}"), create_engine(url)
    with source.connect() as old, target.begin() as new:
        schema.create_all(new)
        for table in schema.sorted_tables:
            rows = [row._asdict() for row in old.execute(select(table))]
            if rows:
                new.execute(table.insert(), rows)
        new.execute(text(SEQUENCES))
    source.dispose()
    target.dispose()


def form_of(tx: Connection) -> dict[str, Any]:
    """Everything of the schema that the code relies on."""
    found, form = inspect(tx), {}
    for table in found.get_table_names():
        form[table] = {
            "columns": {
                column["name"]: (str(column["type"]), column["nullable"], column["default"])
                for column in found.get_columns(table)
            },
            "key": found.get_pk_constraint(table)["constrained_columns"],
            "unique": sorted(u["column_names"] for u in found.get_unique_constraints(table)),
            "indexes": sorted((i["name"], i["column_names"], i["unique"]) for i in found.get_indexes(table)),
        }
    return form


def form(database: Database) -> dict[str, Any]:
    with database.reading() as tx:
        return form_of(tx)


@pytest.fixture
def beside(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> Database:
    """A new database of the same kind as ``database_url``."""
    (tmp_path / "beside").mkdir()
    if not database_url.startswith("sqlite"):
        database_url = request.getfixturevalue("postgres").new_database()
    return Database.open(database_url, tmp_path / "beside")


def test_a_database_of_0_1_is_migrated_with_its_rounds_credits_and_ledger(
    database_url: str, tmp_path: Path
) -> None:
    written_by_0_1(database_url, tmp_path)
    key = SigningKey.load(KEY)
    for _ in range(2):  # the second time there is nothing left to do
        database = Database.open(database_url, tmp_path)
        found = Ledger(database, key)
        assert found.verify()["entries"] == 18
        with database.reading() as tx:
            assert len(tx.execute(select(accounts)).all()) == 2
            assert {row.verdict for row in tx.execute(select(updates))} == {"merged"}
            assert sum(tx.scalars(select(credits.c.amount))) == 2000
        database.close()
    database = Database.open(database_url, tmp_path)
    round_store = RoundStore(database, found := Ledger(database, key), "sha256:" + "0" * 64)
    assert round_store.num_committed() == 2
    assert round_store.open_next().server_round == 3
    with database.transaction() as tx:
        assert found.append(tx, "note", {"goes": "on"}).sequence == 19
    assert found.verify()["entries"] == 19


def test_a_migrated_database_has_the_schema_of_a_new_one(
    database_url: str, tmp_path: Path, beside: Database
) -> None:
    written_by_0_1(database_url, tmp_path)
    assert form(Database.open(database_url, tmp_path)) == form(beside)


def test_a_migrated_database_of_schema_1_has_the_schema_of_a_new_one(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "hub.db") as file:
        file.executescript((GOLDEN / "hub-schema-1.sql").read_text())
        file.execute("INSERT INTO settings VALUES ('schema_version', '1')")
    (tmp_path / "new").mkdir()
    new = Database.open("sqlite:///hub.db", tmp_path / "new")
    assert form(Database.open("sqlite:///hub.db", tmp_path)) == form(new)


def test_the_first_migration_knows_the_schema_of_0_1(tmp_path: Path) -> None:
    written_by_0_1("sqlite:///hub.db", tmp_path)
    forms = []
    for name in ("hub.db", "made.db"):
        engine = create_engine(f"sqlite:///{tmp_path / name}")
        with engine.begin() as tx:
            schema.create_all(tx)
            forms.append(form_of(tx))
        engine.dispose()
    assert forms[0] == forms[1]


def test_every_migration_follows_the_one_before_it_up_to_the_head_that_the_code_names() -> None:
    script = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert script.get_heads() == [migrations.HEAD]
    assert [step.revision for step in script.walk_revisions()][-1] == "0001"


def test_no_migration_reads_todays_tables() -> None:
    """A step records what was: were it made of today's tables, it would do another thing tomorrow."""
    for file in (Path(migrations.__file__).parent / "versions").glob("r*.py"):
        imported = [n.module for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom)]
        assert "gym_server.store.tables" not in imported, file.name


def test_a_new_database_is_at_the_head_and_release_0_1_refuses_it(database_url: str, tmp_path: Path) -> None:
    database = Database.open(database_url, tmp_path)
    with database.reading() as tx:
        assert tx.scalar(text("SELECT version_num FROM alembic_version")) == migrations.HEAD
    assert database.setting("schema_version", "2") == "alembic", "0.1 opens what says 2"
    assert set(form(database)) == {*today.tables, "alembic_version"}


def test_a_database_of_a_later_release_is_refused_with_the_remedy(database_url: str, tmp_path: Path) -> None:
    database = Database.open(database_url, tmp_path)
    with database.transaction() as tx:
        tx.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(GymError, match="has schema 9999") as refusal:
        Database.open(database_url, tmp_path)
    assert refusal.value.code is ErrorCode.STATE_CORRUPT
    assert "install that one" in str(refusal.value.hint)
    with database.reading() as tx:
        assert tx.scalar(text("SELECT version_num FROM alembic_version")) == "9999"


def test_a_migration_that_fails_leaves_the_database_as_it_was(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_by_0_1(database_url, tmp_path)
    engine = Database(database_url.replace("///hub.db", f"///{tmp_path}/hub.db"))
    before = form(engine)
    upgrade = migrations._upgrade

    def fails(tx: Connection, found: str | None, shown: str) -> None:
        upgrade(tx, found, shown)
        raise RuntimeError("the power went")

    monkeypatch.setattr(migrations, "_upgrade", fails)
    with pytest.raises(RuntimeError):
        Database.open(database_url, tmp_path)
    monkeypatch.undo()
    assert form(engine) == before
    assert Ledger(Database.open(database_url, tmp_path), SigningKey.load(KEY)).verify()["entries"] == 18


def test_a_database_of_something_else_is_not_made_a_hubs(database_url: str, tmp_path: Path) -> None:
    made = Database(database_url.replace("///hub.db", f"///{tmp_path}/hub.db"))
    with made.transaction() as tx:
        tx.execute(text("CREATE TABLE accounts (id INTEGER)"))
    with pytest.raises(GymError, match="a database of its own"):
        Database.open(database_url, tmp_path)
