"""``BASE:VARIANT`` given as a model: `gym train` names the commands that take the two."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gym_fed.base.models import resolve
from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError


def test_a_variant_is_no_model_to_train_and_the_commands_that_take_it_are_named(
    tiny_base: Path, tmp_path: Path
) -> None:
    name = f"{tiny_base}:mine"
    file = tmp_path / "train.yaml"
    file.write_text(
        f"model: {name}\ndata: [{{tasks: [copy], num_examples: 4}}]\noutput_dir: {tmp_path}/run\n"
    )
    result = CliRunner().invoke(app, ["train", str(file)])
    assert isinstance(result.exception, GymError)
    assert result.exception.code is ErrorCode.MODEL_NOT_FOUND
    assert result.exception.message.startswith(f"{name}: is a variant")
    assert f"gym chat {tiny_base} --variant mine" in result.exception.hint
    assert f"gym delta apply {tiny_base} FILE -o FOLDER" in result.exception.hint
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.yaml"]


@pytest.mark.parametrize("name", ["nowhere:mine", "C:/models/mine", "qwen3:0.6b"])
def test_another_name_with_a_colon_is_a_folder_that_is_not_there(name: str) -> None:
    with pytest.raises(GymError, match="no such folder"):
        resolve(name)
