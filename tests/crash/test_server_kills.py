"""Nothing acknowledged is lost and nothing is counted twice, wherever the server is killed.

Real processes, SIGKILL, and the same folder again. After every kill the federation must end with its two rounds
committed, every contributor merged exactly once a round, the pool paid once a round, and a ledger that verifies.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.federation import Federation, assert_every_contributor_counts_once_a_round
from tests.support.hub import BIN, HubProcess
from tests.support.postgres import PASSWORD, PostgresServer
from tests.support.quick import quick
from tests.support.warm import run

SERVER_KILLS = [
    "state-open",
    "state-collecting",
    "upload-chunk",
    "after-submit",
    "state-merging",
    "before-commit",
    "after-commit",
]


@pytest.mark.parametrize("line", quick(SERVER_KILLS, "before-commit"))
def test_a_server_killed_at_any_line_goes_on_from_there(federation: Federation, line: str) -> None:
    goes_on_after_a_kill(federation, line)


@pytest.mark.parametrize("line", quick(SERVER_KILLS))
def test_a_server_on_postgresql_killed_at_any_line_goes_on_from_there(
    federation_on_postgres: Federation, line: str
) -> None:
    goes_on_after_a_kill(federation_on_postgres, line)


def goes_on_after_a_kill(federation: Federation, line: str) -> None:
    names = ("ann", "bob")
    federation.hub.start("--exit-when-done", failpoints=line)
    if line != "state-open":  # a hub that nobody has met yet cannot be waited for
        for name in names:
            federation.join(name)
    federation.hub.wait_killed()
    federation.hub.start("--exit-when-done")
    if line == "state-open":
        for name in names:
            federation.join(name)
    federation.finish()
    assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"})


@pytest.mark.slow  # a whole federation, twice started
def test_a_finished_hub_started_again_makes_nothing_new(federation: Federation) -> None:
    federation.hub.start("--exit-when-done")
    for name in ("ann", "bob"):
        federation.join(name)
    federation.finish()
    before = federation.hub.ask("status"), federation.hub.ask("ledger", "show")
    federation.hub.start("--exit-when-done").wait_done()
    after = federation.hub.ask("status"), federation.hub.ask("ledger", "show")
    assert (before[0]["version_digest"], before[1]) == (after[0]["version_digest"], after[1])


def test_two_servers_on_one_folder_are_refused(federation: Federation) -> None:
    federation.hub.start()
    second = subprocess.run(
        [BIN / "gym-server", "run", "--dir", federation.hub.folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 91
    assert "another gym-server is running" in second.stderr


def test_two_servers_on_one_database_are_refused(
    federation_on_postgres: Federation, tmp_path: Path, tiny_base: Path
) -> None:
    federation_on_postgres.hub.start()
    database = {"database": federation_on_postgres.database}
    other = HubProcess(tmp_path / "elsewhere", {"storage": database}, str(tiny_base))
    second = run(["gym-server", "run", "--dir", other.folder])
    assert second.returncode == 91
    assert "another gym-server is running on the database" in second.stderr
    assert PASSWORD not in second.stdout + second.stderr


def test_a_restart_of_the_database_within_a_round_loses_nothing(
    federation_on_postgres: Federation, postgres: PostgresServer
) -> None:
    federation = federation_on_postgres
    federation.hub.start("--exit-when-done")
    federation.join("ann")
    federation.hub.wait_for("a task", lambda: federation.hub.ask("status")["round_state"] == "collecting")
    postgres.restart(signal.SIGQUIT)
    federation.join("bob")
    federation.finish()
    assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"})
    assert PASSWORD not in federation.hub.log()
