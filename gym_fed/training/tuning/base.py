"""Define the base class of tuning methods, which prepare a model for training and write the trained weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first


class Tuning(ABC):
    """A tuning method. Instances are stateless."""

    is_adapter: ClassVar[bool] = True
    """True if only additional weights are trained and saved, and the model's own weights do not change."""

    Settings: ClassVar[type[BaseModel] | None] = None
    """Schema of the method's config section; None if there is no section. Built-in methods leave this None, since their
    sections are typed keys of the config (``gym_fed/config/train/tuning.py``)."""

    trains_all: ClassVar[bool] = False
    """True if every weight of the model is trained."""

    on_quantized: ClassVar[bool] = True
    """True if it can train on a quantised base, which only adapters can."""

    default_learning_rate: ClassVar[float] = 2e-4
    """Default ``learning_rate`` for supervised training of pre-trained models with more than ten million weights."""

    per_example: ClassVar[bool] = False
    """True if the tests cover the method together with per-example gradients (``privacy``)."""

    pipelines: ClassVar[bool] = False
    """True if each process may hold consecutive blocks of the tuned model."""

    on_packed: ClassVar[bool] = False
    """True if the tests cover bases whose layers are quantised by HQQ or torchao."""

    reaches_experts: ClassVar[bool] = False
    """True if it adapts fused experts, unless ``fused_experts`` in its section is false."""

    federates: ClassVar[bool] = False
    """True if a hub may request it, because its updates are values or LoRA factors."""

    sends_factors: ClassVar[bool] = False
    """True if an update contains LoRA's two factors per weight instead of values, for methods that federate."""

    tried: ClassVar[str] = ""
    """Combinations that the tests run, on a CPU and with tiny models; `gym docs members` shows them."""

    untried: ClassVar[str] = ""
    """Supported combinations without tests."""

    @classmethod
    def starts_as_base(cls, config: TrainingConfig) -> bool:
        """Return True if the prepared model has the same outputs as its base before the first step."""
        return True

    @classmethod
    def own_optimizer(cls, config: TrainingConfig) -> str | None:
        """Return the reason why the method needs its own optimiser, with the setting; None if it does not."""
        return None

    def check(self, config: TrainingConfig) -> None:  # noqa: B027 - most methods refuse nothing
        """Refuse a config that this method, machine or installation does not support, before anything is loaded.

        Raises:
            GymError: ``CONFIG_INVALID`` or ``MISSING_DEPENDENCY``, with the key and the remedy.
        """

    @abstractmethod
    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        """Return the model to train: ``model`` itself with gradients enabled, or a PEFT model around it."""

    def callbacks(self, model: Any, config: TrainingConfig) -> list[Any]:
        """Return the ``transformers.TrainerCallback`` objects that the method needs while it trains ``model``."""
        return []

    def finish(self, model: Any, config: TrainingConfig) -> None:  # noqa: B027 - most have nothing to undo
        """Restore the base's weights that ``prepare`` has changed, when training ends or is stopped.

        The outputs of ``model`` do not change.
        """

    @contextmanager
    def finishing(self, model: Any, config: TrainingConfig) -> Iterator[None]:
        """Call ``finish`` on exit, even after an error."""
        from gym_fed.training.model.quantization import uncast_adapters

        try:
            with uncast_adapters(model):
                yield
        finally:
            self.finish(model, config)

    def save(self, model: Any, config: TrainingConfig, folder: Path, base_name: str | None) -> None:
        """Write the trained weights. Adapters refer to their base by name."""
        from gym_fed.base.modeling.adapter_saving import save_adapter

        save_adapter(model, folder, base_name)


def refuse_quantization(config: TrainingConfig, why: str) -> None:
    """Refuse the ``quantization`` section."""
    reason = f"quantization: finetuning {config.finetuning} cannot use it: {why}"
    refuse_first((config.quantization, reason, "remove the section, or train with finetuning: lora"))
