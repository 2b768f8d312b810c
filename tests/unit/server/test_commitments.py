"""A digest is committed to before its first byte is sent, which proves the order of two equal updates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gym_client.agent.task_objects import TaskObjects
from gym_client.identity.home import Home
from gym_client.ledger.receipts import kept_receipts
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.rewards.free_riders import _duplicates
from gym_server.rounds import commitments
from gym_server.rounds.commitments import Commitments, committed_at
from gym_server.rpc.hub import Hub
from gym_server.rpc.streams import Wakeups

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.commitment import UploadCommitment
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.wire.v1 import hub_pb2 as pb

DIGEST = hashlib.sha256(b"an update").hexdigest()
ANN = SigningKey.generate().contributor


@pytest.fixture
def fed(tmp_path: Path, tiny_base: Path) -> Iterator[Federation]:
    init_hub(tmp_path / "hub", HubChoices(str(tiny_base), "commitments", "open"))
    with Federation.open(tmp_path / "hub") as opened:
        yield opened


def test_an_upload_is_committed_to_when_it_is_declared_and_the_first_time_stays(
    fed: Federation,
) -> None:
    fed.clock.wall = lambda: 1000.0
    hub = Hub(fed, Wakeups())
    state = hub._begin_upload(ANN, pb.BeginUploadRequest(sha256=DIGEST, size_bytes=9))
    assert (state.offset, state.complete) == (0, False), "no byte was sent"
    found = UploadCommitment.verified(state.commitment_json, fed.key.public_key)
    assert found == UploadCommitment(fed.server, ANN, DIGEST, 1000)
    fed.clock.wall = lambda: 2000.0
    again = hub._begin_upload(ANN, pb.BeginUploadRequest(sha256=DIGEST, size_bytes=9))
    assert again.commitment_json == state.commitment_json
    with fed.database.reading() as tx:
        assert committed_at(tx, ANN, DIGEST) == 1000.0
        assert committed_at(tx, "somebody else", DIGEST) is None


def test_the_commitments_of_an_account_are_bounded(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commitments, "MAX_KEPT", 3)
    digests = [hashlib.sha256(bytes([number])).hexdigest() for number in range(5)]
    for number, sha256 in enumerate(digests):
        kept = Commitments(fed.key, fed.server, lambda at=float(number): at)  # type: ignore[misc]
        with fed.database.transaction() as tx:
            kept.commit(tx, ANN, sha256)
    with fed.database.reading() as tx:
        assert [committed_at(tx, ANN, sha256) for sha256 in digests] == [None, None, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "change", [{"committed_at": 1}, {"contributor": "c0"}, {"sha256": "0" * 64}, {"more": 1}]
)
def test_a_commitment_that_the_hub_did_not_sign_is_refused(change: dict[str, Any]) -> None:
    key = SigningKey.generate()
    text = UploadCommitment("s0", ANN, DIGEST, 1000).signed(key)
    document = json.loads(text)
    document["statement"] |= change
    for said in (json.dumps(document), "[]", "{", "x" * 5000):
        with pytest.raises(GymError) as refused:
            UploadCommitment.verified(said, key.public_key)
        assert refused.value.code is ErrorCode.SIGNATURE_INVALID


def test_a_contributor_keeps_the_commitment_to_its_own_digest_and_refuses_another(tmp_path: Path) -> None:
    home, key = Home.open(tmp_path / "home"), SigningKey.generate()
    pin = SimpleNamespace(server="s0", contributor=ANN, ledger_key=key.public_key.hex())
    objects = TaskObjects.__new__(TaskObjects)
    objects._home, objects._client = home, SimpleNamespace(pin=pin)  # type: ignore[assignment]
    objects._keep_commitment(UploadCommitment("s0", ANN, DIGEST, 1000).signed(key), DIGEST)
    objects._keep_commitment("", DIGEST)
    (receipt,) = home.receipts()
    assert receipt["commitment"]["statement"]["committed_at"] == 1000
    assert kept_receipts(home, "s0") == [], "it proves no entry of the ledger"
    with pytest.raises(GymError) as refused:
        objects._keep_commitment(UploadCommitment("s0", ANN, "0" * 64, 1000).signed(key), DIGEST)
    assert refused.value.code is ErrorCode.SIGNATURE_INVALID


def test_of_two_that_are_the_same_work_the_one_committed_first_is_merged_though_it_arrives_last() -> None:
    def row(who: str, committed: float | None, received: float) -> Any:
        return SimpleNamespace(
            update_id=who, contributor=who, committed_at=committed, received_at=received, delta_sha256=who
        )

    alike = np.array([[1.0, 0.99], [0.99, 1.0]])
    rows = [row("copier", 20.0, 21.0), row("author", 10.0, 90.0)]
    assert set(_duplicates(rows, alike, 0.9)) == {"copier"}
    before = [row("copier", None, 21.0), row("author", None, 90.0)]
    assert set(_duplicates(before, alike, 0.9)) == {"author"}
