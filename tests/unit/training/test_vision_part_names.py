"""The tower and the projector of every kind of model that reads images are found by their names."""

from __future__ import annotations

import pytest
import torch
import transformers

from gym_fed.base.media_parts import part_of
from tools.architectures.shrinking import tiny_config

PROJECTORS = {
    "Cosmos3EdgeForConditionalGeneration": "projector",
    "Gemma3ForConditionalGeneration": "multi_modal_projector",
    "GraniteDoclingForConditionalGeneration": "connector",
    "HunYuanVLForConditionalGeneration": "patch_merger",
    "LightOnOcrForConditionalGeneration": "vision_projection",
    "Ovis2ForConditionalGeneration": "visual_embeddings_table",
    "PaddleOCRVLForConditionalGeneration": "projector",
    "Qwen2VLForConditionalGeneration": "merger",
    "VideoLlama3ForConditionalGeneration": "projector",
}


@pytest.mark.parametrize("name", PROJECTORS)
def test_tower_and_projector_of_a_class_are_found(name: str) -> None:
    made = getattr(transformers, name)
    with torch.device("meta"):
        model = made(tiny_config(made.config_class))
    parts: dict[str | None, set[str]] = {}
    for weight, _ in model.named_parameters():
        parts.setdefault(part_of(weight), set()).add(weight)
    assert parts["freeze_vision_tower"]
    found = parts["freeze_multi_modal_projector"]
    assert all(PROJECTORS[name] in weight.split(".") for weight in found)
    assert not any(PROJECTORS[name] in weight.split(".") for weight in parts["freeze_vision_tower"])
