"""A backup or restore that is killed at any line leaves nothing or a whole one, and contributors go on afterwards.

Real processes, SIGKILL. The hub runs while it is backed up, loses a round with its machine, and is restored in a new
folder from which the committed round can be replayed bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.federation import Federation, assert_every_contributor_counts_once_a_round
from tests.support.wait import SECONDS
from tests.support.warm import run

BACKUP_KILLS = ["backup-database", "backup-object", "backup-files", "backup-manifest"]
RESTORE_KILLS = ["restore-object:2", "restore-brought", "restore-signed"]


def command(*arguments: str, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GYM_FAILPOINTS": failpoint, "OMP_NUM_THREADS": "1"}
    return run(["gym-server", *arguments, "--json"], env=environment)


def manifests(place: Path) -> list[Path]:
    return sorted(place.rglob("manifest.json"))


@pytest.mark.slow  # some thirty processes one after the other
def test_a_hub_that_lost_a_round_is_restored_and_its_contributors_go_on(
    federation: Federation, tmp_path: Path
) -> None:
    hub, place, names = federation.hub, tmp_path / "backups", ("ann", "bob")
    hub.start("--set", "rounds.num_rounds=1")
    for name in names:
        federation.join(name)
    for name in names:
        assert federation.clients[name].wait(timeout=4 * SECONDS) == 0, federation.log(name)[-2000:]
    backup = ("backup", "--dir", str(hub.folder), "--to", str(place), "--include-plain-keys")
    first = command(*backup)
    assert first.returncode == 0, first.stderr
    first_snapshot = json.loads(first.stdout)
    assert hub.stop() == 0
    hub.start("--exit-when-done")
    for name in names:
        federation.join(name)
    federation.finish()
    (only,) = manifests(place)
    for line in BACKUP_KILLS:
        assert command(*backup, failpoint=line).returncode == -9, line
        assert manifests(place) == [only], f"killed at {line}, a backup is none"
    checked = command("check", "--backup", str(place))
    assert json.loads(checked.stdout)["snapshots"] == [first_snapshot["snapshot"]], (
        "and the one before is whole"
    )
    second = command(*backup)
    assert second.returncode == 0, second.stderr
    later = json.loads(second.stdout)
    assert json.loads(command("check", "--backup", str(place)).stdout)["objects"] >= later["objects"]
    assert not [path for path in place.rglob("*") if path.name.endswith(".partial")]

    shutil.rmtree(hub.folder)
    restore = (
        "restore",
        "--from",
        str(place),
        "--dir",
        str(hub.folder),
        "--snapshot",
        first_snapshot["snapshot"],
    )
    stale = command(*restore)
    assert stale.returncode == 74, "a newer snapshot is there"
    for line in RESTORE_KILLS:
        assert command(*restore, "--fork", failpoint=line).returncode == -9, line
        assert not hub.folder.exists(), f"killed at {line}, nothing is restored"
    done = command(*restore, "--fork")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in hub.folder.parent.iterdir() if path.name.endswith(".restoring")] == []
    assert hub.ask("ledger", "verify")["valid"]
    assert hub.ask("check")["valid"]
    assert hub.ask("ledger", "replay", "1")["same"]

    hub.start("--exit-when-done")
    refused = federation.join("ann")
    assert refused.wait(SECONDS) == 95, federation.log("ann")[-2000:]
    assert "No longer valid, but kept as evidence" in federation.log("ann")
    for name in names:
        accepting(federation, name)
    federation.finish()
    assert_every_contributor_counts_once_a_round(hub, set(names))
    assert hub.ask("ledger", "replay", "2")["same"]


def accepting(federation: Federation, name: str) -> None:
    """Join once more, and accept that the hub was restored."""
    from tests.support.hub import start_client

    home, data = federation.folder / name, federation.folder / f"{name}.jsonl"
    arguments = ("--data", str(data), "--base", str(federation.base), "--name", name, "--accept-restore")
    federation.clients[name] = start_client(home, federation.hub, *arguments)
