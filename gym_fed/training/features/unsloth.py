"""Train with Unsloth's faster kernels. Unsloth pins most libraries, so it needs a separate environment."""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.core.requirements import require_cuda, require_package
from gym_fed.training.features.base import Feature


class Unsloth(Feature):
    """Loads the model through ``FastLanguageModel`` instead of transformers; adapters are still PEFT's."""

    tried = "refusal only: needs CUDA"

    def check(self, config: TrainingConfig) -> None:
        require_cuda("unsloth: true")
        remedy = "install it in a separate environment (its pins conflict with those of gym-fed), or remove the key"
        require_package("unsloth", "unsloth: true", remedy=remedy)
        reason = "unsloth: true loads a model unchanged from disk"
        remedy = "set model, and remove model_init and quantization"
        refuse_first((config.model is None or config.quantization is not None, reason, remedy))


def load_by_unsloth(config: TrainingConfig) -> tuple[Any, Any]:
    """Load the model and tokenizer with ``unsloth.FastLanguageModel``."""
    import torch
    from unsloth import FastLanguageModel  # type: ignore[import-not-found,unused-ignore]

    from gym_fed.base.models import load_tokenizer, resolve

    assert config.model is not None  # see Unsloth.check
    model, _ = FastLanguageModel.from_pretrained(
        model_name=resolve(config.model),
        max_seq_length=config.max_length,
        dtype=getattr(torch, config.loaded_dtype),
        load_in_4bit=False,
        local_files_only=True,
    )
    return model, load_tokenizer(config.model)
