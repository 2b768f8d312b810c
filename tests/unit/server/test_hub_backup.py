"""A hub is backed up while it runs, restored on an empty machine, and its contributors are shown what is lost, once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from gym_client.cli.join import enter
from gym_client.hub.heads import Heads
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish
from gym_client.ledger.copy import LedgerCopy
from gym_client.ledger.receipts import Receipts, kept_receipts
from gym_client.ledger.restored import accept_restore, loss_of, with_restores
from gym_client.ledger.rewards import Tally, verify_copy
from gym_client.variants import push_variant, sign_variant
from gym_server.backup.backup import KeyPolicy, backup, check_backup, check_hub
from gym_server.backup.restore import fork_in_place, restore
from gym_server.store.tables import accounts, credits
from sqlalchemy import select, text

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey, server_id
from gym_fed.trust.ledger.heads import FORMAT as HEAD_FORMAT
from gym_fed.trust.ledger.heads import Head, SignedHead
from gym_fed.trust.ledger.restored import HubRestored, Restored, SignedRestored
from tests.support.loopback_hub import LoopbackHub, manifest_of, some_delta
from tests.support.postgres import PASSWORD, PostgresServer

PLAIN = KeyPolicy(include_plain=True)


class Scene:
    """A hub that can be backed up, lost and brought back, and homes of contributors."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        self.place = str(folder / "backups")
        self.hub = LoopbackHub(folder / "hub", **config)
        self.clients: list[HubClient] = []

    def client(self, name: str) -> HubClient:
        """A contributor who trusts the hub's key at its present address, and has not asked it anything yet."""
        home, address = Home.open(self.folder / name), Address.parse(self.hub.address)
        pin = establish(home, address, self.hub.fed.fingerprint, lambda _: False)
        self.clients.append(HubClient(home, address, pin))
        return self.clients[-1]

    def joined(self, name: str) -> HubClient:
        client = self.client(name)
        enter(client, name, "")
        return client

    def pay(self, server_round: int, contributor: str, amount: int) -> None:
        row = {"server_round": server_round, "contributor": contributor, "amount": amount}
        with self.hub.fed.database.transaction() as tx:
            tx.execute(credits.insert().values(**row))
            self.hub.fed.ledger.append(tx, "credit", row)

    def backup(self, **options: Any) -> dict[str, Any]:
        return backup(self.hub.fed.state, self.hub.fed.config, self.place, PLAIN, **options)

    def restart_from(self, folder: Path) -> None:
        self.hub.close()
        self.hub = LoopbackHub(folder)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.hub.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    found = Scene(tmp_path)
    yield found
    found.close()


def code_of(call: Callable[..., object], *arguments: Any, **options: Any) -> ErrorCode:
    with pytest.raises(GymError) as caught:
        call(*arguments, **options)
    return caught.value.code


def lose_a_round(scene: Scene) -> HubClient:
    """Back up, go on for a round of which ann keeps receipts, and restore; the hub now runs on the restored folder."""
    ann = scene.joined("ann")
    contributor = ann.pin.contributor
    scene.pay(1, contributor, 10)
    Receipts(ann.home, ann).fetch([{"entries": [2]}])
    assert scene.backup()["entries"] == 2
    scene.pay(2, contributor, 20)
    scene.pay(3, contributor, 30)
    ann.status()
    LedgerCopy(ann.home, bytes.fromhex(ann.pin.ledger_key)).sync(ann)
    Receipts(ann.home, ann).fetch([{"entries": [3, 4]}])
    shutil.rmtree(scene.hub.fed.folder / "objects")  # the machine is gone
    restore(scene.place, scene.folder / "new")
    scene.restart_from(scene.folder / "new")
    return ann


def test_a_contributor_is_shown_what_a_restore_takes_accepts_it_once_and_goes_on(scene: Scene) -> None:
    lose_a_round(scene)
    ann = scene.client("ann")
    with pytest.raises(HubRestored) as caught:
        ann.status()
    assert caught.value.code is ErrorCode.HUB_RESTORED
    assert "restored from a backup at entry 2" in caught.value.message
    loss = loss_of(ann.home, caught.value.signed)
    assert (loss.restored_at_entry, loss.receipts, loss.rounds, loss.credits) == (2, 2, (2, 3), 50)
    assert "You took part in rounds 2 to 3" in " ".join(loss.lines())
    assert not list(ann.home.proofs.iterdir()), "nobody is accused"
    asked = []
    with_restores(
        ann.home,
        lambda: bytes.fromhex(ann.pin.ledger_key),
        lambda question: asked.append(question) or True,  # type: ignore[func-returns-value]
        ann.status,
    )
    assert asked == [loss]
    enter(ann, "ann", "")
    scene.pay(2, ann.pin.contributor, 7)
    ann.status()
    Receipts(ann.home, ann).fetch([{"entries": [2, 4]}])
    assert [r["proof"]["entry"]["sequence"] for r in kept_receipts(ann.home, ann.pin.server)] == [2, 4]
    key = bytes.fromhex(ann.pin.ledger_key)
    copy = LedgerCopy(ann.home, key)
    copy.sync(ann)
    found = verify_copy(ann.home, copy.path, key, Tally(ann.pin.contributor))
    assert (found.entries, found.receipts, found.balance) == (4, 2, 17)
    heads = Heads(ann.home, key)
    assert [signed.statement.restored_at_entry for signed in heads.accepted()] == [2]
    assert len(heads.path.read_text().splitlines()) > len(heads.kept()) + 1, "what is lost stays as evidence"
    assert [r for r in ann.home.receipts() if "restored" in r], "the receipts record it"
    entry = next(e for e in scene.hub.fed.ledger.entries() if e.kind == "restored")
    assert entry.sequence == 3, "and so does the hub's ledger"
    assert scene.hub.fed.ledger.verify()["entries"] == 4


def test_a_restore_that_is_not_accepted_stays_refused(scene: Scene) -> None:
    lose_a_round(scene)
    ann = scene.client("ann")
    for _ in range(2):
        refused = code_of(
            with_restores,
            ann.home,
            lambda: bytes.fromhex(ann.pin.ledger_key),
            lambda loss: False,
            ann.status,
        )
        assert refused is ErrorCode.HUB_RESTORED
    assert len(Heads(ann.home, bytes.fromhex(ann.pin.ledger_key)).accepted()) == 0


def test_a_contributor_who_holds_nothing_of_what_is_lost_gets_no_question(scene: Scene) -> None:
    bob = scene.joined("bob")
    scene.backup()
    scene.pay(1, bob.pin.contributor, 10)
    restore(scene.place, scene.folder / "new")
    scene.restart_from(scene.folder / "new")
    scene.joined("bob").status()
    scene.joined("cat").status()


def test_a_fork_without_a_statement_stays_a_fork_with_a_proof(scene: Scene) -> None:
    ann = scene.joined("ann")
    shutil.copytree(scene.hub.fed.folder, scene.folder / "copy")
    scene.pay(1, ann.pin.contributor, 10)
    ann.status()
    scene.restart_from(scene.folder / "copy")
    again = scene.client("ann")
    assert code_of(again.status) is ErrorCode.STATE_CORRUPT
    scene.pay(1, ann.pin.contributor, 11)
    assert code_of(again.status) is ErrorCode.LEDGER_FORKED
    assert list(again.home.proofs.glob("*.json"))


def test_a_folder_that_was_put_back_and_went_on_is_explained_by_a_statement_about_its_last_common_entry(
    scene: Scene,
) -> None:
    test_a_fork_without_a_statement_stays_a_fork_with_a_proof(scene)
    folder = scene.hub.fed.folder
    scene.hub.close()
    fork_in_place(folder, "the disk failed", at_entry=1)
    scene.hub = LoopbackHub(folder)
    ann = scene.client("ann")
    with pytest.raises(HubRestored) as caught:
        ann.status()
    assert loss_of(ann.home, caught.value.signed).reason == "the disk failed"
    accept_restore(ann.home, bytes.fromhex(ann.pin.ledger_key), caught.value.signed)
    ann.status()
    assert not list(ann.home.proofs.glob("*.json"))
    assert list((ann.home.proofs / "superseded").glob("*.json")), "the proof is kept"


def test_a_statement_is_no_older_than_the_newest_head_though_the_clock_was_set_back(scene: Scene) -> None:
    scene.joined("ann")
    ledger = scene.hub.fed.ledger
    head = ledger.newest_head()
    assert head is not None
    ledger._clock = lambda: 0.0
    assert ledger.restored("the disk failed").statement.at >= head.head.at


@pytest.mark.parametrize("lie", ["another key", "not in the ledger", "signed before the head"])
def test_a_statement_that_does_not_hold_explains_nothing(scene: Scene, lie: str) -> None:
    ann = scene.joined("ann")
    fed = scene.hub.fed
    if lie == "signed before the head":
        fed.ledger._clock = lambda: time.time() - 1000
        fed.ledger.restored("long before")
        fed.ledger._clock = time.time
        time.sleep(1.1)  # heads have whole seconds
    shutil.copytree(fed.folder, scene.folder / "copy")
    scene.pay(1, ann.pin.contributor, 10)
    ann.status()
    scene.restart_from(scene.folder / "copy")
    fed = scene.hub.fed
    if lie != "signed before the head":
        key = SigningKey.generate() if lie == "another key" else fed.key
        said = Restored("gym-restored-1", fed.server, 1, "ab" * 32, int(time.time()), "trust me", None)
        signed = SignedRestored.sign(key, said)
        fed.ledger.statements = lambda: [json.dumps({**signed.to_dict(), "entry": 1})]  # type: ignore[method-assign]
    again = scene.client("ann")
    assert code_of(again.status) is ErrorCode.STATE_CORRUPT
    scene.pay(1, ann.pin.contributor, 11)
    if lie == "signed before the head":
        scene.pay(2, ann.pin.contributor, 11)
    assert code_of(again.status) is ErrorCode.LEDGER_FORKED


def test_a_statement_is_the_hubs_own_and_so_is_the_head_that_it_says_is_lost() -> None:
    key, other = SigningKey.generate(), SigningKey.generate()

    def head(by: SigningKey) -> dict[str, Any]:
        return SignedHead.sign(
            by, Head(HEAD_FORMAT, server_id(key.public_key), 9, "ab" * 32, "cd" * 32, 1, 100)
        ).to_dict()

    def said(server: SigningKey = key, lost: dict[str, Any] | None = None) -> Restored:
        return Restored("gym-restored-1", server_id(server.public_key), 1, "ab" * 32, 200, "a fire", lost)

    SignedRestored.sign(key, said(lost=head(key))).verify(key.public_key)
    changed = SignedRestored(replace(said(), restored_at_entry=5), SignedRestored.sign(key, said()).signature)
    for lie in (
        SignedRestored.sign(other, said()),
        SignedRestored.sign(key, said(other)),
        SignedRestored.sign(key, said(lost=head(other))),
        changed,
        SignedRestored(said(), "no hex"),
    ):
        with pytest.raises(GymError) as caught:
            lie.verify(key.public_key)
        assert caught.value.code in (ErrorCode.STATE_CORRUPT, ErrorCode.SIGNATURE_INVALID)


def test_a_head_of_what_was_lost_accuses_nobody_later(scene: Scene) -> None:
    before = lose_a_round(scene)
    lost = Heads(before.home, bytes.fromhex(before.pin.ledger_key)).newest()
    assert lost is not None
    ann = scene.client("ann")
    with pytest.raises(HubRestored) as caught:
        ann.status()
    accept_restore(ann.home, bytes.fromhex(ann.pin.ledger_key), caught.value.signed)
    ann.status()
    heads = Heads(ann.home, bytes.fromhex(ann.pin.ledger_key))
    for _ in range(3):
        scene.pay(9 + _, ann.pin.contributor, 1)
    ann.status()
    with pytest.raises(GymError, match="which this home accepted") as later:
        heads.see(lost, scene.hub.fed.ledger.proof)
    assert later.value.code is ErrorCode.HUB_RESTORED
    assert not list(ann.home.proofs.glob("*.json"))


def test_a_second_backup_copies_new_objects_only_and_every_file_is_checked(scene: Scene) -> None:
    fed = scene.hub.fed
    ann = scene.joined("ann")
    first = pushed(ann, scene.folder, 1)
    assert scene.backup()["new_objects"] == 1
    second = pushed(ann, scene.folder, 2)
    size = fed.store.local_path(second).stat().st_size
    time.sleep(1.1)  # a snapshot is named by its second
    found = scene.backup()
    assert (found["objects"], found["new_objects"], found["new_bytes"]) == (2, 1, size)
    assert check_backup(scene.place)["objects"] == 2
    assert check_hub(fed.state)["objects"] == 2
    place = Path(scene.place)
    for path in [p for p in place.rglob("*") if p.is_file() and p.name != "manifest.json"]:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if data else b"x")
        with pytest.raises(GymError, match=path.name):
            check_backup(scene.place)
        path.write_bytes(data)
    for sha256 in (first, second):
        stored = fed.store.local_path(sha256)
        data = stored.read_bytes()
        stored.chmod(0o600)
        stored.write_bytes(b"!" + data[1:])
        with pytest.raises(GymError, match=sha256):
            check_hub(fed.state)
        stored.write_bytes(data)
    time.sleep(1.1)
    assert scene.backup(keep=1)["dropped"], "older snapshots are deleted when that is asked for"
    assert len(check_backup(scene.place)["snapshots"]) == 1


def test_data_with_a_name_that_some_systems_refuse_is_named_before_anything_is_copied(scene: Scene) -> None:
    (scene.hub.fed.folder / "rows:1.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    config = scene.hub.fed.config
    gate = config.gate.model_copy(update={"heldout": "rows:1.jsonl"})
    with pytest.raises(GymError, match=r"rows:1\.jsonl has a name that cannot be restored") as caught:
        backup(scene.hub.fed.state, config.model_copy(update={"gate": gate}), scene.place, PLAIN)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert not [path for path in Path(scene.place).rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes")
def test_a_restored_database_can_be_read_by_its_owner_only(scene: Scene) -> None:
    scene.joined("ann")
    scene.backup()
    restore(scene.place, scene.folder / "new")
    assert (scene.folder / "new" / "hub.db").stat().st_mode & 0o777 == 0o600


def test_a_ledger_that_was_changed_is_not_backed_up(scene: Scene) -> None:
    ann = scene.joined("ann")
    scene.pay(1, ann.pin.contributor, 10)
    with sqlite3.connect(scene.hub.fed.folder / "hub.db") as file:
        file.execute("UPDATE credits SET amount = 11")
    assert code_of(scene.backup) is ErrorCode.STATE_CORRUPT
    assert not list(Path(scene.place).rglob("manifest.json")), "and what was begun is no snapshot"


def test_a_snapshot_of_which_anything_was_changed_is_not_restored(scene: Scene) -> None:
    ann = scene.joined("ann")
    pushed(ann, scene.folder, 1)
    scene.pay(1, ann.pin.contributor, 10)
    found = scene.backup()
    new, snapshot = scene.folder / "new", Path(scene.place) / "snapshots" / found["snapshot"]
    files = [path for path in Path(scene.place).rglob("*") if path.is_file() and path.name != "manifest.json"]
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert code_of(restore, scene.place, new) is ErrorCode.STATE_CORRUPT, path.name
        path.write_bytes(data)
    database, manifest = snapshot / "database", snapshot / "manifest.json"
    whole, said = database.read_bytes(), manifest.read_text()
    for change in ("UPDATE credits SET amount = 11", "DELETE FROM ledger_heads"):
        with sqlite3.connect(database) as file:
            file.execute(change)
        # An attacker who can write to the place can write the manifest, too: the ledger itself is verified.
        sha256 = hashlib.sha256(database.read_bytes()).hexdigest()
        document = json.loads(said)
        document["files"]["database"] = {"sha256": sha256, "size_bytes": database.stat().st_size}
        manifest.write_text(json.dumps(document))
        assert code_of(restore, scene.place, new) is ErrorCode.STATE_CORRUPT, change
        database.write_bytes(whole)
    manifest.write_text(said)
    assert not new.exists()
    restore(scene.place, new)


def test_a_snapshot_with_the_database_of_an_earlier_one_is_not_restored(scene: Scene) -> None:
    ann = scene.joined("ann")
    older = scene.backup()["snapshot"]
    time.sleep(1.1)  # a snapshot is named by its second
    scene.pay(1, ann.pin.contributor, 10)
    newer = scene.backup()["snapshot"]
    snapshots = Path(scene.place) / "snapshots"
    shutil.copy(snapshots / older / "database", snapshots / newer / "database")
    manifest = snapshots / newer / "manifest.json"
    document = json.loads(manifest.read_text())
    document["files"]["database"] = json.loads((snapshots / older / "manifest.json").read_text())["files"][
        "database"
    ]
    manifest.write_text(json.dumps(document))
    with pytest.raises(GymError, match="of its manifest"):
        restore(scene.place, scene.folder / "new")


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a//b", ".", "C:\\x", "keys/nul"])
def test_a_manifest_that_names_a_path_outside_is_refused(scene: Scene, name: str) -> None:
    scene.joined("ann")
    manifest = Path(scene.place) / "snapshots" / scene.backup()["snapshot"] / "manifest.json"
    document = json.loads(manifest.read_text())
    document["files"][name] = document["files"]["gym-server.yaml"]
    manifest.write_text(json.dumps(document))
    with pytest.raises(GymError, match="not a path inside the folder"):
        restore(scene.place, scene.folder / "new")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("database", "sqlite:///../../home/.bashrc"),
        ("database", "sqlite:////etc/gym.db"),
        ("database", "sqlite:///file:x?uri=true"),
        ("objects", "../../home"),
        ("objects", "file:///etc/objects"),
        ("objects", "simplecache::file:///etc/objects"),
        ("objects", "local:///etc/objects"),
    ],
)
def test_a_config_that_names_a_place_outside_is_refused_before_anything_is_written_there(
    scene: Scene, key: str, value: str
) -> None:
    scene.joined("ann")
    home = scene.folder / "home"
    home.mkdir()
    (home / ".bashrc").write_text("mine")
    forge(scene, storage={key: value})
    with pytest.raises(GymError, match="not inside the hub's folder") as caught:
        restore(scene.place, scene.folder / "new")
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert [path.name for path in home.iterdir()] == [".bashrc"]
    assert (home / ".bashrc").read_text() == "mine"
    assert not (scene.folder / "new").exists()
    place = {"database": "database_url", "objects": "objects"}[key]
    inside = {"database": "sqlite:///hub.db", "objects": "objects"}[key]
    restore(scene.place, scene.folder / "new", **{place: inside})


def test_a_config_whose_merge_keys_double_without_end_is_refused_before_it_is_expanded(scene: Scene) -> None:
    scene.joined("ann")
    doubling = "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60))
    forge(scene, {}, "a0: &a0 {k: v}\n" + doubling)
    with pytest.raises(GymError, match=r"gym-server\.yaml:\d+:\d+: ") as caught:
        restore(scene.place, scene.folder / "new", objects="objects")
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def forge(scene: Scene, storage: dict[str, str], text: str | None = None) -> None:
    """Back a hub up, and write another place or text into the config of the backup, as its holder can."""
    snapshot = Path(scene.place) / "snapshots" / scene.backup()["snapshot"]
    config = yaml.safe_load((snapshot / "gym-server.yaml").read_text())
    config["storage"] = {**(config.get("storage") or {}), **storage}
    text = text or yaml.safe_dump(config)
    (snapshot / "gym-server.yaml").write_text(text)
    manifest = json.loads((snapshot / "manifest.json").read_text())
    manifest["files"]["gym-server.yaml"]["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (snapshot / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("key", ["objects", "database"])
def test_a_host_that_only_the_backup_names_is_not_connected_to(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    scene.joined("ann")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}"),
            ("AWS_ACCESS_KEY_ID", "mine"),
            ("AWS_SECRET_ACCESS_KEY", "mine"),
        ):
            monkeypatch.setenv(name, value)
        place = {"objects": "s3://stranger/hub", "database": f"postgresql+psycopg://u:secret@{host}/hub"}[key]
        forge(scene, {key: place})
        reached = []
        threading.Thread(target=lambda: reached.append(listener.accept()[0].close()), daemon=True).start()
        with pytest.raises(GymError, match="that you specify") as caught:
            restore(scene.place, scene.folder / "new")
        assert not reached
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert f"--{key}" in caught.value.hint
    assert ("s3://stranger/hub" if key == "objects" else host) in caught.value.message
    assert "secret" not in str(caught.value)
    assert not (scene.folder / "new").exists()


def pushed(client: HubClient, folder: Path, seed: int) -> str:
    """A variant of the client's, whose object the hub needs from now on."""
    path = some_delta(folder, seed=seed)
    signed = sign_variant(client, manifest_of(path, name=f"variant-{seed}"))
    push_variant(client, path, signed)
    return signed.manifest.delta_sha256


def test_plain_keys_are_backed_up_only_with_leave_or_under_a_passphrase(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.joined("ann")
    with pytest.raises(GymError, match=r"ledger\.pem is not encrypted"):
        backup(scene.hub.fed.state, scene.hub.fed.config, scene.place, KeyPolicy())
    assert not Path(scene.place).exists()
    backup(
        scene.hub.fed.state,
        scene.hub.fed.config,
        scene.place,
        KeyPolicy(passphrase=lambda: b"a long passphrase"),
    )
    for path in Path(scene.place).rglob("*"):
        assert not path.is_file() or b"BEGIN PRIVATE KEY" not in path.read_bytes(), path
    monkeypatch.setenv("GYM_SERVER_PASSPHRASE", "a long passphrase")
    restore(scene.place, scene.folder / "new")
    from gym_server.federation import Federation

    with Federation.open(scene.folder / "new") as fed:
        assert fed.server == scene.hub.fed.server
        assert fed.ledger.verify()["entries"] == 2


def test_an_older_snapshot_needs_leave_and_a_full_folder_is_never_written_to(scene: Scene) -> None:
    ann = scene.joined("ann")
    old = scene.backup()["snapshot"]
    scene.pay(1, ann.pin.contributor, 10)
    time.sleep(1.1)
    scene.backup()
    assert code_of(restore, scene.place, scene.folder / "new", snapshot=old) is ErrorCode.STALE
    assert not (scene.folder / "new").exists()
    head = scene.hub.fed.ledger.newest_head()
    assert head is not None
    scene.pay(2, ann.pin.contributor, 10)
    newest = scene.hub.fed.ledger.newest_head()
    assert code_of(restore, scene.place, scene.folder / "new", known=newest) is ErrorCode.STALE
    assert code_of(restore, scene.place, scene.hub.fed.folder) is ErrorCode.FILE_EXISTS
    found = restore(scene.place, scene.folder / "new", snapshot=old, fork=True)
    assert (found["entries"], found["lost"]) == (1, 1)
    statement = next(e.body["statement"] for e in entries_in(scene.folder / "new") if e.kind == "restored")
    assert statement["lost"] == head.to_dict()


def entries_in(folder: Path) -> list[Any]:
    from gym_server.federation import Federation

    with Federation.open(folder) as fed:
        return list(fed.ledger.entries())


def test_a_hub_that_is_put_back_under_its_anchor_names_the_command_and_continues_after_it(
    scene: Scene,
) -> None:
    ann = scene.joined("ann")
    folder = scene.hub.fed.folder
    copy = scene.folder / "hub.db.copy"
    with sqlite3.connect(folder / "hub.db") as source, sqlite3.connect(copy) as target:
        source.backup(target)
    scene.pay(1, ann.pin.contributor, 10)
    scene.hub.close()
    for name in ("hub.db-wal", "hub.db-shm"):
        (folder / name).unlink(missing_ok=True)
    os.replace(copy, folder / "hub.db")
    scene.hub = LoopbackHub(folder)
    with pytest.raises(GymError) as caught:
        scene.pay(1, ann.pin.contributor, 11)
    assert "gym-server restore --fork" in caught.value.hint
    scene.hub.close()
    signed = fork_in_place(folder, "put back")
    assert signed.statement.restored_at_entry == 1
    assert signed.statement.lost_head is not None
    scene.hub = LoopbackHub(folder)
    scene.pay(1, ann.pin.contributor, 11)
    assert scene.hub.fed.ledger.verify()["entries"] == 3


def test_a_hub_on_postgresql_is_backed_up_and_restored_into_another_database(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    scene = Scene(tmp_path, storage={"database": postgres.new_database()})
    try:
        ann = scene.joined("ann")
        sha256 = pushed(ann, tmp_path, 1)
        scene.pay(1, ann.pin.contributor, 10)
        found, entries = scene.backup(), list(scene.hub.fed.ledger.entries())
        assert found["entries"] == len(entries) >= 3
        assert check_backup(scene.place)["objects"] == 1
        scene.pay(2, ann.pin.contributor, 20)
        with pytest.raises(GymError, match="is not empty") as caught:
            restore(scene.place, tmp_path / "full", database_url=scene.hub.fed.config.storage.database)
        assert caught.value.code is ErrorCode.FILE_EXISTS
        assert PASSWORD not in str(caught.value)
        restore(scene.place, tmp_path / "new", database_url=postgres.new_database())
        scene.restart_from(tmp_path / "new")
        fed = scene.hub.fed
        assert fed.database.engine.dialect.name == "postgresql"
        now = list(fed.ledger.entries())
        assert now[: len(entries)] == entries
        assert [entry.kind for entry in now[len(entries) :]] == ["restored"]
        fed.ledger.verify()
        assert fed.store.has(sha256)
    finally:
        scene.close()


@pytest.mark.parametrize("to", ["sqlite", "postgresql"])
def test_a_restore_takes_rows_from_the_backups_database_and_no_trigger(
    scene: Scene, postgres: PostgresServer, to: str
) -> None:
    scene.joined("ann")
    alter_database(
        scene, "CREATE TRIGGER t AFTER INSERT ON ledger BEGIN UPDATE accounts SET status = 'left'; END"
    )
    url = {"sqlite": None, "postgresql": postgres.new_database()}[to]
    restore(scene.place, scene.folder / "new", database_url=url)
    scene.restart_from(scene.folder / "new")
    database = scene.hub.fed.database
    assert database.engine.dialect.name == to
    with database.reading() as tx:
        catalogue = {"sqlite": "SELECT count(*) FROM sqlite_master WHERE type = 'trigger'"}.get(
            to, "SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal"
        )
        assert tx.scalar(text(catalogue)) == 0
        assert tx.scalars(select(accounts.c.status)).all() == ["active"]
    scene.hub.fed.ledger.verify()


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        ("ALTER TABLE invites RENAME TO i; CREATE VIEW invites AS SELECT * FROM i", "has no table invites"),
        ("ALTER TABLE invites DROP COLUMN note", "cannot be copied to .*: no such column: invites.note"),
        ("DROP TABLE invites", "has no table invites"),
    ],
)
def test_a_restore_refuses_a_database_of_other_tables(
    scene: Scene, postgres: PostgresServer, statements: str, message: str
) -> None:
    scene.joined("ann")
    alter_database(scene, statements)
    with pytest.raises(GymError, match=message) as refused:
        restore(scene.place, scene.folder / "new", database_url=postgres.new_database())
    assert refused.value.code is ErrorCode.STATE_CORRUPT
    assert not (scene.folder / "new").exists()


def alter_database(scene: Scene, statements: str) -> None:
    """Back a hub up, and run SQL in the database of the backup, as its holder can."""
    snapshot = Path(scene.place) / "snapshots" / scene.backup()["snapshot"]
    with closing(sqlite3.connect(snapshot / "database")) as file:
        file.executescript(statements)
    manifest = json.loads((snapshot / "manifest.json").read_text())
    digest = hashlib.sha256((snapshot / "database").read_bytes()).hexdigest()
    manifest["files"]["database"]["sha256"] = digest
    (snapshot / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [(None, "no snapshot in {}"), ("20200101T000000Z", "no snapshot 20200101T000000Z in {}")],
)
def test_a_place_without_a_snapshot_is_named(tmp_path: Path, snapshot: str | None, expected: str) -> None:
    with pytest.raises(GymError) as caught:
        check_backup(str(tmp_path), snapshot)

    assert caught.value.message == expected.format(tmp_path)
