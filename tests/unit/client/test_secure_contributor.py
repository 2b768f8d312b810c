"""What a contributor does not do for a malicious hub: mask twice, answer twice, or trust keys that nobody signed."""

from __future__ import annotations

import json
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_client.agent.tasks import TaskFolder, Trained
from gym_client.identity.home import Home
from gym_client.privacy.secure_round import SecureRound, forget, titled
from gym_client.privacy.terms import SecureTerms

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.task import TaskSpec
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta
from gym_fed.privacy.secure_aggregation.keys import new_secret, public_of
from gym_fed.privacy.secure_aggregation.messages import (
    Confirmation,
    Masking,
    Participants,
    SealedShares,
    Survivors,
    Unmasking,
    task_digest,
)
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.wire.v1 import hub_pb2 as pb

BASE = {"w": torch.zeros(16, 16)}
SPEC = BaseSpec.of(BASE, "base")
NAMES = ["ann", "bob", "cyd"]


def task(server_round: int = 1, threshold: int = 2, **other: Any) -> TaskSpec:
    return TaskSpec(
        server="s" + "0" * 16,
        server_round=server_round,
        base_model="base",
        base_digest=SPEC.digest,
        version_digest=SPEC.digest,
        max_update_bytes=1 << 20,
        deadline_seconds=time.time() + 60,
        secure_aggregation={"threshold": threshold},
        **other,
    )


class Round:
    """Three contributors up to the stage that a test is about."""

    def __init__(self, folder: Path) -> None:
        self.homes = {name: Home.open(str(folder / name)) for name in NAMES}
        self.begin()

    def begin(self) -> None:
        self.of = {name: SecureRound(home, task(), home.key) for name, home in self.homes.items()}
        self.ids = {name: home.key.contributor for name, home in self.homes.items()}
        self.participants = Participants(
            adverts=sorted((r.advertise() for r in self.of.values()), key=lambda s: s.advert.contributor)
        )

    def share(self) -> dict[str, SealedShares]:
        return {name: r.share(self.participants.model_dump_json()) for name, r in self.of.items()}

    def masking(self, shares: dict[str, SealedShares], name: str) -> str:
        others, own = {self.ids[n]: s for n, s in shares.items() if n != name}, self.ids[name]
        sealed = {dealer: s.sealed[own] for dealer, s in others.items()}
        commitments = {dealer: s.commitments[own] for dealer, s in others.items()}
        return Masking(sealed=sealed, commitments=commitments).model_dump_json()

    def mask(self, name: str, seed: int = 0, round_: SecureRound | None = None) -> Trained:
        folder = TaskFolder(self.homes[name].task_folder(f"task-{seed}"))
        folder.path.mkdir(exist_ok=True)
        tuned = {"w": torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))}
        report = encode_delta(tuned, BASE, CodecPolicy(error_feedback=False), folder.delta_path, SPEC)
        trained = Trained(report.sha256, report.size_bytes, 9, {"train_loss": 2.0})
        return (round_ or self.of[name]).mask(folder, trained, SPEC, "data")

    def survivors(self, *names: str) -> str:
        return Survivors(survivors=sorted(self.ids[name] for name in names)).model_dump_json()

    def unmasking(self, names: list[str], signers: list[str]) -> str:
        survivors = sorted(self.ids[name] for name in names)
        confirmations = {
            self.ids[name]: Confirmation.sign(survivors, self.participants, self.homes[name].key)
            for name in signers
        }
        return Unmasking(survivors=survivors, confirmations=confirmations).model_dump_json()


@pytest.fixture
def began(tmp_path: Path) -> Round:
    return Round(tmp_path)


def refusal(action: Callable[[], object]) -> GymError:
    with pytest.raises(GymError) as refused:
        action()
    return refused.value


def test_secrets_lie_in_a_file_for_the_owner_alone_and_go_with_the_round(began: Round) -> None:
    path = next(began.homes["ann"].folder.glob("secure/*/state.json"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server = began.participants.adverts[0].advert.server
    forget(began.homes["ann"], server, [{"server_round": 1, "verdict": "admitted"}])
    assert path.exists()
    forget(began.homes["ann"], server, [{"server_round": 1, "verdict": "merged"}])
    assert not path.exists()
    SecureRound(began.homes["bob"], task(server_round=2), began.homes["bob"].key).advertise()
    assert [p.name[-2:] for p in began.homes["bob"].folder.glob("secure/s*")] == ["-2"]


def test_a_restarted_contributor_gives_the_same_keys_and_the_same_sealed_shares(began: Round) -> None:
    shares = began.share()["ann"]
    again = SecureRound(began.homes["ann"], task(), began.homes["ann"].key)
    assert again.advertise() in began.participants.adverts
    assert again.share(began.participants.model_dump_json()) == shares


def test_a_hub_that_swaps_a_key_is_found_out_before_anything_is_sealed_for_it(began: Round) -> None:
    signed = began.participants.adverts[0]
    forged = signed.advert.model_copy(update={"cipher_key": public_of(new_secret()).hex()})
    adverts = [signed.model_copy(update={"advert": forged}), *began.participants.adverts[1:]]
    error = refusal(lambda: began.of["cyd"].share(Participants(adverts=adverts).model_dump_json()))
    assert error.code is ErrorCode.SIGNATURE_INVALID


def test_another_list_than_before_or_one_without_oneself_is_refused(began: Round) -> None:
    others = [s for s in began.participants.adverts if s.advert.contributor != began.ids["ann"]]
    error = refusal(lambda: began.of["ann"].share(Participants(adverts=others).model_dump_json()))
    assert "lacks this contributor" in error.message
    shares = began.share()
    fewer = [s for s in began.participants.adverts if s.advert.contributor != began.ids["bob"]]
    error = refusal(lambda: began.of["ann"].share(Participants(adverts=fewer).model_dump_json()))
    assert "has changed" in error.message
    began.of["ann"].receive(began.masking(shares, "ann"))
    del shares["bob"]
    assert "has changed" in refusal(lambda: began.of["ann"].receive(began.masking(shares, "ann"))).message


def test_a_share_that_the_hub_tampered_with_is_refused(began: Round) -> None:
    shares = began.share()
    sealed = shares["bob"].sealed[began.ids["ann"]]
    forged = {**shares["bob"].sealed, began.ids["ann"]: sealed[:-2] + ("00" if sealed[-2:] != "00" else "01")}
    shares["bob"] = shares["bob"].model_copy(update={"sealed": forged})
    error = refusal(lambda: began.of["ann"].receive(began.masking(shares, "ann")))
    assert error.code is ErrorCode.UPDATE_REFUSED
    assert began.ids["bob"] in error.message


def test_a_share_that_is_not_what_its_dealer_committed_to_is_refused(began: Round) -> None:
    """It would be taken for ann's own forgery when ann reveals it."""
    shares = began.share()
    dealt = shares["bob"].commitments
    swapped = {**dealt, began.ids["ann"]: dealt[began.ids["cyd"]]}
    shares["bob"] = shares["bob"].model_copy(update={"commitments": swapped})
    error = refusal(lambda: began.of["ann"].receive(began.masking(shares, "ann")))
    assert f"the shares sealed by {began.ids['bob']} do not match" in error.message


def test_who_deals_shares_signs_for_each_of_them_and_for_everybody(began: Round) -> None:
    shares, adverts = began.share(), began.participants.of()
    dealt, ann = shares["ann"], adverts[began.ids["ann"]]
    dealt.verify(ann, began.participants)
    swapped = dict(zip(dealt.commitments, reversed(dealt.commitments.values()), strict=True))
    for forged in (
        dealt.model_copy(update={"commitments": swapped}),
        dealt.model_copy(update={"signature": shares["bob"].signature}),
    ):
        error = refusal(lambda forged=forged: forged.verify(ann, began.participants))  # type: ignore[misc]
        assert error.code is ErrorCode.SIGNATURE_INVALID
    fewer = {holder: pair for holder, pair in dealt.commitments.items() if holder != began.ids["cyd"]}
    short = dealt.model_copy(update={"commitments": fewer})
    assert "does not deal shares to exactly" in refusal(lambda: short.verify(ann, began.participants)).message


def test_a_round_that_was_begun_and_forgotten_is_not_begun_again(began: Round) -> None:
    server = task().server
    for home in began.homes.values():
        forget(home, server, [{"server_round": 1, "verdict": "aborted"}])
    assert "this machine has already begun round" in refusal(began.begin).message
    ann = began.homes["ann"]
    SecureRound(ann, task(server_round=3), ann.key).advertise()
    SecureRound(ann, task(server_round=3), ann.key).advertise()  # not forgotten yet
    for earlier in (1, 2):
        error = refusal(lambda n=earlier: SecureRound(ann, task(server_round=n), ann.key).advertise())  # type: ignore[misc]
        assert error.code is ErrorCode.UPDATE_REFUSED


def test_no_task_of_a_name_that_the_hub_chose_ends_a_round(began: Round) -> None:
    ann = began.homes["ann"]
    for name in (f"secure-{task().server}-1", f"{task().server}-1"):
        TaskFolder(ann.task_folder(name)).drop()
    assert SecureRound(ann, task(), ann.key).advertise() in began.participants.adverts


def test_signatures_of_another_run_of_the_round_confirm_nothing(began: Round) -> None:
    """A hub that has machines forget a round gathers signatures under several lists, one a run."""
    listed = ["ann", "bob"]
    stolen = Unmasking.model_validate_json(began.unmasking(listed, listed))
    for home in began.homes.values():  # as on machines that were set up anew
        shutil.rmtree(home.folder / "secure")
    began.begin()
    shares = began.share()
    began.of["ann"].receive(began.masking(shares, "ann"))
    began.mask("ann")
    began.of["ann"].confirm(began.survivors(*listed))
    error = refusal(lambda: began.of["ann"].unmask(stolen.model_dump_json()))
    assert error.code is ErrorCode.SIGNATURE_INVALID
    began.of["ann"].unmask(began.unmasking(listed, listed))


def test_one_round_masks_one_vector_and_sends_no_metric_of_it(began: Round) -> None:
    shares = began.share()
    assert "before it has forwarded" in refusal(lambda: began.mask("ann")).message
    began.of["ann"].receive(began.masking(shares, "ann"))
    trained = began.mask("ann")
    assert (trained.metrics, trained.num_examples) == ({}, 1)
    assert began.mask("ann").sha256 == trained.sha256  # the same again after a kill
    restarted = SecureRound(began.homes["ann"], task(), began.homes["ann"].key)
    assert "different votes" in refusal(lambda: began.mask("ann", 1, restarted)).message


def test_for_each_other_a_share_of_the_seed_or_of_the_mask_key_and_never_both(began: Round) -> None:
    shares = began.share()
    began.of["ann"].receive(began.masking(shares, "ann"))
    began.mask("ann")
    request = began.unmasking(["ann", "bob"], ["ann", "bob"])
    began.of["ann"].confirm(began.survivors("ann", "bob"))
    revealed = began.of["ann"].unmask(request)
    assert revealed.seeds.keys() == {began.ids["ann"], began.ids["bob"]}
    assert revealed.mask_keys.keys() == {began.ids["cyd"]}
    said = [
        began.of["ann"].advertise(),
        shares["ann"],
        began.of["ann"].confirm(began.survivors("ann", "bob")),
    ]
    sent = sum(len(message.model_dump_json()) for message in (*said, revealed))
    assert 0.8 < sent / SecureTerms(task().secure_aggregation.threshold).message_bytes < 1
    restarted = SecureRound(began.homes["ann"], task(), began.homes["ann"].key)
    assert restarted.unmask(request) == revealed
    error = refusal(lambda: restarted.confirm(began.survivors("ann", "bob", "cyd")))
    assert "list of survivors has changed" in error.message
    other = began.unmasking(["ann", "bob", "cyd"], ["bob", "cyd"])
    assert "survivors differs from the list that this" in refusal(lambda: restarted.unmask(other)).message


def test_a_list_of_survivors_that_too_few_signed_unmasks_nothing(began: Round) -> None:
    shares = began.share()
    began.of["ann"].receive(began.masking(shares, "ann"))
    began.mask("ann")
    listed = ["ann", "bob"]
    assert (
        "this contributor signed"
        in refusal(lambda: began.of["ann"].unmask(began.unmasking(listed, listed))).message
    )
    began.of["ann"].confirm(began.survivors(*listed))
    few = refusal(lambda: began.of["ann"].unmask(began.unmasking(listed, ["ann"])))
    assert "1 contributor confirmed" in few.message
    forged = Unmasking.model_validate_json(began.unmasking(listed, listed))
    ids = [began.ids[name] for name in listed]
    swapped = {ids[0]: forged.confirmations[ids[1]], ids[1]: forged.confirmations[ids[1]]}
    request = forged.model_copy(update={"confirmations": swapped}).model_dump_json()
    assert refusal(lambda: began.of["ann"].unmask(request)).code is ErrorCode.SIGNATURE_INVALID


@pytest.mark.parametrize(
    ("names", "why"), [(("ann",), "fewer than the threshold"), (("bob", "cyd"), "lacks this contributor")]
)
def test_too_few_survivors_or_a_list_without_oneself_unmask_nothing(
    began: Round, names: tuple[str, ...], why: str
) -> None:
    shares = began.share()
    began.of["ann"].receive(began.masking(shares, "ann"))
    began.mask("ann")
    assert why in refusal(lambda: began.of["ann"].confirm(began.survivors(*names))).message


def test_a_round_that_a_hub_could_split_is_refused(tmp_path: Path) -> None:
    homes = [Home.open(str(tmp_path / f"h{i}")) for i in range(4)]
    rounds = [SecureRound(home, task(), home.key) for home in homes]
    adverts = sorted((r.advertise() for r in rounds), key=lambda s: s.advert.contributor)
    error = refusal(lambda: rounds[0].share(Participants(adverts=adverts).model_dump_json()))
    assert "not more than half of the 4" in error.message


def test_a_task_without_secure_aggregation_has_no_secrets_to_ask_for(tmp_path: Path) -> None:
    plain = TaskSpec.model_validate({**task().model_dump(), "secure_aggregation": None})
    home = Home.open(str(tmp_path / "home"))
    assert refusal(lambda: SecureRound(home, plain, home.key)).code is ErrorCode.POLICY_REFUSED


def test_a_key_that_is_rotated_meanwhile_does_not_change_who_this_is_in_the_round(began: Round) -> None:
    shares = began.share()
    rotated = SecureRound(began.homes["ann"], task(), SigningKey.generate())
    rotated.receive(began.masking(shares, "ann"))
    began.mask("ann", 0, rotated)
    rotated.confirm(began.survivors("ann", "bob"))
    assert began.ids["ann"] in rotated.unmask(began.unmasking(["ann", "bob"], ["ann", "bob"])).seeds


OTHER_TASKS: dict[str, dict[str, Any]] = {
    "learning rate": {"recipe": {"learning_rate": 0.5}},
    "data seed": {"recipe": {"seed": 7}},
    "version": {
        "soups": [
            {"sha256": "1" * 64, "size_bytes": 9, "version_digest": "sha256:" + "2" * 64, "server_round": 1}
        ],
        "version_digest": "sha256:" + "2" * 64,
    },
    "codec": {"codec": {"codec": "dense"}},
    "size": {"max_update_bytes": 1 << 19},
}


def other_task(which: str, **named: Any) -> TaskSpec:
    return TaskSpec.model_validate({**task(**named).model_dump(), **OTHER_TASKS[which]})


@pytest.mark.parametrize("which", OTHER_TASKS)
def test_with_participants_of_another_task_nothing_is_sealed_and_they_are_named(
    tmp_path: Path, which: str
) -> None:
    homes = [Home.open(str(tmp_path / name)) for name in NAMES]
    given = [task(), task(), other_task(which)]
    rounds = [SecureRound(home, spec, home.key) for home, spec in zip(homes, given, strict=True)]
    adverts = sorted((r.advertise() for r in rounds), key=lambda s: s.advert.contributor)
    text = Participants(adverts=adverts).model_dump_json()
    errors = [refusal(lambda r=r: r.share(text)) for r in rounds]  # type: ignore[misc]
    assert {error.code for error in errors} == {ErrorCode.TASKS_DIFFER}
    ann, bob, cyd = (home.key.contributor for home in homes)
    assert cyd in errors[0].message
    assert bob not in errors[0].message
    assert ann in errors[2].message
    assert bob in errors[2].message
    assert "no participant is at fault" in errors[0].hint


@pytest.mark.parametrize("which", OTHER_TASKS)
def test_a_task_that_changes_within_the_round_is_refused_at_every_later_stage(
    began: Round, which: str
) -> None:
    ann = began.homes["ann"]
    shares = began.share()
    error = refusal(lambda: SecureRound(ann, other_task(which), ann.key))
    assert error.code is ErrorCode.TASKS_DIFFER
    began.of["ann"].receive(began.masking(shares, "ann"))
    began.mask("ann")
    began.of["ann"].confirm(began.survivors("ann", "bob"))
    assert refusal(lambda: SecureRound(ann, other_task(which), ann.key)).code is ErrorCode.TASKS_DIFFER


def test_the_deadline_alone_may_move_within_a_round(began: Round) -> None:
    shares, ann = began.share(), began.homes["ann"]
    later = TaskSpec.model_validate({**task().model_dump(), "deadline_seconds": time.time() + 900})
    SecureRound(ann, later, ann.key).receive(began.masking(shares, "ann"))


def test_every_field_of_a_task_but_the_deadline_is_bound() -> None:
    """A field that is added to the task is bound too, since the digest names what it leaves out."""
    whole = task().model_dump(mode="json")
    recipe = {"gym-secagg-2 task": {key: value for key, value in whole.items() if key != "deadline_seconds"}}
    assert task_digest(task()) == canonical_digest(recipe)


@pytest.mark.parametrize("stage", ["receive", "confirm", "unmask"])
def test_the_others_tasks_are_compared_again_before_each_stage_that_gives_something_away(
    began: Round, stage: str
) -> None:
    """What is on disk is compared with the task once more, in case it changed."""
    shares, ann = began.share(), began.homes["ann"]
    if stage != "receive":
        began.of["ann"].receive(began.masking(shares, "ann"))
        began.mask("ann")
    if stage == "unmask":
        began.of["ann"].confirm(began.survivors("ann", "bob"))
    path = next(ann.folder.glob("secure/*/state.json"))
    state = json.loads(path.read_text())
    for signed in state["participants"]["adverts"]:
        if signed["advert"]["public_key"] == began.homes["bob"].key.public_key.hex():
            signed["advert"]["task"] = task_digest(other_task("version"))
    path.write_text(json.dumps(state))
    stages = {
        "receive": lambda: began.of["ann"].receive(began.masking(shares, "ann")),
        "confirm": lambda: began.of["ann"].confirm(began.survivors("ann", "bob")),
        "unmask": lambda: began.of["ann"].unmask(began.unmasking(["ann", "bob"], ["ann", "bob"])),
    }
    error = refusal(stages[stage])
    assert error.code is ErrorCode.TASKS_DIFFER
    assert began.ids["bob"] in error.message


def test_the_stage_of_a_secure_round_is_named_where_its_tasks_are_shown() -> None:
    task = pb.Task(
        message_id="m" * 20, metadata=pb.MessageMetadata(group_id="3", message_type="query.confirm")
    )
    assert titled(task) == f"round 3: task {'m' * 12} (confirm, stage 4 of 5)"
    task.metadata.message_type = "train"
    assert titled(task) == f"round 3: task {'m' * 12}"
