"""What an optimiser is to us: a name that transformers knows, or a function of the model."""

from __future__ import annotations

from typing import Any

from gym_fed.config.training import TrainingConfig


class OptimizerChoice:
    """One value of ``optimizer``. Stateless. Either ``arguments`` or ``make`` is overridden."""

    def check(self, config: TrainingConfig) -> None:
        """Refuse what this optimiser, machine or installation cannot honour, before anything is loaded.

        Raises:
            GymError: ``CONFIG_INVALID`` or ``MISSING_DEPENDENCY`` naming the key and the remedy.
        """

    def arguments(self, config: TrainingConfig) -> dict[str, Any]:
        """Keyword arguments for ``transformers.TrainingArguments`` (``optim``, ``optim_args``, ...)."""
        return {}

    def make(self, model: Any, config: TrainingConfig) -> Any | None:
        """The ``torch.optim.Optimizer`` of the model's trainable weights; None when transformers makes it."""
        return None

    def callbacks(self, config: TrainingConfig) -> list[Any]:
        """``transformers.TrainerCallback`` objects that the optimiser needs."""
        return []
