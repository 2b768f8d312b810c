"""Records of evaluations are in backups, come back, and are deleted when nothing is about them any more."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gym_server.backup.backup import KeyPolicy, backup, check_backup, check_hub
from gym_server.backup.gc import gc
from gym_server.backup.place import Place
from gym_server.backup.restore import restore
from gym_server.evaluations.records import records_folder
from gym_server.federation import Federation
from gym_server.store.tables import rounds

from gym_fed.core.errors import GymError
from gym_fed.core.files import file_sha256
from gym_fed.evaluation.records.document import samples_path
from gym_fed.evaluation.records.reader import read_record
from gym_fed.evaluation.records.writer import write_record
from gym_fed.trust.ledger.evaluations import EVALUATED
from tests.support.evaluations import choice_task, results_of
from tests.support.loopback_hub import LoopbackHub

PLAIN = KeyPolicy(include_plain=True)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    found = LoopbackHub(tmp_path / "hub")
    yield found
    found.close()


def record(fed: Federation, model: str, rows: str) -> Path:
    """A record of a model's evaluation; ``rows`` says which were drawn."""
    results = results_of(choice_task("wet", [True, False]), digest=model)
    results = replace(results, identity={**results.identity, "rows": rows})
    return write_record(results, records_folder(fed.folder))


def named(fed: Federation, path: Path) -> None:
    """The ledger names a record."""
    with fed.database.transaction() as tx:
        body = {"suites": [{"tasks": {}, "records": {"after": file_sha256(path)}}]}
        fed.ledger.append(tx, EVALUATED, body)


def aged(folder: Path) -> None:
    old = time.time() - 2 * 86400
    for path in folder.rglob("*"):
        os.utime(path, (old, old))


def test_records_are_backed_up_once_and_restored(hub: LoopbackHub, tmp_path: Path) -> None:
    fed, place = hub.fed, str(tmp_path / "backups")
    kept = record(fed, "sha256:b", "s round 1, limit 8")
    torn = record(fed, "sha256:c", "s round 2, limit 8")
    samples_path(torn).write_text("half")
    named(fed, kept)
    first = backup(fed.state, fed.config, place, PLAIN)
    assert first["records"] == 2, "document and samples; what is half written is left out"
    before = len(Place(place).objects())
    time.sleep(1.1)  # snapshots are named by the second
    assert backup(fed.state, fed.config, place, PLAIN, keep=1)["records"] == 2
    assert len(Place(place).objects()) == before
    assert check_backup(place)["objects"] == before
    restore(place, tmp_path / "new")
    with Federation.open(tmp_path / "new") as again:
        found = records_folder(again.folder) / kept.relative_to(records_folder(fed.folder))
        assert read_record(found) == read_record(kept)
        assert check_hub(again.state)["lost_records"] == 0
        found.unlink()
        assert check_hub(again.state)["lost_records"] == 1
    damaged = next(p for p in Path(place, "objects").rglob(file_sha256(samples_path(kept))))
    damaged.write_text("other")
    with pytest.raises(GymError):
        check_backup(place)


def test_records_of_what_is_no_more_are_deleted_when_they_are_old(hub: LoopbackHub) -> None:
    fed = hub.fed
    base = record(fed, fed.base.digest, "s first 8, limit 8")
    in_ledger = record(fed, "sha256:gone", "s round 1, limit 8")
    named(fed, in_ledger)
    living = record(fed, "sha256:next", "s round 7, limit 8")
    of_version = record(fed, "sha256:gone", "s first 8, limit 8")
    of_round = record(fed, "sha256:gone", "s round 5, limit 8")
    (base.parent / ".x.json.0123.partial").write_text("killed")
    with fed.database.transaction() as tx:
        for number, state in ((5, "aborted"), (7, "merging")):
            tx.execute(
                rounds.insert().values(
                    server_round=number, state=state, opened_at=fed.clock.now(), base_height=0
                )
            )
    assert gc(fed.state, fed.config, 86400)["records"] == 0, "all of it is young"
    aged(records_folder(fed.folder))
    assert gc(fed.state, fed.config, 86400, dry_run=True)["records"] == 5
    assert of_round.exists()
    assert gc(fed.state, fed.config, 86400)["records"] == 5
    left = {path for path in records_folder(fed.folder).rglob("*") if path.is_file()}
    assert left == {p for one in (base, in_ledger, living) for p in (one, samples_path(one))}
    assert not of_version.exists()
    assert gc(fed.state, fed.config, 86400)["records"] == 0
