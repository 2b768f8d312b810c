"""A reward model: a score ``r`` for an answer, learned from pairs by ``-log sigmoid(r(x, y_w) - r(x, y_l))``.

Bradley and Terry 1952; Ouyang et al. 2022, equation 1. ``center_rewards_coefficient`` weights an added
penalty, the mean of ``(r(x, y_w) + r(x, y_l))**2`` (Eisenstein et al. 2023, equation 2).

``trl.trainer.reward_trainer.RewardTrainer.compute_loss`` computes both.
``tests/unit/training/test_losses_on_the_page.py`` compares the trainer's loss with the formula.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.row_counts import EncodedRows, RowCounts
from gym_fed.data.rows import Row
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.algorithms.preference._tokenised import build_on_ids, check_preference, encode_pairs
from gym_fed.training.rows.answers import answer_lengths, require_some
from gym_fed.training.run.job import Job

_QUANTISED = (
    *("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method", "hf_quantizer"),
    "packed_by",
)


class RewardModel(Algorithm):
    """A causal LM whose head is replaced by a scalar one, read at the last token."""

    row_kind = "preference"
    learning_rate_scale = 0.5
    sequences_per_row = 2
    task_type = "SEQ_CLS"
    tried = "full, LoRA, 4 bits"
    untried = "several processes"

    multiplies_by_head = False

    @classmethod
    def logits(cls, config: TrainingConfig) -> Literal["tiled", "whole", "none"]:
        return "none"

    @classmethod
    def advice(cls, folder: str) -> str:
        return f"to score answers with it, add it to graders: {{grader: reward_model, model: {folder}}}"

    def check(self, config: TrainingConfig) -> None:
        check_preference(config)

    def lengths(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[int]:
        """Return the number of tokens of the longer conversation of each pair."""
        return answer_lengths(encode_pairs(config, tokenizer, rows))

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[dict[str, Any]]:
        """Encode pairs; like TRL, skip pairs with a conversation of more than ``max_length`` tokens.

        A truncated answer cannot be scored. ``length`` is the length of the longer conversation.
        """
        counts = RowCounts()
        encoded = EncodedRows(self.encode_each(config, tokenizer, rows, counts), counts)
        require_some(encoded, counts, config.max_length)
        return encoded

    def encode_each(
        self, config: TrainingConfig, tokenizer: Any, rows: Iterable[Row], counts: RowCounts
    ) -> Iterator[dict[str, Any]]:
        for row in encode_pairs(config, tokenizer, rows):
            whole = {key: row["prompt_ids"] + row[key] for key in ("chosen_ids", "rejected_ids")}
            length = max(map(len, whole.values()))
            fits, answers = length <= config.max_length, len(row["chosen_ids"]) + len(row["rejected_ids"])
            counts.count(length, cut=not fits, tokens=answers * fits, tokens_cut=answers * (not fits))
            if fits:
                yield {**whole, "length": length}

    def adapt(self, model: Any, tokenizer: Any, config: TrainingConfig) -> Any:
        """Return the model's body (not a copy) with a scalar head, initialised from ``seed``.

        Raises:
            GymError: ``MODEL_INVALID`` for an architecture without sequence classification.
        """
        import torch
        from transformers import AutoModelForSequenceClassification, set_seed

        settings = copy.deepcopy(model.config)
        settings.num_labels = 1
        settings.get_text_config().pad_token_id = tokenizer.pad_token_id
        try:
            with torch.device("meta"):  # the body of this model is discarded
                scorer = AutoModelForSequenceClassification.from_config(
                    settings, dtype=model.dtype, attn_implementation=settings._attn_implementation
                )
        except ValueError as error:
            reason = f"transformers has no sequence classification for {type(model).__name__}"
            raise GymError(ErrorCode.MODEL_INVALID, reason, "use another model") from error
        setattr(scorer, scorer.base_model_prefix, getattr(model, model.base_model_prefix))
        set_seed(config.seed)
        for name, head in scorer.named_children():
            if name != scorer.base_model_prefix:
                head.to_empty(device="cpu").apply(scorer._init_weights)
        for attribute in _QUANTISED:  # these attributes mark a quantised model
            if hasattr(model, attribute):
                setattr(scorer, attribute, getattr(model, attribute))
        return scorer

    def build(self, job: Job) -> Any:
        from trl import RewardConfig

        from gym_fed.training.algorithms.preference._trainers import RewardMeans

        settings = self.settings(job.config)
        arguments = RewardConfig(**job.arguments(), **settings.model_dump(), max_length=None)
        return build_on_ids(job, RewardMeans, arguments, reference=False)
