"""A checkpoint whose names do not fit the model is refused, and one that leaves out what is shared is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TUNING
from gym_fed.training.trl_glue import LocalOnly, _require_adapter


def loaded(model: Any, weights: dict[str, Any]) -> None:
    """``weights`` read into ``model`` as transformers' trainer reads a checkpoint."""
    trainer: Any = LocalOnly()
    trainer.model = model
    trainer._issue_warnings_after_load(model.load_state_dict(weights, strict=False))


def test_what_a_model_shares_may_be_missing(tiny_base: Path) -> None:
    model = load_model("gym-nano").model
    assert model.config.tie_word_embeddings
    weights = model.state_dict()
    loaded(model, weights)
    loaded(model, {name: value for name, value in weights.items() if name != "lm_head.weight"})
    loaded(load_model(str(tiny_base)).model, load_model(str(tiny_base)).model.state_dict())


def test_a_weight_that_is_missing_or_called_otherwise_is_named(tiny_base: Path) -> None:
    model = load_model(str(tiny_base)).model
    weights = model.state_dict()
    norm = weights.pop("model.norm.weight")
    with pytest.raises(GymError, match=r"lacks 1 weight of the model, such as model\.norm\.weight") as caught:
        loaded(model, weights)
    assert caught.value.code is ErrorCode.MODEL_INVALID
    with pytest.raises(GymError, match=r"has 1 weight that the model does not have, such as final\.weight"):
        loaded(model, {**weights, "model.norm.weight": norm, "final.weight": norm})
    with pytest.raises(GymError, match=r"lacks \d+ weights .* and has \d+ weights that"):
        loaded(model, {f"decoder.{name}": value for name, value in weights.items()})


def test_an_adapters_checkpoint_that_was_written_for_other_layers_is_refused(
    tiny_base: Path, tmp_path: Path
) -> None:
    def adapted(*layers: str) -> Any:
        settings = TrainingConfig(finetuning="lora", lora={"target_modules": list(layers)})
        return TUNING.new("lora").prepare(load_model(str(tiny_base)).model, settings)

    adapted("q_proj").save_pretrained(str(tmp_path / "checkpoint-1"))
    _require_adapter(adapted("q_proj"), tmp_path / "checkpoint-1")
    with pytest.raises(GymError, match=r"lacks 2 weights of the adapter, such as .*v_proj") as caught:
        _require_adapter(adapted("q_proj", "v_proj"), tmp_path / "checkpoint-1")
    assert caught.value.code is ErrorCode.MODEL_INVALID
