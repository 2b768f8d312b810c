"""The YAML of `gym train`: which model, which data, which algorithm, how long. Names are TRL's and PEFT's.

Nothing here imports torch; the values are turned into TRL arguments by ``gym_fed.training``. Keys of the top level
stand together by subject, a file of this folder each; an algorithm or tuning method has a section of its own name.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from gym_fed.config.algorithms import ALGORITHM_SECTIONS, AlgorithmSections
from gym_fed.config.compute import ComputeSections
from gym_fed.config.data_source import DataConfig, DataSections
from gym_fed.config.distributed import DistributedSections
from gym_fed.config.model_init import ModelInit
from gym_fed.config.optimization import OptimizationSections
from gym_fed.config.private_training import PrivacySections
from gym_fed.config.rewards import RewardSections
from gym_fed.config.run import RunSections
from gym_fed.config.tracking import TrackingSections
from gym_fed.config.tuning import TUNING_SECTIONS, LoraSettings, TuningSections
from gym_fed.config.vision import VisionSections

__all__ = ["DataConfig", "LoraSettings", "ModelInit", "TrainingConfig"]

_REWARDED = ("ppo", "grpo", "gspo", "rloo")
_UNLEARNING = ("gradient_difference", "npo")


class TrainingConfig(
    AlgorithmSections,
    TuningSections,
    VisionSections,
    OptimizationSections,
    DataSections,
    RewardSections,
    ComputeSections,
    DistributedSections,
    PrivacySections,
    RunSections,
    TrackingSections,
):
    """Everything that decides a run. Two runs of one config on one machine are bit-identical (CPU, one process)."""

    algorithm: str = "sft"
    """A registered algorithm: the name of a file in ``gym_fed/training/algorithms``."""

    model: str | None = None
    """``gym-nano``, a model folder, a LoRA run folder, or a Hugging Face name that is in the local cache."""

    model_init: ModelInit | None = None
    """Instead of ``model``: train from random weights."""

    @model_validator(mode="before")
    @classmethod
    def _fill_chosen_sections(cls, values: Any) -> Any:
        """The section of the chosen algorithm and tuning method is there even when nothing in it is set."""
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        for name, sections in (
            (values.get("algorithm", "sft"), ALGORITHM_SECTIONS),
            (values.get("finetuning", "full"), TUNING_SECTIONS),
        ):
            if name in sections and filled.get(name) is None:
                filled[name] = {}
        return filled

    @model_validator(mode="after")
    def _no_idle_sections(self) -> TrainingConfig:
        """A section that nothing would read is a mistake, not a comment."""
        for key, chosen, sections in (
            ("algorithm", self.algorithm, ALGORITHM_SECTIONS),
            ("finetuning", self.finetuning, TUNING_SECTIONS),
        ):
            idle = [name for name in sections if name != chosen and getattr(self, name) is not None]
            if idle:
                raise ValueError(f"{idle[0]}: is given, but {key} is {chosen}; remove the section")
        if self.rewards and self.algorithm not in _REWARDED:
            raise ValueError(f"rewards: {self.algorithm} does not use them; only {', '.join(_REWARDED)} do")
        forgets = any(source.role == "forget" for source in (*self.data, *self.eval_data))
        if forgets and self.algorithm not in _UNLEARNING:
            raise ValueError(
                f"data: role forget is for {' and '.join(_UNLEARNING)}, not for {self.algorithm}"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> TrainingConfig:
        if self.model is not None and self.model_init is not None:
            raise ValueError("give either model or model_init, not both")
        if self.model_init is not None and self.finetuning not in ("full", "freeze"):
            raise ValueError(f"finetuning: {self.finetuning} needs a trained model, not model_init")
        if self.packing is True and self.assistant_only_loss:
            raise ValueError("packing and assistant_only_loss exclude each other; packing: bfd does not")
        if self.mask_history and self.algorithm == "pretrain" and not self.assistant_only_loss:
            raise ValueError(
                "mask_history: pretrain learns everything; set assistant_only_loss: true as well"
            )
        if self.packing == "bfd" and self.algorithm not in ("sft", "pretrain"):
            raise ValueError(f"packing: bfd is for sft and pretrain, not for {self.algorithm}")
        if self.eval_split and self.eval_data:
            raise ValueError("give either eval_data or eval_split, not both")
        return self
