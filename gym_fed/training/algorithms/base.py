"""What an algorithm is: how it encodes rows, and which TRL trainer it builds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from gym_fed.config.training import TrainingConfig
from gym_fed.data.encoding import Encoded


class Algorithm(ABC):
    """One way to train. Stateless: everything it needs is handed in."""

    @abstractmethod
    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[dict[str, Any]]) -> list[Encoded]:
        """Rows (``messages`` or ``text``) to the columns that the trainer's collator wants.

        Raises:
            GymError: ``DATA_INVALID`` for rows this algorithm cannot learn from.
        """

    @abstractmethod
    def build(
        self,
        config: TrainingConfig,
        model: Any,
        tokenizer: Any,
        encoded: list[Encoded],
        checkpoints: Path,
        callbacks: list[Any],
    ) -> Any:
        """The ``transformers.Trainer`` that will run.

        Args:
            config: The run's config.
            model: The model to train in place, already wrapped by PEFT where ``finetuning`` is ``lora``.
            tokenizer: Its tokenizer.
            encoded: What ``encode`` gave.
            checkpoints: Folder for checkpoints.
            callbacks: ``transformers.TrainerCallback`` objects to install.
        """
