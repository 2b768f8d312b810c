"""Sequence-level distillation: the teacher answers the rows' prompts, and the student is fine-tuned on its answers.

Kim and Rush 2016, "Sequence-Level Knowledge Distillation", section 3.2, with greedy (or sampled) answers in place of
beam search. Only texts pass from teacher to student, so that vocabularies may differ.
"""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core import console
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.encoding import prompt_ids
from gym_fed.data.row_counts import EncodedRows, RowCounts, counts_of
from gym_fed.data.rows import Row
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.algorithms.sft import Sft as _Sft
from gym_fed.training.run.job import Job


class SequenceDistillation(Algorithm):
    """``sft`` on the teacher's answers, which the run folder holds in ``teacher.jsonl``."""

    tried = "full; greedy and sampled"
    untried = "adapters"

    row_kind = "prompt"
    keeps_encoded = False

    def check(self, config: TrainingConfig) -> None:
        from gym_fed.base.models import resolve

        resolve(self.settings(config).teacher)

    def lengths(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[int]:
        """Return the number of tokens of each prompt with the longest answer that the teacher may write."""
        longest = self.settings(config).max_completion_length
        return [len(prompt_ids(tokenizer, row["prompt"])) + longest for row in rows]

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[dict[str, Any]]:
        from gym_fed.training.algorithms.distillation._teacher_answers import TeacherAnswers

        answers = TeacherAnswers(config).of(rows)
        taught = [_taught(row, a["answer"]) for row, a in zip(rows, answers, strict=True) if a["finished"]]
        if unfinished := len(rows) - len(taught):
            limit = self.settings(config).max_completion_length
            place = f"sequence_distillation.max_completion_length: {limit} tokens"
            if not taught:
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"{place} end none of the teacher's {unfinished} answers",
                    "raise it, or choose a teacher that ends its answers",
                )
            console.err.print(f"{place}: {unfinished} of {len(rows)} answers do not end and are left out")
        encoded = _Sft().encode(config, tokenizer, taught)
        dropped = RowCounts(rows=unfinished, dropped=unfinished)
        return EncodedRows(encoded, counts_of(encoded, len(taught)) + dropped)

    def build(self, job: Job) -> Any:
        from gym_fed.training.algorithms.distillation._teacher_answers import TeacherAnswers

        TeacherAnswers(job.config).keep()
        return _Sft().build(job)


def _taught(row: Row, answer: str) -> Row:
    """Return the row with the teacher's answer in place of its own."""
    others = {key: value for key, value in row.items() if key not in ("prompt", "answer")}
    if isinstance(row["prompt"], str):
        return {**others, "text": row["prompt"] + answer}
    return {**others, "messages": [*row["prompt"], {"role": "assistant", "content": answer}]}
