"""A first run in half a minute: train gym-nano on a task that it has never seen, and ask it for what it has learned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gym_fed.training.run.result import TrainResult

TASK = "double"
"""The task of ``configs/nano-sft.yaml``: say a word twice."""


def train_tiny_model(
    output_dir: str | Path = "runs/quickstart", *, max_steps: int = 100, num_examples: int = 2000
) -> TrainResult:
    """Train gym-nano; the model is in the result, and in ``output_dir``.

    Args:
        output_dir: The run folder; a run that was stopped there goes on.
        max_steps: Optimiser steps of 32 rows; 100 take about half a minute on one core.
        num_examples: Rows that are generated.

    Raises:
        GymError: ``FILE_EXISTS`` where a finished run is.
    """
    from gym_fed.config.train.data_source import DataConfig
    from gym_fed.config.train.training import TrainingConfig
    from gym_fed.training.trainer import Trainer

    config = TrainingConfig(
        model="gym-nano",
        data=[DataConfig(tasks=[TASK], num_examples=num_examples)],
        max_steps=max_steps,
        per_device_train_batch_size=32,
        max_length=128,
        output_dir=Path(output_dir),
    )
    return Trainer(config).train()


def evaluate_model(model: str | Path = "runs/quickstart", *, num_examples: int = 64) -> dict[str, float]:
    """How well a model does the task on rows that it was not trained on.

    Args:
        model: As for ``gym_fed.models.load_model``.
        num_examples: Rows, other ones than ``train_tiny_model`` generates.

    Returns:
        ``exact_match``, the share of right answers, and ``loss``, in nats per token.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` or ``MODEL_INVALID``.
    """
    from gym_fed.data.generated import generate
    from gym_fed.evaluation.generation import exact_match
    from gym_fed.evaluation.loss import heldout_loss
    from gym_fed.models import load_model

    loaded = load_model(str(model))
    rows = generate(TASK, num_examples, split="heldout")
    return {
        "exact_match": exact_match(loaded.model, loaded.tokenizer, rows),
        "loss": heldout_loss(loaded.model, loaded.tokenizer, rows),
    }
