"""Rounds that freeze A: whose A is taken, and whose is another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gym_server.rounds.factor_checks import foreign_a

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.task import LoraRecipe, TaskSpec, TrainingRecipe
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import lora_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.training.tuning.lora import frozen_factor

SPEC = BaseSpec.of({"q.weight": torch.zeros(24, 32)}, "tiny")
DIGEST = "sha256:" + "0" * 64


def task(factors: str) -> TaskSpec:
    return TaskSpec(
        server="s0123456789abcdef",
        server_round=2,
        base_model="tiny",
        base_digest=DIGEST,
        version_digest=DIGEST,
        recipe=TrainingRecipe(finetuning="lora", seed=5, lora=LoraRecipe(r=4, freeze_a=True)),
        codec=CodecPolicy.model_validate({"factors": factors}),
        max_update_bytes=1,
        deadline_seconds=1,
    )


def foreign(folder: Path, a: torch.Tensor, sent: str, asked: str) -> str | None:
    policy = CodecPolicy.model_validate({"factors": sent, "error_feedback": False})
    lora_delta({"q.weight": (a, torch.ones(24, len(a)), 2.0)}, folder / "u", SPEC, policy=policy)
    with DeltaFile.open(folder / "u", SPEC) as delta:
        return foreign_a(delta, task(asked))


@pytest.mark.parametrize("factors", ["bfloat16", "float32"])
def test_the_a_of_the_rounds_seed_is_no_foreign_one(tmp_path: Path, factors: str) -> None:
    assert foreign(tmp_path, frozen_factor(7, "q", 4, 32), factors, factors) is None
    assert foreign(tmp_path, frozen_factor(8, "q", 4, 32), factors, factors) == "q.weight"


@pytest.mark.parametrize(("sent", "asked"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_right_a_in_another_number_format_is_foreign(tmp_path: Path, sent: str, asked: str) -> None:
    assert foreign(tmp_path, frozen_factor(7, "q", 4, 32), sent, asked) == "q.weight"


def test_the_right_a_of_another_rank_is_foreign(tmp_path: Path) -> None:
    assert foreign(tmp_path, frozen_factor(7, "q", 1, 32), "bfloat16", "bfloat16") == "q.weight"
