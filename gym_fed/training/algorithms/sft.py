"""Supervised fine-tuning: next-token loss on the assistant's messages (conversations) or on all tokens (texts).

Models that read images learn conversations with pictures; see ``gym_fed.training.vision.conversations``.
"""

from __future__ import annotations

from typing import Any, Literal

from gym_fed.base.modeling.processors import is_processor
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core import console
from gym_fed.core.errors import refuse_first
from gym_fed.data.chat_templates.conversation import REASONING_KEYS
from gym_fed.data.encoding import encode_rows
from gym_fed.data.row_counts import EncodedRows
from gym_fed.data.rows import Row
from gym_fed.training.algorithms._token_losses import (
    anchored,
    check_token_loss,
    is_anchored,
    loss_arguments,
    require_plain_loss,
    routed,
)
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.model.reference import copy_at_start, named_reference
from gym_fed.training.rows.packing import pack_best_fit
from gym_fed.training.run.job import Job
from gym_fed.training.vision.conversations import (
    encode_image_rows,
    require_no_images,
)


class Sft(Algorithm):
    """SFT by TRL's ``SFTTrainer`` on rows that are tokenised here, so that nothing is cached or mapped by processes."""

    packs = True
    per_example = True
    shards = True
    uses_model_loss = True
    reads_images = True
    federates = True
    takes_reference = True
    tried = (
        "every method, optimiser and feature; pictures: LLaVA, full and LoRA, and Qwen2-VL without its part for films; "
        "two processes; federated rounds"
    )
    untried = "Qwen2-VL as it is (needs torchvision)"

    @classmethod
    def beside(cls, config: TrainingConfig, *, adapted: bool) -> tuple[int, int]:
        return (int(is_anchored(config)), 0)

    @classmethod
    def logits(cls, config: TrainingConfig) -> Literal["tiled", "whole", "none"]:
        own = loss_arguments(config)[1]
        return super().logits(config) if own is None and config.privacy is None else "whole"

    def check(self, config: TrainingConfig) -> None:
        check_token_loss(config)

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[dict[str, Any]]:
        assistant_only, packing = self.assistant_only(config), self.packing(config)
        if is_processor(tokenizer):
            require_plain_loss(config)
            reason = "privacy: models that read images are not tried with gradients of single examples"
            refuse_first((config.privacy is not None, reason, "use a model of text alone"))
            return encode_image_rows(
                config, tokenizer, rows, assistant_only=assistant_only, packing=bool(packing)
            )
        require_no_images(rows)
        _report_dropped_reasoning(config, rows)
        if self.assistant_only_default and not assistant_only and config.assistant_only_loss is None:
            _warn_of_learned_prompts(rows)
        encoded = encode_rows(
            tokenizer,
            rows,
            max_length=config.max_length,
            assistant_only=assistant_only,
            packing=packing is True,
            keep_all=config.privacy is not None,
            mask_history=config.mask_history,
            reasoning=config.reasoning,
        )
        joined = pack_best_fit(encoded, config.max_length) if packing == "bfd" else encoded
        return EncodedRows(({**row, "length": len(row["input_ids"])} for row in joined), encoded.counts)

    def build(self, job: Job) -> Any:
        from trl import SFTConfig, SFTTrainer

        from gym_fed.training.trl_glue import local

        if is_processor(job.tokenizer):
            from gym_fed.training.vision.trainer import build_vision_trainer

            return build_vision_trainer(job, assistant_only=self.assistant_only(job.config))
        named, loss = loss_arguments(job.config)
        arguments = SFTConfig(
            **job.arguments(),
            **named,
            # Packed rows have their length already, and are in one row of tokens without padding.
            max_length=None if job.config.packing == "bfd" else job.config.max_length,
            padding_free=job.config.packing == "bfd",
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        if job.config.privacy is not None:
            from gym_fed.training.private.loop import prepared, private

            return prepared(self._made(local(private(SFTTrainer)), job, arguments), job)
        if not is_anchored(job.config):
            return self._made(local(routed(SFTTrainer)), job, arguments, compute_loss_func=loss)
        anchor = named_reference(job.config, job.model) or copy_at_start(job.model)
        trainer = self._made(local(anchored(routed(SFTTrainer))), job, arguments, compute_loss_func=loss)
        trainer.anchor = anchor
        return trainer

    def _made(self, trainer: Any, job: Job, arguments: Any, **more: Any) -> Any:
        return trainer(
            model=job.model,
            args=arguments,
            processing_class=job.tokenizer,
            callbacks=job.callbacks,
            **job.datasets(),
            **more,
        )

    def packing(self, config: TrainingConfig) -> bool | Literal["bfd"]:
        default = self.packing_default and not self.assistant_only(config)
        return default if config.packing is None else config.packing

    def assistant_only(self, config: TrainingConfig) -> bool:
        """Return True if prompts are not learned."""
        return _or(config.assistant_only_loss, self.assistant_only_default and config.packing is not True)


def _report_dropped_reasoning(config: TrainingConfig, rows: list[Row]) -> None:
    if config.reasoning == "learn":
        return
    count = sum(
        any(message.get(key) for message in row.get("messages", ()) for key in REASONING_KEYS) for row in rows
    )
    if count:
        console.err.print(
            f"reasoning: {config.reasoning}: {count} of {len(rows)} rows are learned without it"
        )


def _warn_of_learned_prompts(rows: list[Row]) -> None:
    """Warn that ``packing: true`` alone reverses the default of ``assistant_only_loss``, so that prompts are
    learned."""
    count = sum("text" not in row for row in rows)
    if count:
        console.err.print(
            f"warning: packing: true learns the prompts of {count} of {len(rows)} rows, too; packing: bfd learns the "
            "answers alone, and train_on_prompt: true says that prompts are meant"
        )


def _or(value: bool | None, default: bool) -> bool:
    return default if value is None else value
