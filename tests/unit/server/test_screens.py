"""The screens of a round: which ones a hub's config and a round's task put into the list, and in which order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from gym_server.rounds.round_store import MERGING, Round
from gym_server.rounds.screens import FactorRank, FileScreen, ScreenedRound, ScreenedUpdate, screens_of
from gym_server.rounds.soup_record import Judgement
from gym_server.store.tables import rounds

from gym_fed.config.hub.privacy import PrivacyConfig, SecureAggregationConfig
from gym_fed.config.hub.task import TaskSpec
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import lora_delta
from gym_fed.delta.file import DeltaFile
from tests.support.judged_rounds import Judged

PRIVATE = PrivacyConfig(noise_multiplier=1.0, clipping_norm=0.5, epsilon=30.0)
SECURE = SecureAggregationConfig(step_norm=0.5)
LORA = {"finetuning": "lora", "lora": {"r": 4}}
FROZEN = {"finetuning": "lora", "lora": {"r": 4, "freeze_a": True}}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Iterator[Judged]:
    here = Judged(tmp_path_factory.mktemp("screens") / "hub", tiny_base, admission={"norm_ratio": None})
    yield here
    here.close()


def task(hub: Judged, recipe: dict[str, Any] | None = None, server_round: int = 1) -> TaskSpec:
    return TaskSpec(
        server=hub.fed.server,
        server_round=server_round,
        base_model="tiny",
        base_digest=hub.fed.base.digest,
        version_digest=hub.fed.base.digest,
        recipe=hub.fed.config.recipe.model_validate(recipe or {}),
        max_update_bytes=1 << 20,
        deadline_seconds=time.time() + 60,
    )


def names(hub: Judged, recipe: dict[str, Any] | None = None) -> list[str]:
    spec = task(hub, recipe)
    return [
        type(s).__name__
        for s in screens_of(
            hub.fed.state, hub.fed.config, hub.fed.keys, hub.model, Round(1, MERGING, spec, 0, [], "")
        )
    ]


@pytest.mark.parametrize(
    ("config", "recipe", "expected"),
    [
        ({}, {}, ["RevokedKeys", "Stale", "FreeRiders", "Duplicates"]),
        ({}, LORA, ["RevokedKeys", "Stale", "FactorRank", "FreeRiders", "Duplicates"]),
        ({}, FROZEN, ["RevokedKeys", "Stale", "FactorRank", "FrozenA", "FreeRiders", "Duplicates"]),
        ({"privacy": PRIVATE}, {}, ["RevokedKeys", "Stale", "TrainedTensors", "FreeRiders", "Duplicates"]),
        ({"privacy": PRIVATE, "secure_aggregation": SECURE}, {}, ["RevokedKeys", "Stale"]),
    ],
)
def test_a_round_has_the_screens_of_its_config_and_task(
    hub: Judged, config: dict[str, Any], recipe: dict[str, Any], expected: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hub.fed, "config", hub.fed.config.model_copy(update=config))
        assert names(hub, recipe) == expected


def test_norms_and_the_gate_come_before_duplicates_are_set_aside(hub: Judged) -> None:
    admission = hub.fed.config.admission.model_copy(update={"norm_ratio": 3.0})
    gate = hub.fed.config.gate.model_copy(update={"screen_updates": True})
    with pytest.MonkeyPatch.context() as patched:
        changed = hub.fed.config.model_copy(update={"admission": admission, "gate": gate})
        patched.setattr(hub.fed, "config", changed)
        assert names(hub) == ["RevokedKeys", "Stale", "FreeRiders", "LargeNorms", "Duplicates"]
        patched.setattr(type(hub.model), "has_gate", True)
        assert names(hub)[-3:] == ["LargeNorms", "HeldOutLoss", "Duplicates"]


def test_the_rank_of_an_update_is_compared_with_its_own_task(hub: Judged, tmp_path: Path) -> None:
    spec = BaseSpec("small", hub.fed.base.digest, {"q.weight": (16, 16)})
    factors = {"q.weight": (torch.ones(4, 16), torch.ones(16, 4), 1.0)}
    lora_delta(factors, tmp_path / "update", spec)
    with hub.fed.database.transaction() as tx:
        values = {"state": MERGING, "base_height": 0, "opened_at": 0.0}
        for number, recipe in enumerate((LORA, {**LORA, "lora": {"r": 2}}, {}), start=1):
            text = task(hub, recipe, number).model_dump_json()
            tx.execute(rounds.insert().values(server_round=number, spec=text, **values))
    screen = FactorRank(task(hub, {**LORA, "lora": {"r": 3}}, 4), hub.fed.database)

    def of_round(number: int) -> ScreenedUpdate:
        manifest = SimpleNamespace(server_round=number)
        return cast(ScreenedUpdate, SimpleNamespace(manifest=manifest))

    with DeltaFile.open(tmp_path / "update", spec) as delta:
        found = [screen.flaw(delta, of_round(number)) for number in (1, 2, 3, 4)]
    assert (found[0], found[2]) == (None, None)
    assert [str(flaw)[-26:] for flaw in (found[1], found[3])] == [
        "over the round's rank of 2",
        "over the round's rank of 3",
    ]


def test_a_flaw_of_a_file_is_the_reason_whatever_an_earlier_screen_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Forbidden(FileScreen):
        cheating = True

        def flaw(self, delta: DeltaFile, update: ScreenedUpdate) -> str | None:
            return "forbidden"

    monkeypatch.setattr(DeltaFile, "open", classmethod(lambda cls, *arguments: _Closing()))
    found = ScreenedUpdate(None, Path("x"), Judgement("u", "ann", "merged", "")).rejected("revoked")
    screened = Forbidden().apply(ScreenedRound([found]))
    assert screened.kept == []
    assert [(j.verdict, j.reason, j.cheating) for j in screened.rejections] == [
        ("rejected", "forbidden", True)
    ]


class _Closing:
    def __enter__(self) -> _Closing:
        return self

    def __exit__(self, *_: object) -> None: ...
