"""What a tuning method is: it prepares a model for training, and writes what was trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from gym_fed.config.training import TrainingConfig


class Tuning(ABC):
    """One way to choose trainable weights. Stateless."""

    is_adapter: ClassVar[bool] = True
    """Whether the model's own weights stay as they are and what is trained is saved alone."""

    def check(self, config: TrainingConfig) -> None:  # noqa: B027 - most methods refuse nothing
        """Refuse a config that this method, machine or installation cannot honour, before anything is loaded.

        Raises:
            GymError: ``CONFIG_INVALID`` or ``MISSING_DEPENDENCY`` naming the key and the remedy.
        """

    @abstractmethod
    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        """The model to train: ``model`` itself with gradients where they belong, or a PEFT model around it."""

    def callbacks(self, model: Any, config: TrainingConfig) -> list[Any]:
        """``transformers.TrainerCallback`` objects that the method needs while the prepared ``model`` is trained."""
        return []

    def finish(self, model: Any, config: TrainingConfig) -> None:  # noqa: B027 - most have nothing to undo
        """After training, also one that was stopped: give the base its own weights back where ``prepare`` changed them.

        What ``model`` computes stays the same.
        """

    @contextmanager
    def finishing(self, model: Any, config: TrainingConfig) -> Iterator[None]:
        """Training happens within, and ``finish`` after it, whatever happens."""
        from gym_fed.training.quantization import adapters_keep_their_type

        try:
            with adapters_keep_their_type(model):
                yield
        finally:
            self.finish(model, config)

    def save(self, model: Any, config: TrainingConfig, folder: Path, base_name: str | None) -> None:
        """Write what was trained. Adapters name their base."""
        from gym_fed.training.tuning._peft import save_adapter

        save_adapter(model, folder, base_name)
