"""A model whose code comes with it: refused by the name of its architecture, since that code is never run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gym_fed.base.modeling.processors import load_vision_model
from gym_fed.base.models import load_model, nano_path
from gym_fed.core.errors import ErrorCode, GymError


def load_pictures(folder: str) -> None:
    load_vision_model(folder, dtype="float32", arguments={})


@pytest.mark.parametrize("load", [load_model, load_pictures])
def test_an_architecture_that_transformers_lacks_is_named(
    tmp_path: Path, load: Callable[[str], object]
) -> None:
    config = json.loads((nano_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "heron_vl"}))
    with pytest.raises(
        GymError, match="no architecture 'heron_vl', and code that comes with a model"
    ) as caught:
        load(str(tmp_path))
    assert caught.value.code is ErrorCode.MODEL_INVALID


def test_a_type_that_has_no_language_model_in_transformers_is_named(tmp_path: Path) -> None:
    config = json.loads((nano_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "wav2vec2"}))
    with pytest.raises(GymError, match="no text language model of type wav2vec2") as caught:
        load_model(str(tmp_path))
    assert caught.value.code is ErrorCode.MODEL_INVALID
