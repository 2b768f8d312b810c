"""A model whose code comes with it: refused by the name of its architecture, since that code is never run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from gym_fed.base.modeling.processors import load_processor, load_vision_model
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


@pytest.mark.parametrize("load", [load_model, load_pictures])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("whisper", "WhisperForConditionalGeneration"), ("moonshine", "MoonshineForConditionalGeneration")],
)
def test_a_model_that_only_transcribes_is_refused_by_its_type(
    tmp_path: Path, load: Callable[[str], object], kind: str, name: str
) -> None:
    config = json.loads((nano_path() / "config.json").read_text())
    named = {**config, "model_type": kind, "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(named))
    with pytest.raises(GymError, match=f"is a {kind} model, a speech encoder-decoder that") as caught:
        load(str(tmp_path))
    assert caught.value.code is ErrorCode.MODEL_INVALID
    assert "Qwen2-Audio" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("error", "package"),
    [
        (ValueError("None could be imported. Missing optional dependencies: torchvision."), "torchvision"),
        (ImportError("GraniteSpeechFeatureExtractor requires the torchaudio library"), "torchaudio"),
        (ImportError("MistralCommonBackend requires the mistral-common library"), "mistral_common"),
    ],
)
def test_a_processor_whose_package_is_missing_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, error: Exception, package: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "gym_fed.core.requirements.importlib.util.find_spec",
        lambda name: None if name == package else found(name),
    )
    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", Mock(side_effect=error))
    with pytest.raises(GymError, match=f"needs the package {package}, which is not installed") as caught:
        load_processor(str(nano_path()))
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY
