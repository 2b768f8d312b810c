"""What admission refuses of an honest file: each claim of the manifest is checked against what the hub knows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_server.rounds.admission import Receipt, UpdateSubmission
from gym_server.store.tables import rounds, updates, versions
from gym_server.strategy.tasks import new_task
from sqlalchemy import select

from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.encode import encode_source
from gym_fed.delta.file import DeltaFile
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.manifest import UpdateManifest, lifetime, new_nonce
from tests.support.installed import install
from tests.support.loopback_hub import SPEC, LoopbackHub, some_delta

TASK = "task-1"


class Collecting:
    """A hub that collects round 1, and a contributor with an update that would be admitted."""

    def __init__(self, folder: Path) -> None:
        self.hub = LoopbackHub(folder / "hub")
        self.fed, self.key = self.hub.fed, SigningKey.generate()
        self.contributor = self.fed.accounts.get_or_create(self.key.public_key)
        self.fed.round_store.start_collecting(
            1,
            new_task(
                self.fed.state,
                self.fed.config,
                self.fed.max_update_bytes,
                self.fed.round_store.open_next().server_round,
            ),
        )
        self.path = some_delta(folder)

    def send(self, **changes: Any) -> Receipt:
        issued, expires = lifetime(time.time())
        said: dict[str, Any] = {
            "contributor": self.contributor,
            "server": self.fed.server,
            "task": TASK,
            "server_round": 1,
            "base_digest": self.fed.round_store.head().digest,
            "delta_sha256": self.fed.store.put_file(self.path),
            "delta_bytes": self.path.stat().st_size,
            "nonce": new_nonce(),
            "issued_at_seconds": issued,
            "expires_at_seconds": expires,
            "num_examples": 3,
        }
        manifest = UpdateManifest(**{**said, **changes})
        submission = UpdateSubmission(
            self.contributor,
            self.key.public_key,
            TASK,
            1,
            manifest.model_dump_json(),
            manifest.sign(self.key),
        )
        return self.fed.admission.judge(submission, lambda tx, receipt: None)

    def reasons(self) -> list[str]:
        with self.fed.database.reading() as tx:
            return list(tx.scalars(select(updates.c.reason).order_by(updates.c.received_at)))


@pytest.fixture
def collecting(tmp_path: Path) -> Iterator[Collecting]:
    found = Collecting(tmp_path)
    yield found
    found.hub.close()


NOW = int(time.time())


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        (
            {"issued_at_seconds": NOW - 7200, "expires_at_seconds": NOW - 3600},
            ErrorCode.STALE,
            "the manifest expired 1 h",
        ),
        ({"task": "task-of-somebody-else"}, ErrorCode.STALE, "is for task task-of-somebody-else"),
        ({"server": "s" + "0" * 16}, ErrorCode.STALE, "is for hub s0000"),
        ({"server_round": 2}, ErrorCode.STALE, "round 2 accepts no more updates"),
        ({"delta_bytes": 1 << 20}, ErrorCode.UPDATE_REFUSED, "the manifest says 1,048,576 bytes"),
        ({"base_digest": "sha256:" + "cd" * 32}, ErrorCode.BASE_MISMATCH, "base"),
    ],
    ids=["expired", "other task", "other hub", "other round", "size", "base"],
)
def test_an_update_whose_manifest_claims_something_else_is_refused_and_the_honest_one_admitted(
    collecting: Collecting, changes: dict[str, Any], code: ErrorCode, reason: str
) -> None:
    receipt = collecting.send(**changes)
    assert (receipt.verdict, receipt.code) == ("refused", code.value), receipt.reason
    assert reason in receipt.reason
    assert collecting.send().verdict == "admitted", "the only thing wrong was the claim"


def test_an_update_in_a_plug_ins_codec_that_the_task_does_not_name_is_refused_and_nothing_imported(
    collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = collecting.path.read_bytes()
    collecting.path.write_bytes(honest.replace(b"dense", b"trap5"))
    assert collecting.path.read_bytes() != honest
    install(monkeypatch, {"gym_fed.codecs": {"trap5": "tests.unit.no_such_module:Trap"}})
    receipt = collecting.send()
    assert (receipt.verdict, receipt.code) == ("refused", ErrorCode.UPDATE_REFUSED.value), receipt.reason
    assert receipt.reason.endswith("uses a codec that is not in the task of round 1")


def test_an_update_in_a_codec_of_soups_is_refused_before_its_codes_are_inflated(
    collecting: Collecting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inflated(data: bytes, size: int) -> bytes:
        raise AssertionError("a small file may inflate to any size")

    deltas = {name: torch.zeros(shape) + 1e-3 for name, shape in SPEC.shapes.items()}
    policy = CodecPolicy(codec="lattice", error_feedback=False)
    collecting.path = tmp_path / "lattice.gymdelta"
    encode_source(deltas.__getitem__, policy, collecting.path, SPEC)
    monkeypatch.setattr("gym_quant.codecs.lattice._inflate", inflated)
    receipt = collecting.send()
    assert (receipt.verdict, receipt.code) == ("refused", ErrorCode.DELTA_INVALID.value), receipt.reason
    assert "tensor 'a.weight': codec 'lattice' is only for soups" in receipt.reason


def test_an_update_that_is_for_another_base_throughout_is_refused(
    collecting: Collecting, tmp_path: Path
) -> None:
    """File and manifest agree, and neither is of the version that the round is on."""
    other = "sha256:" + "cd" * 32
    collecting.path = some_delta(tmp_path, seed=1, digest=other)
    receipt = collecting.send(base_digest=other)
    assert (receipt.verdict, receipt.code) == ("refused", ErrorCode.BASE_MISMATCH.value)


def test_an_update_above_the_norm_cap_is_refused_and_one_at_it_admitted(collecting: Collecting) -> None:
    admission = collecting.fed.admission
    with DeltaFile.open(collecting.path) as delta:
        norm = delta.norm()
    for cap, verdict in ((norm * 0.999, "refused"), (norm, "admitted")):
        admission._config = admission._config.model_copy(update={"max_norm": cap})
        receipt = collecting.send()
        assert receipt.verdict == verdict
    assert "above the cap" in collecting.reasons()[0]


def test_a_contributor_has_one_update_in_a_round_and_sends_no_copy_of_merged_work(
    collecting: Collecting, tmp_path: Path
) -> None:
    sent = collecting.send()
    assert sent.verdict == "admitted"
    collecting.path, mine = some_delta(tmp_path, seed=1), collecting.path
    again = collecting.send()
    assert (again.verdict, "already sent update" in again.reason) == ("refused", True)
    collecting.path, first = mine, collecting.contributor
    collecting.key = SigningKey.generate()
    collecting.contributor = collecting.fed.accounts.get_or_create(collecting.key.public_key)
    with collecting.fed.database.transaction() as tx:
        known = updates.c.update_id == sent.update
        tx.execute(updates.update().where(known).values(server_round=0, verdict="merged"))
        tx.execute(
            versions.insert().values(
                height=1,
                digest=collecting.fed.base.digest,  # so that the task's version stays the current one
                server_round=0,
                soup_sha256="0" * 64,
                soup_bytes=1,
                parent=0,
                num_updates=1,
                committed_at=0.0,
            )
        )
    copy = collecting.send()
    assert (copy.verdict, f"a copy of a delta by {first}" in copy.reason) == ("refused", True)
    collecting.path = some_delta(tmp_path, seed=2)
    assert collecting.send().verdict == "admitted"


def test_two_people_with_the_same_rows_may_send_the_same_bytes_in_one_round(collecting: Collecting) -> None:
    assert collecting.send().verdict == "admitted"
    collecting.key = SigningKey.generate()
    collecting.contributor = collecting.fed.accounts.get_or_create(collecting.key.public_key)
    assert collecting.send().verdict == "admitted"


def test_a_manifest_signed_while_the_hub_was_down_is_admitted_though_the_hubs_time_stood_still(
    collecting: Collecting,
) -> None:
    receipt = collecting.send(issued_at_seconds=NOW + 7200, expires_at_seconds=NOW + 14400)
    assert receipt.verdict == "admitted", receipt.reason


def test_a_manifest_counts_to_its_last_second_and_no_longer(collecting: Collecting) -> None:
    issued, expires = lifetime(time.time())
    collecting.fed.clock.wall = lambda: expires + 0.5
    receipt = collecting.send(issued_at_seconds=issued, expires_at_seconds=expires)
    assert (receipt.verdict, receipt.code) == ("refused", ErrorCode.STALE.value)


@pytest.mark.parametrize("state", ["open", "collecting", "merging", "committed", "aborted", "unknown"])
@pytest.mark.parametrize("step", ["start_collecting", "start_merging", "commit", "abort"])
def test_a_round_goes_only_from_the_state_before(collecting: Collecting, step: str, state: str) -> None:
    """A round that was committed is never merged, committed or aborted again."""
    from gym_server.rounds.round_store import Round
    from gym_server.rounds.soup_record import SoupRecord

    fed, number = collecting.fed, 1 if state != "unknown" else 99
    with fed.database.transaction() as tx:
        spec = tx.scalar(select(rounds.c.spec))
        tx.execute(rounds.update().values(state=state))
    soup = SoupRecord(fed.store.put_file(collecting.path), 1, {}, None, None, None, None, [])
    calls: dict[str, Any] = {
        "start_collecting": lambda: fed.round_store.start_collecting(
            number, new_task(fed.state, fed.config, fed.max_update_bytes, 1)
        ),
        "start_merging": lambda: fed.round_store.start_merging(number),
        "commit": lambda: fed.round_store.commit(Round(number, "merging", None, 0, [], ""), soup),
        "abort": lambda: fed.round_store.abort(number, "why"),
    }
    before = {
        "start_collecting": {"open"},
        "start_merging": {"collecting"},
        "commit": {"merging"},
        "abort": {"open", "collecting", "merging"},
    }
    entries = len(list(fed.ledger.entries()))
    if state in before[step]:
        calls[step]()
        return
    with pytest.raises(GymError, match="cannot go from") as caught:
        calls[step]()
    assert caught.value.code is ErrorCode.INTERNAL
    with fed.database.reading() as tx:
        kept = tx.execute(select(rounds.c.state, rounds.c.spec)).all()
    assert [tuple(row) for row in kept] == [(state, spec)], "nothing of a refused step is written"
    assert len(list(fed.ledger.entries())) == entries


def test_a_file_that_cannot_be_read_is_refused_without_the_hubs_folder(collecting: Collecting) -> None:
    collecting.path.write_bytes(b"\xff" * 100)
    receipt = collecting.send()
    assert (receipt.verdict, receipt.code) == ("refused", "delta-invalid")
    assert "is truncated" in receipt.reason
    entries = [entry.body_json for entry in collecting.fed.ledger.entries()]
    for text in (receipt.reason, *entries):
        assert str(collecting.fed.folder) not in text
