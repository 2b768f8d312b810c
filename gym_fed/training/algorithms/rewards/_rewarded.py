"""Define the base class of algorithms that learn from rewards: checks, rows, and arguments for TRL's trainers."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

from gym_fed.config.algorithms.reinforcement import RolloutSettings
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first, refuse_set
from gym_fed.core.text import counted
from gym_fed.data.encoding import prompt_ids, require_chat_template, text_ids
from gym_fed.data.rows import MEDIA, Row, RowKind
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.processes.ranks import world_size
from gym_fed.training.run.job import Job
from gym_fed.training.run.reproducibility import RunWarning

_UNUSED_KEYS = ("packing", "assistant_only_loss", "group_by_length", "mask_history", "reasoning")
_TEXT = "training on rewards supports only text"
_CHUNK_ROWS = 1000


class Rewarded(Algorithm):
    """An algorithm that learns from graded answers to prompts. ``name`` is the name of its config section."""

    keeps_encoded = False
    orders_rows = True
    name: ClassVar[str]
    row_kind: ClassVar[RowKind] = "prompt"
    learning_rate_scale: ClassVar[float] = 0.05
    needs_graders: ClassVar[bool] = True
    generates: ClassVar[bool] = True
    takes_reference: ClassVar[bool] = True

    def loss_measures_rows(self, config: TrainingConfig) -> bool:
        return False

    def check(self, config: TrainingConfig) -> None:
        reason = f"not used by {self.name}, which learns from answers that it generates"
        refuse_set(config, _UNUSED_KEYS, reason)
        settings = self.settings(config)
        prompts_per_generation(self.name, settings, config)
        if settings.rollouts is not None:
            from gym_fed.training.rollouts.policy import check_rollouts

            check_rollouts(self.name, settings, config)

    def lengths(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[int]:
        """Return the number of tokens of each prompt."""
        return [len(prompt_ids(tokenizer, row["prompt"])) for row in rows]

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[dict[str, Any]]:
        """Return the rows unchanged, since TRL tokenises the prompts when it generates answers."""
        needed = prompts_per_generation(self.name, self.settings(config), config)
        if len(rows) < needed:
            reason = f"{counted(len(rows), 'prompt')}, but one generation needs {needed}"
            remedy = "use more rows, a smaller batch, or a larger num_generations"
            raise GymError(ErrorCode.DATA_INVALID, reason, remedy)
        _require_one_kind(tokenizer, rows)
        for start in range(0, len(rows), _CHUNK_ROWS):
            _require_length(tokenizer, rows[start : start + _CHUNK_ROWS], start, config.max_length)
        return rows

    def arguments(self, job: Job, *names: str) -> dict[str, Any]:
        """Return the keyword arguments that GRPO's and RLOO's configs share, and the settings named in ``names``."""
        settings: RolloutSettings = self.settings(job.config)
        self._warn_of_skipped_prompts(job)
        shared = (
            *("num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p"),
            *("repetition_penalty", "steps_per_generation", "num_iterations"),
            *("mask_truncated_completions", "epsilon", "epsilon_high"),
        )
        return {
            **job.arguments(),
            **{name: getattr(settings, name) for name in (*shared, *names)},
            "num_generations_eval": 1,
            # The reference is copied from the model in memory, whereas TRL would load it by name.
            "beta": 0.0,
        }

    @classmethod
    def beside(cls, config: TrainingConfig, *, adapted: bool) -> tuple[int, int]:
        """Count a reference model if the loss penalises the divergence from it."""
        return (int(config.chosen_sections()[config.algorithm].beta > 0 and not adapted), 0)

    def _warn_of_skipped_prompts(self, job: Job) -> None:
        """Warn about prompts that do not fill a generation; TRL's sampler drops different ones in each epoch."""
        needed = prompts_per_generation(self.name, self.settings(job.config), job.config)
        if skipped := len(job.encoded) % needed:
            warnings.warn(
                f"data: each epoch skips {skipped} of {counted(len(job.encoded), 'prompt')} (different ones each "
                f"time), since one generation takes {needed}",
                RunWarning,
                stacklevel=2,
            )


def prompts_per_generation(name: str, settings: RolloutSettings, config: TrainingConfig) -> int:
    """Return the number of prompts per generation.

    Raises:
        GymError: ``CONFIG_INVALID`` if a generation does not consist of whole groups of answers to the same prompt.
    """
    batch, processes = config.per_device_train_batch_size, world_size()
    steps, key = settings.steps_per_generation, f"{name}.steps_per_generation"
    if steps is None:
        steps, key = config.gradient_accumulation_steps, "gradient_accumulation_steps"
    answers = batch * processes * steps
    if answers % settings.num_generations:
        product = f"per_device_train_batch_size {batch} x {key} {steps}"
        if processes > 1:
            product += f" x {processes} processes"
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{name}.num_generations: {settings.num_generations} does not divide the {counted(answers, 'answer')} of "
            f"one generation ({product})",
            "make the product a multiple of num_generations",
        )
    return answers // settings.num_generations


def _require_one_kind(tokenizer: Any, rows: list[Row]) -> None:
    """Refuse a mix of conversations and texts, since TRL checks only the first prompt of a batch."""
    first_is_text = isinstance(rows[0]["prompt"], str)
    for number, row in enumerate(rows, 1):
        is_mixed = isinstance(row["prompt"], str) != first_is_text
        omitted = "has tools, which would be missing from its prompt"
        refuse_first(
            (
                is_mixed,
                "plain strings and conversations are mixed",
                "write all prompts as strings, or all as messages",
            ),
            *((row.get(c) or row.get(m), f"has {c}", _TEXT) for c, m in MEDIA.items()),
            (row.get("tools"), omitted, "describe them in a system message, or remove the key"),
            code=ErrorCode.DATA_INVALID,
            prefix=f"row {number}: ",
        )
    if not first_is_text:
        require_chat_template(tokenizer)


def _require_length(tokenizer: Any, rows: list[Row], start: int, max_length: int) -> None:
    prompts = [row["prompt"] for row in rows]
    if isinstance(prompts[0], str):
        ids = text_ids(tokenizer, prompts)
    else:
        options = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
        ids = tokenizer.apply_chat_template(prompts, **options)["input_ids"]
    for number, row in enumerate(ids, start + 1):
        too_long = f"has {counted(len(row), 'token')}, but max_length is {max_length}"
        refuse_first(
            (not row, "is empty", "fill it in, or delete the row"),
            (len(row) > max_length, too_long, "shorten the prompt, or raise max_length"),
            code=ErrorCode.DATA_INVALID,
            prefix=f"row {number}: its prompt ",
        )
