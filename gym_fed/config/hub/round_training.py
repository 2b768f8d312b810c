"""Convert a round's recipe to a training config, for contributors and for the hub's training on its ``root`` rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.config.train.defaults import as_given
from gym_fed.config.train.optimization import TrainingPrivacy
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import TUNING

_CHECKPOINTS_PER_ROUND = 10


def round_training(
    recipe: TrainingRecipe, server_round: int, output_dir: Path, device: str = "auto"
) -> TrainingConfig:
    """Return the config of a round; the round's number is added to the seed."""
    schedule = recipe.lr_scheduler_type
    config = TrainingConfig(
        algorithm=recipe.algorithm,
        finetuning=recipe.finetuning,
        **_sections(recipe),
        max_steps=recipe.max_steps,
        learning_rate=recipe.learning_rate,
        per_device_train_batch_size=recipe.per_device_train_batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
        max_length=recipe.max_length,
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        lr_scheduler_type="constant_with_warmup"
        if schedule == "constant" and recipe.warmup_steps
        else schedule,
        group_by_length=recipe.group_by_length,
        seed=recipe.seed + server_round,
        device=device,
        privacy=None if recipe.privacy is None else TrainingPrivacy.of(recipe.privacy),
        packing=None if recipe.privacy is None else False,
        output_dir=output_dir,
        save_steps=max(1, recipe.max_steps // _CHECKPOINTS_PER_ROUND),
        save_final=False,
    )
    return as_given(config)  # all contributors follow the recipe, so no default may depend on the machine


def _sections(recipe: TrainingRecipe) -> dict[str, Any]:
    """Return the sections of the algorithm and tuning method; ``lora`` configures all methods that send factors."""
    sections = recipe.chosen_sections()
    if recipe.sends_factors:
        sections[recipe.finetuning] = recipe.lora.model_dump()
        if TUNING.type_of(recipe.finetuning).reaches_experts:
            # An update consists of low-rank factors of linear layers, but fused experts are not linear layers.
            sections[recipe.finetuning]["fused_experts"] = False
    return sections
