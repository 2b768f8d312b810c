"""The YAML of `gym train`: which model, which data, which algorithm, how long. Names are TRL's and PEFT's.

Nothing here imports torch; the values are turned into TRL arguments by ``gym_fed.training``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from gym_fed.config.base import StrictModel

DataFormat = Literal["auto", "alpaca", "sharegpt", "messages", "text"]


class DataConfig(StrictModel):
    """One source of rows: a file, or tasks that the project generates itself."""

    path: Path | None = None
    """A JSON or JSONL file; relative paths are taken from the working directory. Either this or ``tasks``."""

    tasks: list[str] | None = None
    """Names of generated tasks (`gym data tasks` lists them), mixed in equal shares."""

    format: DataFormat = "auto"
    """How rows of a file are laid out; ``auto`` looks at the first row."""

    num_examples: int | None = Field(default=None, ge=1)
    """For tasks: how many rows to generate. For a file: use its first so many rows (by default all)."""

    max_turns: int = Field(default=1, ge=1)
    """For tasks: above 1, one row in five is a conversation of up to so many questions."""

    weight: float = Field(default=1.0, gt=0)
    """Share of this source: its rows are repeated ``weight`` times; the fraction is drawn by the seed."""

    seed: int = 0
    """Seed of generated rows."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if (self.path is None) == (self.tasks is None):
            raise ValueError("give either path or tasks")
        if self.tasks is not None and not self.tasks:
            raise ValueError("tasks is empty")
        if self.tasks is not None and self.num_examples is None:
            raise ValueError("tasks need num_examples")
        return self


class LoraSettings(StrictModel):
    """The adapter that is trained when ``finetuning`` is ``lora``; words are PEFT's."""

    r: int = Field(default=8, ge=1)
    lora_alpha: int = Field(default=16, ge=1)
    lora_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    target_modules: list[str] | str = "all-linear"
    """Names of linear layers, or ``all-linear`` for every one but the output head."""

    freeze_a: bool = False
    """Train B alone; A follows from ``seed`` and the layers' names, on every machine the same. Runs of one seed on
    different data can then be merged exactly, coordinate by coordinate."""


class ModelInit(StrictModel):
    """The architecture of a model that starts from random weights (Qwen3's, decoder only)."""

    tokenizer: str = "gym-nano"
    """Where the tokenizer comes from: ``gym-nano`` (bytes), or a model folder."""

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
    def _heads_divide(self) -> ModelInit:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        return self


class TrainingConfig(StrictModel):
    """Everything that decides a run. Two runs of one config on one machine are bit-identical (CPU, one process)."""

    algorithm: str = "sft"
    """A registered algorithm: the name of a file in ``gym_fed/training/algorithms``."""

    model: str | None = None
    """``gym-nano``, a model folder, a LoRA run folder, or a Hugging Face name that is in the local cache."""

    model_init: ModelInit | None = None
    """Instead of ``model``: train from random weights."""

    data: list[DataConfig] = Field(default_factory=list)
    """The training rows. May be empty only when rows are handed to ``Trainer.train`` directly."""

    output_dir: Path = Path("runs/train")
    """Where config, metrics, checkpoints and the result go; relative to the working directory."""

    finetuning: Literal["full", "lora"] = "full"
    lora: LoraSettings = Field(default_factory=LoraSettings)

    learning_rate: float = Field(default=1e-3, gt=0)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are clipped to this norm; 0 leaves them alone."""

    max_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps; wins over ``num_train_epochs``."""

    num_train_epochs: float = Field(default=1.0, gt=0)
    per_device_train_batch_size: int = Field(default=8, ge=1)
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    group_by_length: bool = False
    """Batch rows of like length together: less padding, and a slightly less random order."""

    gradient_checkpointing: bool = False
    max_length: int = Field(default=256, ge=2)
    """Longest row in tokens. Longer rows are cut (sft), or continued in the next row (packing)."""

    packing: bool | None = None
    """Join rows and cut them into rows of ``max_length``. Default: on for ``pretrain``, off for ``sft``."""

    assistant_only_loss: bool | None = None
    """In conversations, learn from the assistant's words only. Default: on for ``sft``, off for ``pretrain``."""

    seed: int = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """``auto`` takes CUDA, then MPS, then the CPU."""

    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads; by default torch's own choice. Another number may change the last bits of a result."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights while training."""

    logging_steps: int = Field(default=10, ge=1)
    save_steps: int = Field(default=0, ge=0)
    """A checkpoint every so many steps; 0 saves one only when interrupted."""

    save_total_limit: int = Field(default=1, ge=1)
    """How many checkpoints are kept."""

    save_final: bool = True
    """Write the trained model (or adapter) into ``output_dir`` at the end."""

    save_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights on disk at the end; by default the one they were trained in."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainingConfig:
        if self.model is not None and self.model_init is not None:
            raise ValueError("give either model or model_init, not both")
        if self.model_init is not None and self.finetuning == "lora":
            raise ValueError("finetuning: lora needs a trained model, not model_init")
        if self.packing and self.assistant_only_loss:
            raise ValueError("packing and assistant_only_loss exclude each other")
        return self
