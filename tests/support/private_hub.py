"""A hub with privacy in this process: rounds of made-up updates through admission, merge, gate and commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import yaml
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.rounds.admission import Receipt, UpdateSubmission
from gym_server.rounds.round_store import Round
from gym_server.strategy import DeltaSoup

from gym_fed.delta.base import BaseSpec
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.manifest import UpdateManifest, lifetime, new_nonce
from tests.support.private_configs import NOTHING_COMPARED

PRIVATE: dict[str, Any] = {
    "rounds": {"num_rounds": 5, "min_contributors": 3},
    "soup": {
        "aggregator": "mean",
        "num_malicious_nodes": 0,
        "codec": {"codec": "dense", "error_feedback": False},
    },
    "codec": {"codec": "dense", "error_feedback": False},
    **NOTHING_COMPARED,
    "enrolment": {"policy": "open"},
    "privacy": {"noise_multiplier": 1.0, "clipping_norm": 0.5, "epsilon": 30.0},
}
NAMES = ("ann", "bob", "cat")


class _NoNodes:
    def get_node_ids(self) -> list[int]:
        return []


def private_hub(folder: Path, base: Path, **changes: Any) -> Path:
    """A hub's folder with the config ``PRIVATE``, sections replaced by ``changes``; None leaves one out."""
    init_hub(folder, HubChoices(str(base), "private", "open"))
    path = folder / "gym-server.yaml"
    values = {**PRIVATE, **changes, "base_model": str(base), "listen": "127.0.0.1:0"}
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}))
    return folder


class PrivateRounds:
    """Rounds of a hub's folder, with contributors whose keys stay the same."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed
        self.keys = {name: SigningKey.generate() for name in NAMES}
        self.strategy = DeltaSoup(fed)

    def delta(self, name: str, number: int, scale: float = 0.05) -> Path:
        """A made-up update, the same for the same arguments."""
        head = self.fed.round_store.head()
        spec = BaseSpec(self.fed.base.model_name, head.digest, self.fed.base.shapes)
        generator = torch.Generator().manual_seed(NAMES.index(name) * 100 + number)
        path = self.fed.folder / "staging" / f"{name}-{number}.gymdelta"
        write_delta(
            path,
            [
                DeltaEntry.of(n, scale * torch.randn(shape, generator=generator), "dense", dtype="float32")
                for n, shape in spec.shapes.items()
            ],
            spec,
        )
        return path

    def collect(self, scale: float = 0.05, send: bool = True) -> int:
        """Open the next round, or go on with the open one, and send everybody's update; returns its number."""
        current = self.fed.round_store.current()
        number = current.server_round + 1 if current and current.state in ("committed", "aborted") else 1
        list(
            self.strategy.configure_train(
                number, ArrayRecord(), ConfigRecord(), cast("Grid", cast("Any", _NoNodes()))
            )
        )
        for key in self.keys.values():
            self.fed.accounts.get_or_create(key.public_key)
        for name in NAMES if send else ():
            self.send(name, number, self.delta(name, number, scale))
        return number

    def send(self, name: str, number: int, path: Path) -> Receipt:
        """One update through admission."""
        key, size = self.keys[name], path.stat().st_size
        issued, expires = lifetime(self.fed.clock.now())
        manifest = UpdateManifest(
            contributor=key.contributor,
            server=self.fed.server,
            task=f"task-{name}-{number}",
            server_round=number,
            base_digest=self.fed.round_store.head().digest,
            delta_sha256=self.fed.store.put_file(path),
            delta_bytes=size,
            nonce=new_nonce(),
            issued_at_seconds=issued,
            expires_at_seconds=expires,
            num_examples=3,
        )
        submission = UpdateSubmission(
            key.contributor,
            key.public_key,
            manifest.task,
            number,
            manifest.model_dump_json(),
            manifest.sign(key),
        )
        return self.fed.admission.judge(submission, lambda tx, receipt: None)

    def finish(self, number: int) -> Round:
        """Merge, gate, commit or abort."""
        self.strategy.aggregate_train(number, [])
        current = self.fed.round_store.current()
        assert current is not None
        return current

    def run(self, scale: float = 0.05) -> Round:
        """A whole round."""
        return self.finish(self.collect(scale))

    def entries(self, kind: str) -> list[dict[str, Any]]:
        """Bodies of the ledger's entries of a kind."""
        return [entry.body for entry in self.fed.ledger.entries() if entry.kind == kind]
