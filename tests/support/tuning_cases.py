"""Every tuning method and LoRA variant with settings at which it moves a model of width 16 in a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.data import generate
from gym_fed.training.trainer import Trainer

ROWS = generate("copy", 40)

METHODS: dict[str, dict[str, Any]] = {
    "full": {"learning_rate": 1e-2},
    "freeze": {"learning_rate": 1e-2, "freeze": {"num_trainable_layers": 1, "extra_modules": ["norm"]}},
    "lora": {"learning_rate": 2e-2},
    "adalora": {"learning_rate": 1e-1},
    "oft": {"learning_rate": 5e-2, "oft": {"oft_block_size": 4}},
    "boft": {"learning_rate": 5e-2},
    "vera": {"learning_rate": 2e-1, "vera": {"r": 16}},
    "ia3": {"learning_rate": 5e-1},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa_niter_4": {"init_lora_weights": "pissa_niter_4", "use_rslora": True},
    "pissa_dora": {"init_lora_weights": "pissa", "use_dora": True},
    "olora": {
        "init_lora_weights": "olora",
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"q_proj": 12},
    },
    "lora_fa": {"lora_fa": True},
    "loraplus": {"loraplus_lr_ratio": 4.0},
    "embeddings": {"modules_to_save": ["embed_tokens"]},
    "chosen": {"target_modules": ["q_proj", "v_proj", "up_proj"], "exclude_modules": ["up_proj"]},
}
CASES = {
    **{name: {"finetuning": name, **settings} for name, settings in METHODS.items()},
    **{name: {"finetuning": "lora", "learning_rate": 2e-2, "lora": lora} for name, lora in VARIANTS.items()},
}


def config(folder: Path, **changes: Any) -> TrainingConfig:
    values: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "max_length": 48,
        "device": "cpu",
        "num_threads": 1,
        "lr_scheduler_type": "constant",
    }
    return TrainingConfig(**{**values, **changes})


def train(tiny_base: Path, folder: Path, **changes: Any) -> Any:
    return Trainer(config(folder, model=str(tiny_base), **changes)).train(ROWS)


def weights(model: Any) -> dict[str, Any]:
    """A copy of every tensor."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
