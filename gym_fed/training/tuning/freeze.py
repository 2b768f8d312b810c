"""Freeze tuning: train some layers, or parts of them, and freeze the others."""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.text import counted
from gym_fed.training.tuning.full import Full as _Full
from gym_fed.training.vision.parts import outside_tower


class Freeze(_Full):
    """Trains a few layers in place. The result is saved as a full model."""

    tried = "learning, saving, bit-exact resume"

    trains_all = False
    federates = False

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        settings = config.freeze
        assert settings is not None  # set by the config
        layers = _layers(model)
        count = settings.num_trainable_layers
        reason = f"freeze.num_trainable_layers is {count}, but the model has {counted(len(layers), 'layer')}"
        refuse_first((abs(count) > len(layers), reason, f"set at most {len(layers)}"))
        model.requires_grad_(False)
        for head in _heads(model):
            head.requires_grad_(True)
        if settings.llama_pro:
            trained = _added_blocks(layers, count)
        else:
            trained = layers[-count:] if count > 0 else layers[:-count]
        for layer in trained:
            if not settings.trainable_modules:
                layer.requires_grad_(True)
        for name in settings.trainable_modules:
            _unfreeze(trained, name, "freeze.trainable_modules")
        for name in settings.extra_modules:
            _unfreeze([model], name, "freeze.extra_modules")
        return model


def _added_blocks(layers: list[Any], count: int) -> list[Any]:
    """Return the last layer of each group of ``len(layers) / count`` layers; LLaMA Pro adds these blocks."""
    reason = f"freeze.llama_pro: {counted(len(layers), 'layer', 'are')} not a multiple of num_trainable_layers {count}"
    remedy = "set it to the number of added blocks of an expanded model"
    refuse_first((len(layers) % count, reason, remedy))
    stride = len(layers) // count
    return layers[stride - 1 :: stride]


def _layers(model: Any) -> list[Any]:
    """Return the decoder's layers, regardless of their name in the architecture."""
    import torch

    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for _, module in outside_tower(model):
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return list(module)
    reason = f"finetuning: freeze cannot find the layers of {type(model).__name__}"
    raise GymError(ErrorCode.MODEL_INVALID, reason, "use finetuning: full or lora")


def _heads(model: Any) -> list[Any]:
    """Return the heads with random weights that an algorithm has added, such as a reward model's score."""
    return [module for name, module in model.named_children() if name in ("score", "classifier")]


def _unfreeze(roots: list[Any], name: str, key: str) -> None:
    named = [item for root in roots for item in root.named_modules()]
    matches = [module for path, module in named if f".{path}".endswith(f".{name}")]
    reason = f"{key}: {name!r} matches no module"
    remedy = "use names such as mlp, self_attn.q_proj, embed_tokens, norm or lm_head"
    refuse_first((not matches, reason, remedy))
    for module in matches:
        module.requires_grad_(True)
