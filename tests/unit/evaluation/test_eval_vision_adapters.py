"""Evaluation, chat and export load an adapter of a model that reads images and has no class for text alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gym_fed.base.modeling.processors import load_vision_model
from gym_fed.evaluation.scoring.models import _load_source
from gym_fed.export.source import open_source
from gym_fed.serving.chat.local_writer import open_plain
from tests.support.vision_models import vision_model

IDS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, torch.Tensor]:
    """The folders of a base and an adapter, and their logits together."""
    from peft import LoraConfig, get_peft_model

    room = tmp_path_factory.mktemp("vision")
    base = vision_model("llava", room / "base")
    model, _ = load_vision_model(str(base), dtype="float32", arguments={})
    lora = LoraConfig(r=4, target_modules=r".*language_model.*q_proj", init_lora_weights=False)
    wrapped: Any = get_peft_model(model, lora)
    wrapped.peft_config["default"].base_model_name_or_path = str(base)
    wrapped.save_pretrained(room / "adapter")
    with torch.inference_mode():
        return base, room / "adapter", wrapped(input_ids=IDS).logits


@pytest.mark.parametrize("command", ["eval", "chat", "export"])
def test_the_adapter_is_on_the_model(command: str, adapted: tuple[Path, Path, torch.Tensor]) -> None:
    base, adapter, expected = adapted
    adapters = (str(adapter),)
    model: Any
    if command == "eval":
        resolved: Any = SimpleNamespace(source=str(base), request=SimpleNamespace(adapters=adapters))
        model = _load_source(resolved)[0].model
    elif command == "chat":
        model = open_plain(str(base), adapters=adapters, device="cpu")._service._model
    else:
        model = open_source(str(base), adapters).whole()
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=0, atol=1e-4)
