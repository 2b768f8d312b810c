"""The tokens that end an answer: ids of the model, or a refusal that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.base import load_base
from gym_fed.serving.end_tokens import end_ids
from tests.unit.serving.test_base_loaded import saved

WRONG = [{"a": 1}, ["x", 5], [[1], 2], -1, [3, -2], True, 1.5, "2", 512, [5, 10**30]]


def with_ids(folder: Path, file: str, ids: Any) -> str:
    path = saved(folder) / file
    path.write_text(
        json.dumps((json.loads(path.read_text()) if path.exists() else {}) | {"eos_token_id": ids})
    )
    return str(folder)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "transformers"])
@pytest.mark.parametrize("ids", WRONG, ids=str)
def test_ids_of_generation_config_that_are_none_of_the_model_are_refused_by_their_file(
    tmp_path: Path, ids: Any, plain: bool
) -> None:
    folder = with_ids(tmp_path, "generation_config.json", ids)
    with pytest.raises(GymError, match=r"generation_config\.json: eos_token_id") as caught:
        load_base(folder, [], "float32", plain=plain)
    assert caught.value.code is ErrorCode.MODEL_INVALID
    assert caught.value.hint


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "transformers"])
@pytest.mark.parametrize("ids", WRONG, ids=str)
def test_ids_of_config_that_are_none_of_the_model_are_refused(tmp_path: Path, ids: Any, plain: bool) -> None:
    folder = with_ids(tmp_path, "config.json", ids)
    with pytest.raises(GymError, match=r"config\.json: .*eos_token_id") as caught:
        load_base(folder, [], "float32", plain=plain)
    assert caught.value.code is ErrorCode.MODEL_INVALID


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "transformers"])
@pytest.mark.parametrize(("ids", "wanted"), [(None, set()), (5, {5}), ([5, 511], {5, 511})])
def test_ids_of_both_files_and_of_the_tokenizer_end_an_answer(
    tmp_path: Path, ids: Any, wanted: set[int], plain: bool
) -> None:
    folder = with_ids(tmp_path, "generation_config.json", ids)
    model, tokenizer, _ = load_base(folder, [], "float32", plain=plain)
    assert end_ids(model, tokenizer) == wanted | {2, tokenizer.eos_token_id}  # 2 is config.json's


def test_a_model_of_an_unknown_vocabulary_takes_any_id() -> None:
    model = SimpleNamespace(config=SimpleNamespace(eos_token_id=[10**6]), generation_config=None)
    assert end_ids(model, SimpleNamespace(eos_token_id=None)) == {10**6}
