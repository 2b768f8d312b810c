"""The schemas of the YAML files of `gym train` and `gym tune`, with the names of TRL and PEFT.

This module does not import torch; ``gym_fed.training`` converts the values to TRL's arguments. Top-level keys are
grouped by subject, with one file of this folder each; an algorithm or tuning method has a section of its name
(``open_keys.py``).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from gym_fed.config.algorithms import AlgorithmSections
from gym_fed.config.algorithms.supervised import SupervisedSections
from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.member import MemberOf
from gym_fed.config.schema.open_keys import OpenModel
from gym_fed.config.train.compute import ComputeSections, DistributedSections
from gym_fed.config.train.data_source import DataConfig, DataSections
from gym_fed.config.train.graders import GraderSections
from gym_fed.config.train.optimization import OptimizationSections, PrivacySections
from gym_fed.config.train.run import RunSections, TrackingSections
from gym_fed.config.train.tuning import AdapterSections, LoraSettings, TuningSections, VisionSections
from gym_fed.core.registries import ALGORITHMS, FEATURES, TUNING, Kind

__all__ = ["DataConfig", "LoraSettings", "ModelInit", "TrainingConfig"]


class ModelInit(StrictModel):
    """The architecture of a decoder with random initial weights."""

    architecture: Literal["qwen3", "llama"] = "qwen3"
    """Architecture; ``qwen3`` normalises the queries and keys of each head, ``llama`` does not."""

    tokenizer: str = "gym-nano"
    """Source of the tokenizer: ``gym-nano`` (bytes), or a model folder."""

    vocab_size: int | None = Field(default=None, ge=1)
    """Number of embedding rows; at least, and by default, the tokenizer's number of tokens."""

    hidden_size: int = Field(ge=8)
    num_hidden_layers: int = Field(ge=1)
    intermediate_size: int = Field(ge=8)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=4)
    max_position_embeddings: int = Field(default=256, ge=8)
    rope_theta: float = Field(default=10000.0, gt=0)
    tie_word_embeddings: bool = True

    @model_validator(mode="after")
    def _validate_heads(self) -> ModelInit:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        return self


class TrainingConfig(
    AlgorithmSections,
    SupervisedSections,
    TuningSections,
    AdapterSections,
    VisionSections,
    OptimizationSections,
    DataSections,
    GraderSections,
    ComputeSections,
    DistributedSections,
    PrivacySections,
    RunSections,
    TrackingSections,
    OpenModel,
):
    """The config of a run. Runs with the same config on the same machine are bit-identical (CPU, one process)."""

    features: ClassVar[Kind[Any] | None] = FEATURES
    sections_choose: ClassVar[frozenset[str]] = frozenset({"finetuning"})

    algorithm: Annotated[str, MemberOf(ALGORITHMS)] = "sft"
    """Name of an algorithm: a file in ``gym_fed/training/algorithms`` or its folders, or from an installed package."""

    model: str | None = None
    """Model: ``gym-nano``, a model folder, a LoRA run folder, or a Hugging Face name in the local cache."""

    model_init: ModelInit | None = None
    """Architecture to train from random weights, instead of ``model``."""

    @model_validator(mode="after")
    def _validate_combinations(self) -> TrainingConfig:
        if self.graders and not ALGORITHMS.type_of(self.algorithm).needs_graders:
            those = ", ".join(ALGORITHMS.own_with("needs_graders"))
            raise ValueError(f"graders: {self.algorithm} does not use them; {those} do")
        forgets = any(source.role == "forget" for source in (*self.data, *self.eval_data))
        if forgets and not ALGORITHMS.type_of(self.algorithm).forgets:
            those = " and ".join(ALGORITHMS.own_with("forgets"))
            raise ValueError(f"data: role forget applies to {those}, not to {self.algorithm}")
        if self.model is not None and self.model_init is not None:
            raise ValueError("give either model or model_init, not both")
        if self.adapter and self.model_init is not None:
            raise ValueError("adapter needs a trained model, not model_init")
        if self.new_adapter and not TUNING.type_of(self.finetuning).is_adapter:
            raise ValueError(
                f"new_adapter: finetuning {self.finetuning} trains no adapter; remove it: all adapters are merged"
            )
        if self.model_init is not None and TUNING.type_of(self.finetuning).is_adapter:
            raise ValueError(f"finetuning: {self.finetuning} needs a trained model, not model_init")
        if self.packing is True and self.assistant_only_loss:
            raise ValueError(
                "packing: true and assistant_only_loss are mutually exclusive; use packing: bfd, or remove one"
            )
        if self.mask_history or self.is_about_turns:
            learns_all = not ALGORITHMS.type_of(self.algorithm).assistant_only_default
            if self.mask_history and learns_all and not self.assistant_only_loss:
                raise ValueError(
                    f"mask_history: {self.algorithm} trains on everything; set assistant_only_loss: true as well"
                )
            if self.assistant_only_loss is not None:
                learns_all = not self.assistant_only_loss
            self._validate_learned_turns(learns_all or self.packing is True)
        if self.reasoning == "off" and not ALGORITHMS.type_of(self.algorithm).packs:
            those = " and ".join(ALGORITHMS.own_with("packs"))
            raise ValueError(f"reasoning: off applies to {those}; {self.algorithm} accepts learn or drop")
        if self.packing == "bfd" and not ALGORITHMS.type_of(self.algorithm).packs:
            those = " and ".join(ALGORITHMS.own_with("packs"))
            raise ValueError(f"packing: bfd applies to {those}, not to {self.algorithm}")
        if self.eval_split and self.eval_data:
            raise ValueError("give either eval_data or eval_split, not both")
        return self


class SearchRange(StrictModel):
    """The possible values of one key: a range of numbers, or a list."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    """Sample on a logarithmic scale, as for learning rates."""

    step: float | None = Field(default=None, gt=0)
    integer: bool = False
    """Sample only integers."""

    choices: list[Any] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _validate_range(self) -> SearchRange:
        if self.choices is not None:
            if self.low is not None or self.high is not None or self.log or self.step or self.integer:
                raise ValueError("give either choices or low and high")
            return self
        if self.low is None or self.high is None or self.low > self.high:
            raise ValueError("give choices, or low and high with low <= high")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log needs low above 0, and no step")
        if self.integer and any(v is not None and v != int(v) for v in (self.low, self.high, self.step)):
            raise ValueError("integer needs whole numbers")
        return self


class PrunerSettings(StrictModel):
    """Settings for pruning trials that are worse than others at the same step; names are Optuna's."""

    name: Literal["median", "hyperband", "none"] = "median"
    n_startup_trials: int = Field(default=3, ge=0)
    """``median``: number of initial trials that are never pruned."""

    n_warmup_steps: int = Field(default=0, ge=0)
    """``median``: step before which no trial is pruned."""

    min_resource: int = Field(default=1, ge=1)
    """``hyperband``: number of steps of the shortest trials."""


class SearchSettings(StrictModel):
    """The parameters of a search, its metric and its sampler."""

    parameters: dict[str, SearchRange] = Field(min_length=1)
    """Ranges by key, named as in ``--set``: ``learning_rate``, ``lora.r``."""

    metric: str = "eval_loss"
    """Name of a logged metric, whose last value is used. ``eval_*`` needs ``eval_data``."""

    direction: Literal["minimize", "maximize"] = "minimize"
    num_trials: int = Field(default=20, ge=1)
    sampler: Literal["tpe", "random"] = "tpe"
    seed: int = 0
    pruner: PrunerSettings = Field(default_factory=PrunerSettings)


class SearchConfig(TrainingConfig):
    """A training config with a search over some of its keys. ``output_dir`` is the search's folder."""

    search: SearchSettings

    @model_validator(mode="after")
    def _validate_metric(self) -> SearchConfig:
        if self.search.metric.startswith("eval_") and not (self.eval_data or self.eval_split):
            raise ValueError(f"search.metric: {self.search.metric} needs eval_data or eval_split")
        if not self.save_final:
            raise ValueError("save_final: a trial is complete only when it is saved; leave it on")
        return self

    def trial(self, **changes: Any) -> dict[str, Any]:
        """Return the plain values of the training config, with top-level ``changes``."""
        return {**self.model_dump(mode="json", exclude={"search"}, exclude_unset=True), **changes}
