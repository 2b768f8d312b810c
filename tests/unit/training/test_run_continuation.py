"""`resume_from_checkpoint`: the newest checkpoint, none, or one of another run; and what is no such thing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.trainer import Trainer
from tests.support.adapters import ROWS, run, settings


class Killed(Exception):
    """What a kill leaves on the disk is what this leaves."""


@pytest.fixture(scope="module")
def killed(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that ended after the third, with a checkpoint of the second."""

    def stop(step: int, *_: Any) -> None:
        if step == 3:
            raise Killed

    folder = tmp_path_factory.mktemp("runs") / "killed"
    with pytest.raises(Killed):
        Trainer(settings(folder, **common(tiny_base)), on_step=stop).train(ROWS)
    return folder


def common(base: Path) -> dict[str, Any]:
    return {"model": str(base), "max_steps": 4, "save_steps": 2}


def test_a_run_begins_at_the_checkpoint_of_another_and_ends_with_the_same_bits(
    tiny_base: Path, killed: Path, tmp_path: Path
) -> None:
    run(tmp_path / "whole", **common(tiny_base))
    named = str(killed / "checkpoints/checkpoint-2")
    steps: list[int] = []
    changes = {**common(tiny_base), "resume_from_checkpoint": named}
    Trainer(settings(tmp_path / "other", **changes), on_step=lambda step, *_: steps.append(step)).train(ROWS)
    assert steps == [3, 4]
    whole, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "other"))
    assert all(torch.equal(whole[key], other[key]) for key in whole)
    assert (killed / "checkpoints/checkpoint-2").is_dir()


def test_a_checkpoint_of_a_run_that_learnt_something_else_is_refused(
    tiny_base: Path, killed: Path, tmp_path: Path
) -> None:
    named = {"resume_from_checkpoint": str(killed / "checkpoints/checkpoint-2")}
    with pytest.raises(GymError, match="max_steps was 4 and is now 5") as caught:
        run(tmp_path / "b", **{**common(tiny_base), **named, "max_steps": 5})
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    with pytest.raises(GymError, match="on different data"):
        Trainer(settings(tmp_path / "b", **common(tiny_base), **named)).train(ROWS[:8])
    assert not (tmp_path / "b").exists()


def test_what_no_run_has_written_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(GymError, match="is not a checkpoint of a gym train run"):
        run(tmp_path / "b", **common(tiny_base), resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with pytest.raises(ValidationError, match="early_stopping keeps more than a checkpoint holds"):
        settings(tmp_path / "b", resume_from_checkpoint="x/checkpoints/checkpoint-2", early_stopping={})


def test_true_demands_a_checkpoint_and_false_refuses_to_go_on(
    tiny_base: Path, killed: Path, tmp_path: Path
) -> None:
    with pytest.raises(GymError, match="there is no checkpoint in"):
        run(tmp_path / "new", **common(tiny_base), resume_from_checkpoint=True)
    shutil.copytree(killed, tmp_path / "again")
    with pytest.raises(GymError, match="holds an unfinished run"):
        run(tmp_path / "again", **common(tiny_base), resume_from_checkpoint=False)
    shutil.copytree(tmp_path / "again/checkpoints/checkpoint-2", tmp_path / "again/checkpoints/checkpoint-1")
    older = str(tmp_path / "again/checkpoints/checkpoint-1")
    with pytest.raises(GymError, match=r"checkpoint-1 is not the newest .*checkpoint-2"):
        run(tmp_path / "again", **common(tiny_base), resume_from_checkpoint=older)
    assert run(tmp_path / "again", **common(tiny_base), resume_from_checkpoint=True).steps == 4
