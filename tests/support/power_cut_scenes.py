"""A hub and a contributor in one process, noting what the disk has after each thing that one of them acknowledged.

``python -m tests.support.power_cut_scenes FOLDER CUTS`` runs under the shim of ``power_cut``, whose root ``FOLDER`` is.
Each line that it prints is a cut and what was acknowledged before it. The files of a cut are in ``CUTS/<name>``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gym_client.agent.residuals import Residuals
from gym_client.hub.heads import Heads
from gym_client.hub.transfers import ObjectCache, download, upload
from gym_client.identity.keystore import Keystore
from gym_client.privacy.book import Charge, PrivacyBook
from gym_server.backup.place import Place
from gym_server.rounds.admission import UpdateSubmission
from gym_server.rounds.soup_record import Judgement, SoupRecord
from gym_server.strategy.tasks import new_task

from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.serving.store.store import VariantStore
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.manifest import UpdateManifest, lifetime, new_nonce
from gym_fed.trust.ledger.heads import EntryProof
from tests.support.loopback_hub import LoopbackHub, some_delta

HUB, HOME, BACKUP, STORE = "hub", "home", "backup", "variants"
LINEAGE = "a lineage"


class Scenes:
    """``deltas`` holds what is sent, outside of the disk that loses its power."""

    def __init__(self, root: Path, cuts: Path) -> None:
        self.root, self.cuts = root, cuts
        self.deltas = cuts / "deltas"
        self.deltas.mkdir(parents=True)

    def cut(self, name: str, **acknowledged: Any) -> None:
        """The power goes."""
        disk = Path(os.environ["POWER_CUT_DISK"])
        for kind in ("files", "folders"):
            shutil.copytree(disk / kind, self.cuts / name / kind)
        print(json.dumps({"cut": name, **acknowledged}), flush=True)

    def hub(self) -> None:
        """From enrolment to a committed round; the contributor keeps what it is given."""
        hub = LoopbackHub(self.root / HUB)
        fed, client = hub.fed, hub.client(self.root / HOME)
        home, contributor = client.home, client.pin.contributor
        self.cut("enrolled", contributor=contributor)

        path = some_delta(self.deltas)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        upload(client, sha256, path)
        self.cut("uploaded", sha256=sha256)

        round_store = fed.round_store
        round_store.start_collecting(
            1, new_task(fed.state, fed.config, fed.max_update_bytes, round_store.open_next().server_round)
        )
        issued, expires = lifetime(time.time())
        manifest = UpdateManifest(
            contributor=contributor,
            server=fed.server,
            task="task-1",
            server_round=1,
            base_digest=round_store.head().digest,
            delta_sha256=sha256,
            delta_bytes=path.stat().st_size,
            nonce=new_nonce(),
            issued_at_seconds=issued,
            expires_at_seconds=expires,
            num_examples=3,
        )
        text, signature = manifest.model_dump_json(), manifest.sign(home.key)
        submission = UpdateSubmission(contributor, home.key.public_key, "task-1", 1, text, signature)
        receipt = fed.admission.judge(submission, lambda tx, receipt: None)
        assert receipt.verdict == "admitted", receipt
        self.cut("admitted", update=receipt.update, sequence=receipt.ledger_sequence)

        home.append_receipt(json.loads(receipt.to_json()))
        self.cut("receipt", update=receipt.update)
        home.append_receipt({"update": "another"})
        self.cut("second-receipt", update="another")

        proof = EntryProof.from_dict(receipt.proof)
        Heads(home, fed.key.public_key).see(proof.head, fed.ledger.proof)
        self.cut("head", server_key=fed.key.public_key.hex(), size=proof.head.size)

        merging = round_store.start_merging(1)
        soup = fed.store.put_file(some_delta(self.deltas, seed=99))
        self.cut("soup", sha256=soup)
        small = fed.store.put_bytes(b"a small object")
        self.cut("small", sha256=small)
        judgements = [Judgement(receipt.update, contributor, "merged", "", 1000)]
        version = round_store.commit(merging, SoupRecord(soup, 100, {}, None, None, None, None, judgements))
        self.cut("committed", digest=version.digest)

        download(client, ObjectCache(home.objects), soup, (self.deltas / "99.gymdelta").stat().st_size)
        self.cut("downloaded", sha256=soup)
        digest, _ = Place(str(self.root / BACKUP)).put(path, f"objects/{sha256[:2]}/{sha256}")
        self.cut("backup", sha256=digest)
        self.home(home)
        client.close()
        hub.close()

    def home(self, home: Any) -> None:
        """What a contributor writes down for itself before it goes on."""
        home.remember(name="ann")
        self.cut("settings")
        charge = Charge("data", "server", 1, "delta", 1.0, 0.1, 5, 1e-5, 0.0)
        PrivacyBook(home).charge(charge)
        self.cut("charged")
        PrivacyBook(home).charge(Charge(**{**vars(charge), "delta": "second"}))
        self.cut("charged-again")
        residual = ErrorFeedback.load(self.root / HOME / "tasks" / "task-1" / "residual", LINEAGE)
        residual.record("a", torch.ones(4))
        residuals = Residuals(home, "s" + "0" * 16)
        residuals.stage(residual.stage(), "update")
        self.cut("staged")
        residuals.accept("update")
        self.cut("accepted")
        store, new = Keystore(home.folder), SigningKey.generate()
        home.key  # noqa: B018 - made on first use
        store.keep_main()
        store.prepare(new)
        self.cut("prepared", public_key=new.public_key.hex())
        store.promote()
        self.cut("rotated", public_key=new.public_key.hex())

    def variants(self) -> None:
        """The store of a server of variants."""
        with VariantStore.open(self.root / STORE, require_signature=False) as store:
            for number, name in enumerate(("one", "two")):
                record = store.add(some_delta(self.deltas, seed=number), name=name, owner="ann")
                self.cut(f"variant-{name}", sha256=record.sha256)


def main() -> None:
    scenes = Scenes(Path(sys.argv[1]), Path(sys.argv[2]))
    scenes.hub()
    scenes.variants()


if __name__ == "__main__":
    main()
