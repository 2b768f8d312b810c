"""A training job: everything that an algorithm needs to build its trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.config.train.training import TrainingConfig

if TYPE_CHECKING:
    import torch

    from gym_fed.evaluation.graders.base import Grader


@dataclass
class Job:
    """The argument of ``Algorithm.build``.

    Attributes:
        config: The run's config.
        model: The model to train in place, already wrapped by PEFT where ``finetuning`` is an adapter.
        tokenizer: Its tokenizer (a processor for vision-language models).
        encoded: What ``encode`` gave for the training rows.
        eval_encoded: The same for ``eval_data``; None when there is none.
        checkpoints: Folder for checkpoints.
        callbacks: ``transformers.TrainerCallback`` objects to install.
        evaluate_first: True if held-out rows are evaluated before the first step, too.
        graders: What rewards answers, set up already; empty for algorithms without rewards.
    """

    config: TrainingConfig
    model: Any
    tokenizer: Any
    encoded: list[dict[str, Any]]
    eval_encoded: list[dict[str, Any]] | None
    checkpoints: Path
    callbacks: list[Any]
    graders: Sequence[Grader] = field(default=())
    evaluate_first: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments of every TRL config; see ``arguments.common_arguments``."""
        from gym_fed.training.run.arguments import common_arguments

        arguments = common_arguments(self.config, self.checkpoints, evaluate=self.eval_encoded is not None)
        return {**arguments, "eval_on_start": self.evaluate_first and self.eval_encoded is not None}

    def datasets(self) -> dict[str, Any]:
        """Return ``train_dataset`` and ``eval_dataset`` (or None) as ``datasets.Dataset``."""
        return {
            "train_dataset": as_dataset(self.encoded),
            "eval_dataset": None if self.eval_encoded is None else as_dataset(self.eval_encoded),
        }


def as_dataset(encoded: list[dict[str, Any]]) -> Any:
    """Return encoded rows as a ``datasets.Dataset`` in memory; keys that a row lacks become None."""
    from datasets import Dataset

    keys = list(dict.fromkeys(key for row in encoded for key in row))
    return Dataset.from_dict({key: [row.get(key) for row in encoded] for key in keys})


def padded(rows: list[list[int]], value: int, *, left: bool = False) -> torch.Tensor:
    """Pad rows of ids to ``[n, longest]`` int64 with ``value`` on the right, or on the left."""
    import torch

    width = max(map(len, rows))
    fills = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([fill + row if left else row + fill for row, fill in zip(rows, fills, strict=True)])
