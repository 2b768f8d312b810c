"""Small random siblings of real model classes, and runs that leave adapters of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.data import generate
from gym_fed.training.trainer import Trainer
from tests.support.preferences import ROWS as PAIRS

ROWS = generate("copy", 24)
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 36,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def sibling(kind: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A folder with a model of one layer of class ``Llama``, ``Qwen3`` or ``Qwen3Moe``, and gym-nano's tokenizer."""
    import transformers

    tokenizer = load_tokenizer("gym-nano")
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {**SIZES, **(MOE if kind == "Qwen3Moe" else {}), **ends, **changes}
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), **sizes)
    torch.manual_seed(seed)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(folder: Path, **changes: Any) -> TrainingConfig:
    """A run of three steps at a rate at which they are seen."""
    values: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 2e-2,
        "max_length": 48,
        "device": "cpu",
        "num_threads": 1,
        "finetuning": "lora",
    }
    return TrainingConfig(**{**values, **changes})


def run(folder: Path, **changes: Any) -> Any:
    """What the run of ``settings`` gave, on texts or on pairs."""
    config = settings(folder, **changes)
    return Trainer(config).train(PAIRS[:16] if config.algorithm in ("dpo", "kto", "tdpo") else ROWS)


def logits(model: Any) -> torch.Tensor:
    """Of a model, or of a folder; of a few tokens."""
    loaded = load_model(str(model)).model if isinstance(model, str | Path) else model
    with torch.no_grad():
        found: torch.Tensor = loaded.eval()(torch.tensor([[5, 6, 7, 8, 40, 41]])).logits
    return found
