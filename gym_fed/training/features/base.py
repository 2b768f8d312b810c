"""The base class of features: a key of the config that changes how the model is computed, not what it learns from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import BaseModel

from gym_fed.config.train.training import TrainingConfig


class Feature:
    """A key of the top level. Stateless; called only if the key is on."""

    Settings: ClassVar[type[BaseModel] | None] = None
    """Schema of the key, for a feature of another package; None is true or false. Those of ours are keys of the
    config (``gym_fed/config/train/compute.py``), which has their types."""

    per_example: ClassVar[bool] = False
    """Whether gradients of single examples (``privacy``) have been tried with it."""

    tried: ClassVar[str] = ""
    """Combinations that the tests run, on a CPU and tiny models; `gym docs members` shows it."""

    def check(self, config: TrainingConfig) -> None:
        """Refuse what this feature, machine or installation cannot honour, before anything is loaded.

        Raises:
            GymError: ``CONFIG_INVALID`` or ``MISSING_DEPENDENCY`` naming the key and the remedy.
        """

    def arguments(self, config: TrainingConfig) -> dict[str, Any]:
        """Return keyword arguments for ``transformers.TrainingArguments``."""
        return {}

    def apply(self, model: Any, config: TrainingConfig) -> None:
        """Change the loaded model in place, for good: the result has the change too.

        Raises:
            GymError: ``MODEL_INVALID`` for a model that cannot be changed so.
        """

    @contextmanager
    def during(self, model: Any, config: TrainingConfig) -> Iterator[None]:
        """Change the model for the duration of the run; afterwards it is as before."""
        yield
