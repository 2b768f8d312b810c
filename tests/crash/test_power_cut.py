"""What was acknowledged is there after a power cut: content and names that were not fsynced are gone by then."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gym_client.agent.residuals import Residuals
from gym_client.hub.heads import Heads
from gym_client.identity.home import Home
from gym_client.identity.keystore import Keystore
from gym_client.privacy.book import PrivacyBook
from gym_server.federation import Federation
from gym_server.store.tables import accounts, updates
from sqlalchemy import select

from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.serving.store.store import VariantStore
from tests.support.power_cut import Disk, why_not
from tests.support.power_cut_scenes import BACKUP, HOME, HUB, LINEAGE, STORE
from tests.support.wait import SECONDS

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class Cuts:
    """One process was recorded; every test restores what the disk had after something was acknowledged."""

    def __init__(self, folder: Path) -> None:
        root = folder / "root"
        root.mkdir()
        self.disk = Disk(root, folder / "disk")
        self.folder, self._cuts = folder, folder / "cuts"
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.power_cut_scenes", str(root), str(self._cuts)],
            env=self.disk.environment(),
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        self.printed: dict[str, Any] = {line.pop("cut"): line for line in printed}

    def after(self, name: str, target: Path) -> tuple[Path, Any]:
        """The restored folder, and what was acknowledged."""
        return self.disk.restore(target / "restored", self._cuts / name), self.printed[name]


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> Cuts:
    return Cuts(tmp_path_factory.mktemp("power"))


@pytest.fixture
def after(cuts: Cuts, tmp_path: Path) -> Callable[[str], tuple[Path, Any]]:
    return lambda name: cuts.after(name, tmp_path)


After = Callable[[str], tuple[Path, Any]]


def test_a_contributor_that_enrolled_is_known_and_knows_itself(after: After) -> None:
    root, printed = after("enrolled")
    with Federation.open(root / HUB) as fed:
        with fed.database.reading() as tx:
            assert list(tx.scalars(select(accounts.c.contributor))) == [printed["contributor"]]
        assert fed.ledger.verify()["entries"] == 1
    assert Home.open(root / HOME).key.contributor == printed["contributor"]
    assert list((root / HOME / "servers").glob("*.json"))


@pytest.mark.parametrize("name", ["uploaded", "soup", "small"])
def test_an_object_that_the_hub_took_is_whole(after: After, name: str) -> None:
    root, printed = after(name)
    with Federation.open(root / HUB) as fed:
        assert sha256_of(fed.store.local_path(printed["sha256"])) == printed["sha256"]


def test_an_update_with_a_receipt_is_in_table_and_ledger(after: After) -> None:
    root, printed = after("admitted")
    with Federation.open(root / HUB) as fed:
        with fed.database.reading() as tx:
            assert tx.execute(select(updates.c.update_id, updates.c.verdict)).all() == [
                (printed["update"], "admitted")
            ]
        assert fed.ledger.verify()["entries"] == printed["sequence"]


def test_a_version_that_was_committed_is_the_head(after: After) -> None:
    root, printed = after("committed")
    with Federation.open(root / HUB) as fed:
        assert fed.round_store.head().digest == printed["digest"]
        assert fed.round_store.history()[0]["state"] == "committed"
        assert fed.ledger.verify()["credits"] == 1


@pytest.mark.parametrize("name", ["receipt", "second-receipt"])
def test_a_receipt_is_kept(after: After, name: str) -> None:
    root, printed = after(name)
    assert Home.open(root / HOME).receipts()[-1]["update"] == printed["update"]


def test_a_head_that_was_seen_is_kept(after: After) -> None:
    root, printed = after("head")
    assert set(Heads(Home.open(root / HOME), bytes.fromhex(printed["server_key"])).kept()) == {
        printed["size"]
    }


def test_what_was_downloaded_is_whole(after: After) -> None:
    root, printed = after("downloaded")
    assert sha256_of(root / HOME / "objects" / printed["sha256"]) == printed["sha256"]


def test_what_was_backed_up_is_whole(after: After) -> None:
    root, printed = after("backup")
    assert (
        sha256_of(root / BACKUP / "objects" / printed["sha256"][:2] / printed["sha256"]) == printed["sha256"]
    )


def test_settings_are_kept(after: After) -> None:
    root, _ = after("settings")
    assert Home.open(root / HOME).settings()["name"] == "ann"


@pytest.mark.parametrize(("name", "deltas"), [("charged", ["delta"]), ("charged-again", ["delta", "second"])])
def test_what_privacy_cost_is_in_the_book_before_anything_leaves(
    after: After, name: str, deltas: list[str]
) -> None:
    root, _ = after(name)
    assert [charge.delta for charge in PrivacyBook(Home.open(root / HOME)).charges()] == deltas


def test_a_residual_is_staged_and_then_accepted(after: After, cuts: Cuts, tmp_path: Path) -> None:
    server = "s" + "0" * 16
    root, _ = after("staged")
    residuals = Residuals(Home.open(root / HOME), server)
    assert residuals.staged() == ["update"]
    assert ErrorFeedback.load(residuals.folder / "update.staged", LINEAGE).norm() == 2.0
    (tmp_path / "later").mkdir()
    root, _ = cuts.after("accepted", tmp_path / "later")
    assert Residuals(Home.open(root / HOME), server).load(LINEAGE).norm() == 2.0


def test_a_key_is_on_the_disk_before_a_hub_hears_of_it_and_stays(
    after: After, cuts: Cuts, tmp_path: Path
) -> None:
    root, printed = after("prepared")
    assert Keystore(root / HOME).next().public_key.hex() == printed["public_key"]
    (tmp_path / "later").mkdir()
    root, printed = cuts.after("rotated", tmp_path / "later")
    assert Keystore(root / HOME).main().public_key.hex() == printed["public_key"]
    assert not Keystore(root / HOME).next_path.exists()


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_variant_that_was_added_can_be_served(after: After, name: str) -> None:
    root, printed = after(f"variant-{name}")
    with VariantStore.open(root / STORE, require_signature=False, create=False) as store:
        assert store.get(name).sha256 == printed["sha256"]
    [found] = (root / STORE).rglob(f"{printed['sha256']}*")
    assert sha256_of(found) == printed["sha256"]


WRITES = """
import os, sys
os.chdir(sys.argv[1])
def write(name, text, sync):
    with open(name, "w") as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())
def sync_folder(name):
    found = os.open(name, os.O_RDONLY)
    os.fsync(found)
    os.close(found)
write("kept", "new", True)
write("lost", "new", False)
write("nameless", "synced, but its name is not", True)
os.rename("old", "renamed")
os.mkdir("folder")
write("folder/inside", "x", True)
sync_folder("folder")
if sys.argv[2] == "sync":
    os.unlink("nameless")
    sync_folder(".")
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("sync", ["sync", "no sync"])
def test_the_shim_keeps_what_was_synced_and_nothing_else(tmp_path: Path, sync: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in ("kept", "lost", "old"):
        (root / name).write_text("old")
    disk = Disk(root, tmp_path / "disk")
    done = subprocess.run([sys.executable, "-c", WRITES, root, sync], env=disk.environment(), check=False)
    assert done.returncode == -9
    found = disk.restore(tmp_path / "restored")
    there = {str(p.relative_to(found)): p.read_text() for p in found.rglob("*") if p.is_file()}
    before = {"kept": "new", "lost": "old"}
    if sync == "sync":
        assert there == {**before, "renamed": "old", "folder/inside": "x"}
    else:
        assert there == {**before, "old": "old"}
    assert os.path.exists(root / "renamed"), "the machine itself went on"


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
