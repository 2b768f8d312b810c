"""The hub keeps no model in memory between rounds, and restores the same one for the next merge."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_server.cli.checks_at_start import check_at_start
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.round_store import COMMITTED

from gym_fed.core.errors import GymError
from gym_fed.delta.base import tensors_digest
from tests.support.paced_room import Member, PacedRoom


@pytest.fixture
def room(tmp_path: Path, tiny_base: Path) -> Iterator[PacedRoom]:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text('{"text": "the cat sat on the mat"}\n')
    members = [Member(f"fast{i}", 20) for i in range(3)]
    gate = {"heldout": str(heldout), "format": "text", "max_loss_increase": 9}
    found = PacedRoom(tmp_path / "hub", tiny_base, members, rounds={"min_contributors": 3}, gate=gate)
    yield found
    found.close()


def fresh(room: PacedRoom) -> HubModel:
    fed = room.fed
    model = HubModel(fed.base, fed.config.base_model, fed.store, fed.config.gate, fed.folder)
    model.follow(fed.round_store.soups())
    return model


def test_after_a_merge_the_hub_holds_no_model_and_the_next_round_starts_from_the_same_tensors(
    room: PacedRoom,
) -> None:
    held = weakref.ref(room.strategy._hub_model().model)
    for number in (1, 2):
        (ended,) = room.run(1)
        assert ended.state == COMMITTED, ended.reason
        gc.collect()
        assert held() is None, f"the model is in memory after round {number}"
        model = room.strategy._hub_model()
        assert tensors_digest(model.model) == tensors_digest(fresh(room).model)
        held = weakref.ref(model.model)
        model.release()


@pytest.mark.parametrize("damage", ["missing", "cut short", "other tensors"])
def test_a_parked_model_that_is_damaged_is_made_again_from_base_and_soups(
    room: PacedRoom, damage: str
) -> None:
    room.run(1)
    model = room.strategy._hub_model()
    model.release()
    assert model._parked is not None
    file = model._parked._file
    if damage == "missing":
        model._parked = None
    elif damage == "cut short":
        file.truncate(100)
    else:
        file.seek(100)
        file.write(bytes(100))
    assert tensors_digest(model.model) == tensors_digest(fresh(room).model)
    assert model.digest == room.fed.round_store.head().digest


def test_the_tensors_come_from_the_file_and_no_soup_is_applied_again(
    room: PacedRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.run(1)
    model = room.strategy._hub_model()

    def never(*_: object) -> None:
        raise AssertionError("a soup was applied again")

    held = tensors_digest(model.model)
    model.release()
    monkeypatch.setattr(model, "_apply", never)
    assert tensors_digest(model.model) == held


def test_a_model_that_cannot_be_made_again_keeps_its_version(
    room: PacedRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.run(1)
    model = room.strategy._hub_model()
    held = tensors_digest(model.model)
    model.release()
    model._parked = None

    def away(*_: object) -> None:
        raise OSError("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(model, "_apply", away)
        with pytest.raises(OSError, match="away"):
            _ = model.model
    assert model.spec.digest == room.fed.round_store.head().digest
    assert tensors_digest(model.model) == held


def test_a_hub_that_looks_for_its_objects_in_another_place_does_not_start(room: PacedRoom) -> None:
    room.run(1)
    check_at_start(room.fed.state, room.fed.config, room.fed.recipes)
    (soup,) = room.fed.round_store.soups()
    room.fed.store.delete(soup.sha256)
    with pytest.raises(
        GymError, match=r"storage\.objects: .* does not have the soup of version 1"
    ) as refusal:
        check_at_start(room.fed.state, room.fed.config, room.fed.recipes)
    assert "--set storage.objects=LOCATION" in str(refusal.value.hint)


def test_losses_that_were_measured_stay_known_while_the_model_is_away(
    room: PacedRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = room.strategy._hub_model()
    before = model.loss()
    model.release()

    def never() -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(model, "_measure", never)
    assert model.loss() == before
