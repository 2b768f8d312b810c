"""What the server takes from round to round: named in the ledger, checked in a replay, gone with an aborted round."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.rounds.hub_model import HubModel, write_version
from gym_server.rounds.merging import merge_round
from gym_server.rounds.replay import replay
from gym_server.rounds.round_store import MERGING, Round
from gym_server.store.tables import rounds, updates
from sqlalchemy import select, update

from gym_fed.base.models import load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_delta
from gym_fed.evaluation.loss import RowLosses
from tests.support.judged_rounds import put_admitted

EXACT = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)


pytestmark = pytest.mark.usefixtures("updates_without_admission")


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Iterator[Federation]:
    """A hub whose soups lose something and step with momentum: both kinds of state."""
    folder = tmp_path / "hub"
    init_hub(folder, HubChoices(str(tiny_base), "state", "open"))
    path = folder / "gym-server.yaml"
    values = yaml.safe_load(path.read_text())
    values["soup"] = {
        "aggregator": "mean",
        "num_malicious_nodes": 0,
        "server_optimizer": "momentum",
        "codec": {"codec": "bitdelta", "error_feedback": True},
    }
    values["gate"] = {"screen_updates": False}
    path.write_text(yaml.safe_dump(values))
    with Federation.open(folder) as federation:
        yield federation


@pytest.fixture
def model(hub: Federation) -> HubModel:
    return HubModel(hub.base, hub.config.base_model, hub.store, hub.config.gate, hub.folder)


def merge_next(hub: Federation, model: HubModel, size: float = 1e-2) -> int:
    """A round of one contributor's update, put before the merge as admission leaves it; returns its number."""
    number = hub.round_store.open_next().server_round
    model.follow(hub.round_store.soups())
    before = model_tensors(model.model)
    torch.manual_seed(number)
    tuned = {name: tensor + size * torch.randn_like(tensor) for name, tensor in before.items()}
    path = hub.folder / "staging" / "update"
    encode_delta(tuned, before, EXACT, path, model.spec)
    ids = [put_admitted(hub, model, path, "ann", number, norm=None)]
    path.unlink()
    with hub.database.transaction() as tx:
        row = update(rounds).where(rounds.c.server_round == number)
        tx.execute(row.values(state=MERGING, merging=json.dumps(ids)))
    merge_round(
        hub.state,
        hub.config,
        hub.keys,
        model,
        Round(number, MERGING, None, hub.round_store.head().height, ids, ""),
    )
    return number


def state_of(hub: Federation) -> set[str]:
    return {path.name for path in (hub.folder / "residuals").iterdir()}


def version_entries(hub: Federation) -> list[dict[str, Any]]:
    return [entry.body for entry in hub.ledger.entries() if entry.kind == "version"]


def one_row(loss: float) -> RowLosses:
    """What the gate measures where one row with one token is held out."""
    return RowLosses(np.array([loss]), np.ones(1))


def test_the_ledger_names_the_state_that_every_version_leaves(hub: Federation, model: HubModel) -> None:
    numbers = [merge_next(hub, model), merge_next(hub, model)]
    for number, entry in zip(numbers, version_entries(hub), strict=True):
        assert entry["state"] == {
            "residual": file_sha256(hub.folder / "residuals" / f"round-{number}.safetensors"),
            "optimizer": file_sha256(hub.folder / "residuals" / f"round-{number}.optimizer.safetensors"),
        }
        assert replay(hub.state, number)["updates"] == 1


def test_a_version_that_is_written_as_a_folder_is_known_by_its_tensors_too(
    hub: Federation, model: HubModel, tmp_path: Path
) -> None:
    merge_next(hub, model)
    first, again = (
        write_version(hub.state, hub.config, tmp_path / "one"),
        write_version(hub.state, hub.config, tmp_path / "two"),
    )
    assert again["base_digest"] == first["base_digest"] != first["digest"]
    assert BaseSpec.of(load_model(str(tmp_path / "one")).model, "one").digest == first["base_digest"]
    with hub.database.reading() as tx:
        digests = hub.base.digest, first["digest"], first["base_digest"]
        known = [hub.variants.checks.base_of(tx, digest) for digest in digests]
        assert known == ["base", "version 1", "version 1"]
        with pytest.raises(GymError, match=f"newest version is 1, {first['digest']}"):
            hub.variants.checks.base_of(tx, "sha256:" + "0" * 64, refuse=True)


@pytest.mark.parametrize("kind", ["residual", "optimizer"])
def test_state_that_is_missing_changed_or_made_up_is_reported_by_name(
    hub: Federation, model: HubModel, kind: str
) -> None:
    merge_next(hub, model)
    merge_next(hub, model)
    suffix = ".optimizer.safetensors" if kind == "optimizer" else ".safetensors"
    path, other = (hub.folder / "residuals" / f"round-{number}{suffix}" for number in (1, 2))
    kept = path.read_bytes()
    path.write_bytes(other.read_bytes())
    with pytest.raises(GymError, match=rf"the server's {kind} after round 1, .*; the ledger says") as caught:
        replay(hub.state, 2)
    assert caught.value.code is ErrorCode.STATE_CORRUPT
    path.unlink()
    with pytest.raises(GymError, match=rf"the server's {kind} after round 1, .*has sha256 none"):
        replay(hub.state, 2)
    path.write_bytes(kept)
    assert replay(hub.state, 2)["replayed"]
    assert replay(hub.state, 1)["replayed"]
    (hub.folder / "residuals" / "none.safetensors").write_bytes(kept)
    with pytest.raises(GymError, match=r"after round 0, .*; the ledger says that there is none"):
        replay(hub.state, 1)


def test_a_round_that_is_rolled_back_leaves_no_soup_and_no_state(
    hub: Federation, model: HubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_next(hub, model)
    left = state_of(hub)
    with monkeypatch.context() as patched:
        patched.setattr(HubModel, "has_gate", True)
        patched.setattr(HubModel, "losses", lambda self: one_row(1.0))
        patched.setattr(HubModel, "losses_with", lambda self, path: one_row(9.0))
        number = merge_next(hub, model)
    reason = hub.round_store.history()[number - 1]["reason"]
    assert "rolled back: the soup raises the held-out loss from" in reason
    assert state_of(hub) == left == {"round-1.safetensors", "round-1.optimizer.safetensors"}
    assert not list((hub.folder / "staging").iterdir())


def test_a_merge_that_fails_after_a_crash_deletes_what_the_first_try_staged(
    hub: Federation, model: HubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_server.rounds import merging

    merge_next(hub, model)
    left = state_of(hub)
    for name in ("round-2.safetensors", "round-2.optimizer.safetensors"):
        (hub.folder / "residuals" / name).write_bytes(b"staged before the crash")
    (hub.folder / "staging" / "soup-2.gymdelta").write_bytes(b"made before the crash")

    def refused(*_: object) -> None:
        raise GymError(ErrorCode.UPDATE_REFUSED, "the aggregate overflows")

    monkeypatch.setattr(merging, "make_soup", refused)
    assert merge_next(hub, model) == 2
    assert "the aggregate overflows" in hub.round_store.history()[1]["reason"]
    assert state_of(hub) == left
    assert not list((hub.folder / "staging").iterdir())


def test_a_round_is_aborted_with_a_reason_when_the_residual_it_begins_from_is_gone(
    hub: Federation, model: HubModel
) -> None:
    merge_next(hub, model)
    residual = hub.round_store.head().residual
    assert residual is not None
    (hub.folder / "residuals" / residual).unlink()
    number = merge_next(hub, model)
    ended = hub.round_store.current()
    assert ended is not None
    assert (ended.server_round, ended.state) == (number, "aborted")
    assert "the residual of version 1 is missing" in ended.reason


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("before", "after"), [(1.0, NAN), (NAN, 1.0), (NAN, NAN), (1.0, INF), (INF, 1.0), (INF, INF)]
)
def test_a_round_whose_loss_at_the_gate_is_no_number_is_rolled_back(
    hub: Federation, model: HubModel, monkeypatch: pytest.MonkeyPatch, before: float, after: float
) -> None:
    monkeypatch.setattr(HubModel, "has_gate", True)
    monkeypatch.setattr(HubModel, "losses", lambda self: one_row(before))
    monkeypatch.setattr(HubModel, "losses_with", lambda self, path: one_row(after))
    number = merge_next(hub, model)
    line = hub.round_store.history()[number - 1]
    assert line["state"] == "aborted"
    assert "rolled back" in line["reason"]
    assert not version_entries(hub)


@pytest.mark.parametrize("loss", [NAN, INF])
def test_an_update_whose_loss_alone_is_no_number_is_rejected_by_the_screen(
    hub: Federation, model: HubModel, monkeypatch: pytest.MonkeyPatch, loss: float
) -> None:
    """And the round ends: an entry that cannot be written would leave the hub at the same merge for ever."""
    monkeypatch.setattr(HubModel, "has_gate", True)
    monkeypatch.setattr(HubModel, "loss", lambda self: 1.0)
    monkeypatch.setattr(HubModel, "loss_with", lambda self, path, share=1.0: loss)
    gate = hub.config.gate.model_copy(update={"screen_updates": True})
    monkeypatch.setattr(hub, "config", hub.config.model_copy(update={"gate": gate}))
    number = merge_next(hub, model)
    assert hub.round_store.history()[number - 1]["state"] == "aborted"
    with hub.database.reading() as tx:
        row = tx.execute(select(updates.c.verdict, updates.c.reason, updates.c.heldout_change)).one()
    assert (row.verdict, row.heldout_change) == ("rejected", None)
    assert f"alone raises the held-out loss from 1.000 to {loss:.3f}" in row.reason
