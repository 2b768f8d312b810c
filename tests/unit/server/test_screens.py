"""The screens of a round: which ones a hub's config and a round's task put into the list, and in which order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_server.rounds.round_store import MERGING, Round
from gym_server.rounds.screens import FileScreen, ScreenedRound, ScreenedUpdate, screens_of
from gym_server.rounds.soup_record import Judgement

from gym_fed.config.hub.privacy import PrivacyConfig, SecureAggregationConfig
from gym_fed.config.hub.task import TaskSpec
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


def names(hub: Judged, recipe: dict[str, Any] | None = None) -> list[str]:
    spec = TaskSpec(
        server=hub.fed.server,
        server_round=1,
        base_model="tiny",
        base_digest=hub.fed.base.digest,
        version_digest=hub.fed.base.digest,
        recipe=hub.fed.config.recipe.model_validate(recipe or {}),
        max_update_bytes=1 << 20,
        deadline_seconds=time.time() + 60,
    )
    return [
        type(s).__name__
        for s in screens_of(
            hub.fed.state, hub.fed.config, hub.fed.keys, hub.model, Round(1, MERGING, spec, 0, [], "")
        )
    ]


@pytest.mark.parametrize(
    ("config", "recipe", "expected"),
    [
        ({}, {}, ["RevokedKeys", "FreeRiders", "Duplicates"]),
        ({}, LORA, ["RevokedKeys", "FactorRank", "FreeRiders", "Duplicates"]),
        ({}, FROZEN, ["RevokedKeys", "FactorRank", "FrozenA", "FreeRiders", "Duplicates"]),
        ({"privacy": PRIVATE}, {}, ["RevokedKeys", "TrainedTensors", "FreeRiders", "Duplicates"]),
        ({"privacy": PRIVATE, "secure_aggregation": SECURE}, {}, ["RevokedKeys"]),
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
        assert names(hub) == ["RevokedKeys", "FreeRiders", "LargeNorms", "Duplicates"]
        patched.setattr(type(hub.model), "has_gate", True)
        assert names(hub)[-3:] == ["LargeNorms", "HeldOutLoss", "Duplicates"]


def test_a_flaw_of_a_file_is_the_reason_whatever_an_earlier_screen_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Forbidden(FileScreen):
        cheating = True

        def flaw(self, delta: DeltaFile) -> str | None:
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
