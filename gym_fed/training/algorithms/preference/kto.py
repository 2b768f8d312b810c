"""Kahneman-Tversky optimisation (KTO), for single answers labelled as desirable or undesirable.

With ``h = log pi(y|x) - log ref(y|x)`` and ``z = max(0, mean log-ratio of answers to other prompts)``, without
gradient, the loss is ``desirable_weight * (1 - sigmoid(beta * (h - z)))`` for a desirable answer, and
``undesirable_weight * (1 - sigmoid(beta * (z - h)))`` for an undesirable one: Ethayarajh et al. 2024, equation 7.

``trl.trainer.kto_trainer.KTOTrainer._compute_loss`` computes it; ``KtoMeans`` computes ``z``, once per optimiser step.
``tests/unit/training/test_losses_on_the_page.py`` compares the trainer's loss with the formula.
"""

from __future__ import annotations

import random
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core import console
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.text import counted
from gym_fed.data.formats.kto import label_of
from gym_fed.data.row_counts import EncodedRows
from gym_fed.data.rows import Row
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.algorithms.preference._tokenised import build_on_ids, check_preference, precompute
from gym_fed.training.processes.ranks import world_size
from gym_fed.training.rows.answers import answer_lengths, cut_answers, encode_answers
from gym_fed.training.run.job import Job


class Kto(Algorithm):
    """KTO on single answers labelled desirable or undesirable; a preference pair becomes two such rows.

    Rows are shuffled once with ``seed``, and every epoch uses that order. The KL of a step is estimated on its prompts,
    each combined with the answer of a neighbouring row.
    """

    orders_rows = True
    row_kind = "unpaired"
    learning_rate_scale = 0.05
    uses_reference = True
    takes_reference = True
    federates = True
    tried = "full, LoRA; two processes"
    untried = "images"

    @classmethod
    def least_batch(cls, settings: Any) -> int:
        return 2 if settings.loss_type == "kto" else 1  # the KL is estimated within the batch

    def check(self, config: TrainingConfig) -> None:
        check_preference(config)
        if not _estimates_kl(config):
            return
        too_few = (
            "per_device_train_batch_size: kto estimates the KL over a step, which needs more than one row"
        )
        fixed = "group_by_length: kto uses its rows in a fixed order"
        other = "or use kto.loss_type: apo_zero_unpaired"
        refuse_first(
            (_step_rows(config) < 2, too_few, f"set it or gradient_accumulation_steps to 2 or more, {other}"),
            (config.group_by_length, fixed, f"remove it, {other}"),
        )

    def lengths(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[int]:
        """Return the number of tokens of each prompt together with its answer."""
        return answer_lengths(encode_answers(tokenizer, rows, ("completion",), reasoning=config.reasoning))

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[dict[str, Any]]:
        """Encode prompts and answers; see ``cut_answers`` for rows longer than ``max_length``.

        Raises:
            GymError: ``DATA_INVALID`` for a label other than true or false, or a single row.
        """
        labels = _labels(rows)
        ids = encode_answers(tokenizer, rows, ("completion",), reasoning=config.reasoning)
        labelled = [{**answer, "label": label} for answer, label in zip(ids, labels, strict=True)]
        random.Random(config.seed).shuffle(labelled)
        cut = cut_answers(labelled, config.max_length)
        return EncodedRows(_with_neighbours(cut, config), cut.counts) if _estimates_kl(config) else cut

    def build(self, job: Job) -> Any:
        from trl import KTOConfig

        from gym_fed.training.algorithms.preference._trainers import KtoMeans

        settings = self.settings(job.config)
        order = {"train_sampling_strategy": "sequential"} if _estimates_kl(job.config) else {}
        arguments = KTOConfig(
            **{**job.arguments(), **order},
            **settings.model_dump(exclude={"precompute_ref_log_probs"}),
            max_length=job.config.max_length,  # a neighbour's answer may be longer than the row's own
            precompute_ref_log_probs=precompute(job, settings.precompute_ref_log_probs),
        )
        return build_on_ids(job, KtoMeans, arguments, reference=True)


def _labels(rows: list[Row]) -> list[bool]:
    """Return the labels as booleans; warn if all labels are equal."""
    labels = []
    for number, row in enumerate(rows, 1):
        label = label_of(row["label"])
        if label is None:
            reason = f"row {number}: label is {row['label']!r}"
            raise GymError(ErrorCode.DATA_INVALID, reason, "use true or false, or 1 or 0")
        labels.append(label)
    if len(set(labels)) == 1:
        console.err.print(
            f"warning: kto: the label of all {counted(len(labels), 'row')} is {str(labels[0]).lower()}, so the run "
            "has no examples of the other label"
        )
    return labels


def _estimates_kl(config: TrainingConfig) -> bool:
    assert config.kto is not None  # set by the config
    return config.kto.loss_type == "kto"


def _step_rows(config: TrainingConfig) -> int:
    """Return the number of rows per optimiser step across all processes."""
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * world_size()


def _with_neighbours(rows: list[dict[str, Any]], config: TrainingConfig) -> list[dict[str, Any]]:
    """Add to each row the answer of the previous row in its step; in a step of one row, of the previous row overall."""
    if len(rows) < 2:
        raise GymError(ErrorCode.DATA_INVALID, "kto needs at least two rows", "add rows")
    size = _step_rows(config)
    result = []
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        for i, row in enumerate(batch):
            neighbour = rows[start - 1] if len(batch) == 1 else batch[i - 1]
            result.append({**row, "KL_completion_ids": neighbour["completion_ids"]})
    return result
