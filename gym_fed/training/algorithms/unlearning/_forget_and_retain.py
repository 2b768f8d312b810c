"""Define the base class of unlearning algorithms, which pair rows to forget with rows to retain.

Pairs are drawn once from the seed. An epoch covers the larger group and repeats the rows of the smaller group, each
time in a new order. Every batch therefore contains both kinds, and a resumed run has the same batches.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.data.row_counts import EncodedRows, counts_of
from gym_fed.data.rows import Row
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.algorithms.sft import Sft
from gym_fed.training.run.job import Job

Encoded = dict[str, Any]


class Unlearning(Algorithm):
    """An algorithm that forgets rows with ``forget: true``. ``per_device_train_batch_size`` counts pairs."""

    forgets = True
    learning_rate_scale = 0.5
    orders_rows = True

    def loss_measures_rows(self, config: TrainingConfig) -> bool:
        return False

    @abstractmethod
    def trainer(self, settings: Any) -> tuple[type, dict[str, Any]]:
        """Return the trainer class, and the keyword arguments that only this class takes."""

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[Encoded]:
        forget = [row for row in rows if row.get("forget")]
        retain = [row for row in rows if not row.get("forget")]
        weight = self.settings(config).retain_weight
        if not forget:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{config.algorithm}: none of the {counted(len(rows), 'row')} is marked as forget",
                "mark a source with role: forget, or rows with forget: true",
            )
        if bool(retain) != bool(weight):
            if weight:
                problem, remedy = (
                    f"all {counted(len(rows), 'row', 'are')} marked as forget",
                    "add rows to retain",
                )
            else:
                problem, remedy = f"{counted(len(retain), 'row', 'are')} not marked as forget", "remove them"
            reason = f"{problem}, but {config.algorithm}.retain_weight is {weight:g}"
            raise GymError(ErrorCode.DATA_INVALID, reason, f"{remedy}, or set another retain_weight")
        groups = [Sft().encode(config, tokenizer, group) if group else [] for group in (forget, retain)]
        counts = counts_of(groups[0], len(forget)) + counts_of(groups[1], len(retain))
        return EncodedRows(_pair(*groups, seed=config.seed), counts)

    def build(self, job: Job) -> Any:
        from trl import SFTConfig

        from gym_fed.training.trl_glue import local

        arguments = SFTConfig(
            **job.arguments(),
            max_length=job.config.max_length,
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
        )
        trainer, own = self.trainer(self.settings(job.config))
        return local(trainer)(
            model=job.model,
            args=arguments,
            processing_class=job.tokenizer,
            callbacks=job.callbacks,
            **job.datasets(),
            **own,
        )


def _pair(forget: list[Encoded], retain: list[Encoded], *, seed: int) -> list[Encoded]:
    """Return pairs ``{"forget": row, "retain": row}``; ``retain`` is missing if there are no rows to retain."""
    if not retain:
        return [{"forget": row, "length": row["length"]} for row in forget]
    number = max(len(forget), len(retain))
    left, right = (_repeat_to(group, number, seed) for group in (forget, retain))
    return [
        {"forget": f, "retain": r, "length": max(f["length"], r["length"])}
        for f, r in zip(left, right, strict=True)
    ]


def _repeat_to(rows: list[Encoded], number: int, seed: int) -> list[Encoded]:
    """Return ``number`` rows: all of them, then all in a new order, and so on."""
    drawn, order = list(rows), random.Random(seed)
    while len(drawn) < number:
        drawn += order.sample(rows, len(rows))
    return drawn[:number]
