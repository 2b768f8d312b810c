"""Where rows come from: the ``data`` list of a config, and how rows are cut, joined and labelled."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from gym_fed.config.base import StrictModel

DataFormat = Literal[
    "auto", "alpaca", "sharegpt", "messages", "preference", "kto", "completion", "prompt", "text"
]


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

    role: Literal["learn", "forget"] = "learn"
    """``forget`` marks rows that ``gradient_difference`` and ``npo`` unlearn; they keep the others."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if (self.path is None) == (self.tasks is None):
            raise ValueError("give either path or tasks")
        if self.tasks is not None and not self.tasks:
            raise ValueError("tasks is empty")
        if self.tasks is not None and self.num_examples is None:
            raise ValueError("tasks need num_examples")
        return self


class DataSections(StrictModel):
    """Keys of the YAML's top level."""

    data: list[DataConfig] = Field(default_factory=list)
    """The training rows. May be empty only when rows are handed to ``Trainer.train`` directly."""

    eval_data: list[DataConfig] = Field(default_factory=list)
    """Rows that are never trained on; the loss on them is measured every ``eval_steps``."""

    group_by_length: bool = False
    """Batch rows of like length together: less padding, and a slightly less random order."""

    max_length: int = Field(default=256, ge=2)
    """Longest row in tokens. Longer rows are cut (sft), or continued in the next row (packing)."""

    packing: bool | None = None
    """Join rows and cut them into rows of ``max_length``. Default: on for ``pretrain``, off for ``sft``."""

    assistant_only_loss: bool | None = None
    """In conversations, learn from the assistant's words only. Default: on for ``sft``, off for ``pretrain``."""
