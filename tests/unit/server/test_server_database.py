"""Write transactions come one after the other, on SQLite and on PostgreSQL, and what they acknowledge stays."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.ledger.chain import Ledger
from gym_server.store.database import Database, insert_if_absent, rerun
from gym_server.store.failures import mapped_errors, parse_url
from gym_server.store.hub_lock import HubLock
from gym_server.store.tables import readers, settings
from gym_server.store.unavailable import StoreUnavailable, WriteConflict
from sqlalchemy import func, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey
from tests.support.in_process import run_here
from tests.support.postgres import PASSWORD, PostgresServer, why_not
from tests.support.wait import SECONDS

WRITERS, ENTRIES = 4, 25
SEED, WRONG = "a private seed", "Osprey-3-Medlar"


@pytest.fixture
def database(database_url: str, tmp_path: Path) -> Database:
    return Database.open(database_url, tmp_path)


def test_appends_of_several_threads_at_once_are_all_in_the_ledger(database: Database) -> None:
    ledger = Ledger(database, SigningKey.generate())
    begin = threading.Barrier(WRITERS)

    def write(name: int) -> list[int]:
        begin.wait()
        written = []
        for number in range(ENTRIES):
            with database.transaction() as tx:
                written.append(ledger.append(tx, "note", {"by": name, "number": number}).sequence)
        return written

    with ThreadPoolExecutor(WRITERS) as pool:
        acknowledged = sorted(n for written in pool.map(write, range(WRITERS)) for n in written)
    assert acknowledged == list(range(1, WRITERS * ENTRIES + 1))
    assert ledger.verify()["entries"] == WRITERS * ENTRIES


def test_a_number_read_and_written_by_several_threads_loses_no_step(database: Database) -> None:
    database.set("number", "0")

    def count(_: int) -> None:
        with database.transaction() as tx:
            value = tx.scalar(select(settings.c.value).where(settings.c.key == "number"))
            tx.execute(update(settings).where(settings.c.key == "number").values(value=str(int(value) + 1)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count, range(60)))
    assert database.setting("number", "") == "60"


def test_reads_of_one_block_see_one_state(database: Database) -> None:
    database.set("seen", "before")
    value = select(settings.c.value).where(settings.c.key == "seen")
    with database.reading() as tx:
        first = tx.scalar(value)
        database.set("seen", "after")
        assert (first, tx.scalar(value)) == ("before", "before")


def test_a_row_that_is_there_is_not_inserted_again(database: Database) -> None:
    for _ in range(2):
        with database.transaction() as tx:
            insert_if_absent(tx, readers, sha256="ab", contributor="*")
    with database.reading() as tx:
        assert tx.scalar(select(func.count()).select_from(readers)) == 1


def foreign_write(server: PostgresServer, database: Database) -> None:
    """What somebody with psql does, who takes no lock."""
    name = str(database.engine.url.database)
    server.execute("UPDATE settings SET value = value || '+' WHERE key = 'shared'", name)


def test_a_transaction_that_the_database_undid_is_run_again(postgres: PostgresServer, tmp_path: Path) -> None:
    database = Database.open(postgres.new_database(), tmp_path)
    database.set("shared", "0")
    attempts = 0

    @rerun
    def append() -> None:
        nonlocal attempts
        with database.transaction() as tx:
            value = tx.scalar(select(settings.c.value).where(settings.c.key == "shared"))
            attempts += 1
            if attempts < 3:
                foreign_write(postgres, database)
            tx.execute(update(settings).where(settings.c.key == "shared").values(value=f"{value}, ours"))

    append()
    assert attempts == 3
    assert database.setting("shared", "") == "0++, ours"


def test_attempts_have_an_end_and_then_the_refusal_is_busy(postgres: PostgresServer, tmp_path: Path) -> None:
    database = Database.open(postgres.new_database(), tmp_path)
    database.set("shared", "0")
    attempts = 0

    @rerun
    def append() -> None:
        nonlocal attempts
        with database.transaction() as tx:
            tx.scalar(select(settings.c.value).where(settings.c.key == "shared"))
            attempts += 1
            foreign_write(postgres, database)
            tx.execute(update(settings).where(settings.c.key == "shared").values(value="ours"))

    with pytest.raises(WriteConflict) as refusal:
        append()
    assert refusal.value.refusal.code is ErrorCode.BUSY
    assert attempts == 6
    assert database.setting("shared", "") == "0++++++"


def test_after_a_restart_of_the_server_the_database_goes_on(postgres: PostgresServer, tmp_path: Path) -> None:
    database = Database.open(postgres.new_database(), tmp_path)
    database.set("kept", "yes")
    postgres.restart()
    assert database.setting("kept", "") == "yes"


def test_a_server_that_ends_within_a_transaction_is_reported_as_away(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    database = Database.open(postgres.new_database(), tmp_path)

    def write() -> None:
        with database.transaction() as tx:
            tx.execute(settings.insert().values(key="half", value="done"))
            postgres.restart()
            tx.execute(settings.insert().values(key="other half", value="done"))

    with pytest.raises(StoreUnavailable) as refusal:
        write()
    assert refusal.value.refusal.code is ErrorCode.UNAVAILABLE
    with database.transaction() as tx:  # the lock of the one that was broken off is free
        assert tx.scalar(select(settings.c.value).where(settings.c.key == "half")) is None


@pytest.mark.parametrize(
    ("url", "code"),
    [
        (f"postgresql+psycopg://hub:{PASSWORD}@127.0.0.1:1/hub", ErrorCode.UNAVAILABLE),
        (f"postgresql+psycopg://hub:{PASSWORD}/x@127.0.0.1:port/hub", ErrorCode.CONFIG_INVALID),
        (f"postgresql+psycopg://hub:{PASSWORD}@[127.0.0.1/hub", ErrorCode.UNAVAILABLE),
        (f"postgres-no://hub:{PASSWORD}@127.0.0.1/hub", ErrorCode.CONFIG_INVALID),
        (f"postgresql+psycopg2://hub:{PASSWORD}@127.0.0.1/hub", ErrorCode.MISSING_DEPENDENCY),
        (f"mysql+no://hub:{PASSWORD}@127.0.0.1/hub", ErrorCode.CONFIG_INVALID),
        (f"postgresql+psycopg://127.0.0.1:1/hub?user=hub&password={PASSWORD}", ErrorCode.UNAVAILABLE),
        (f"postgresql+psycopg://127.0.0.1:1/hub?nonsense={PASSWORD}", ErrorCode.CONFIG_INVALID),
        (f"{PASSWORD}", ErrorCode.CONFIG_INVALID),
    ],
)
def test_a_database_that_does_not_open_says_why_and_never_its_password(
    tmp_path: Path, url: str, code: ErrorCode
) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(GymError) as refusal:
        Database.open(url, tmp_path)
    assert refusal.value.code is code
    assert PASSWORD not in "".join(traceback.format_exception(refusal.value))


def test_a_wrong_password_is_not_repeated(postgres: PostgresServer, tmp_path: Path) -> None:
    with pytest.raises(GymError, match="authentication failed") as refusal:
        Database.open(postgres.url(password=WRONG), tmp_path)
    text = "".join(traceback.format_exception(refusal.value))
    assert WRONG not in text
    assert "PGPASSFILE" in str(refusal.value.hint)


def test_a_password_in_the_drivers_own_words_is_masked() -> None:
    url = parse_url(f"postgresql+psycopg://hub:{PASSWORD}@127.0.0.1/gym")
    error = OperationalError("SELECT 1", {}, Exception(f"cannot parse\n{PASSWORD} as a host"))
    error.connection_invalidated = True
    with pytest.raises(StoreUnavailable) as caught, mapped_errors(url):
        raise error
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))
    assert "cannot parse *** as a host" in caught.value.refusal.message


def test_a_commit_waits_for_the_disk_whatever_the_servers_default_is(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = f"{postgres.new_database()}?options=-csynchronous_commit%3Doff"
    with Database.open(url, tmp_path).transaction() as tx:
        assert tx.scalar(text("SELECT setting FROM pg_settings WHERE name = 'synchronous_commit'")) == "on"


def test_the_password_is_taken_from_pgpassfile(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pgpass"
    file.write_text(f"127.0.0.1:{postgres.port}:*:hub:{PASSWORD}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    url = postgres.new_database().replace(f":{PASSWORD}@", "@")
    database = Database.open(url, tmp_path)
    assert database.setting("answer", "yes") == "yes"


def test_parameters_of_a_statement_are_in_no_message(database: Database) -> None:
    def write() -> None:
        with database.transaction() as tx:
            tx.execute(settings.insert().values(key="one", value=SEED))

    write()
    with pytest.raises(IntegrityError) as refusal:
        write()
    assert SEED not in "".join(traceback.format_exception(refusal.value))


def test_a_database_without_an_encoding_holds_any_text(postgres: PostgresServer, tmp_path: Path) -> None:
    postgres.execute("CREATE DATABASE plain ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    database = Database.open(postgres.url("plain"), tmp_path)
    database.set("name", "Zoë 東京")
    assert database.setting("name", "") == "Zoë 東京"


def test_text_that_postgresql_cannot_hold_is_refused_and_not_a_defect(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    database = Database.open(postgres.new_database(), tmp_path)
    with pytest.raises(GymError) as refusal:
        database.set("nul", "a\0b")
    assert refusal.value.code is ErrorCode.USAGE


@pytest.mark.parametrize("command", [["status", "--json"], ["run"], ["ledger", "verify"]])
def test_no_command_shows_the_password(tmp_path: Path, command: list[str]) -> None:
    pytest.importorskip("psycopg")
    init_hub(tmp_path / "hub", HubChoices("gym-nano", "hub", "open"))
    path = tmp_path / "hub" / "gym-server.yaml"
    config = yaml.safe_load(path.read_text())
    config["storage"]["database"] = f"postgresql+psycopg://hub:{PASSWORD}@127.0.0.1:1/hub"
    path.write_text(yaml.safe_dump(config))
    done = run_here(["gym-server", *command, "--dir", str(tmp_path / "hub")])
    assert done.returncode == ErrorCode.UNAVAILABLE.exit_code
    assert "hub:***@127.0.0.1:1/hub" in done.stderr
    assert "Traceback" not in done.stderr
    assert PASSWORD not in done.stdout + done.stderr


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_tests_server_ends_with_a_test_process_that_is_killed() -> None:
    code = (
        "from tests.support.postgres import PostgresServer; import time; s = PostgresServer(); "
        "print(s.pid, s.folder, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, folder = process.stdout.readline().split()
    process.kill()
    process.wait()
    end = time.monotonic() + SECONDS
    while Path(folder).exists() or Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "the server outlives its starter"
        time.sleep(0.05)


# ---- one hub a database ----


def test_a_second_hub_is_refused_while_the_first_runs(database_url: str, tmp_path: Path) -> None:
    first, second = Database.open(database_url, tmp_path), Database.open(database_url, tmp_path)
    held = HubLock(first)
    with pytest.raises(GymError, match="another gym-server is running on the database") as refusal:
        HubLock(second)
    assert refusal.value.code is ErrorCode.STATE_LOCKED
    assert PASSWORD not in str(refusal.value)
    held.release()
    HubLock(second).release()


def test_a_hub_that_lost_its_lock_to_another_writes_nothing_more(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = postgres.new_database()
    first, second = Database.open(url, tmp_path), Database.open(url, tmp_path)
    held = HubLock(first)
    first.set("by", "first")
    postgres.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted",
        str(first.engine.url.database),
    )
    other = HubLock(second)
    with pytest.raises(GymError) as refusal:
        first.set("by", "nobody who may")
    assert refusal.value.code is ErrorCode.STATE_LOCKED
    with pytest.raises(GymError, match="another gym-server"):
        held.keep()
    assert second.setting("by", "") == "first"
    other.release()


def test_a_hub_whose_server_was_restarted_takes_its_lock_again(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = postgres.new_database()
    first, second = Database.open(url, tmp_path), Database.open(url, tmp_path)
    held = HubLock(first)
    postgres.restart()
    held.keep()
    first.set("by", "first")
    with pytest.raises(GymError, match="another gym-server"):
        HubLock(second)
    held.release()
