"""Supervised fine-tuning: next-token loss on the assistant's words (conversations) or on all words (texts)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.config.training import TrainingConfig
from gym_fed.data.encoding import Encoded, encode_rows
from gym_fed.training.algorithms.base import Algorithm


class Sft(Algorithm):
    """TRL's ``SFTTrainer`` on rows that are tokenised here, so that nothing is cached or mapped by processes."""

    assistant_only_default = True
    packing_default = False

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[dict[str, Any]]) -> list[Encoded]:
        assistant_only = _or(config.assistant_only_loss, self.assistant_only_default and not config.packing)
        return encode_rows(
            tokenizer,
            rows,
            max_length=config.max_length,
            assistant_only=assistant_only,
            packing=_or(config.packing, self.packing_default and not assistant_only),
        )

    def build(
        self,
        config: TrainingConfig,
        model: Any,
        tokenizer: Any,
        encoded: list[Encoded],
        checkpoints: Path,
        callbacks: list[Any],
    ) -> Any:
        from datasets import Dataset
        from trl import SFTConfig

        from gym_fed.training.arguments import common_arguments
        from gym_fed.training.trl_glue import LocalSFTTrainer

        arguments = SFTConfig(
            **common_arguments(config, checkpoints),
            max_length=config.max_length,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        columns: dict[str, list[Any]] = {
            key: [row[key] for row in encoded] for key in ("input_ids", "labels")
        }
        columns["length"] = [len(row["input_ids"]) for row in encoded]
        return LocalSFTTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
            callbacks=callbacks,
        )


def _or(value: bool | None, default: bool) -> bool:
    return default if value is None else value
