"""The trainer of models that read images: TRL's, with batches read from disk and resumable checkpoints."""

from __future__ import annotations

import json
from typing import Any

from transformers.image_utils import load_image
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from gym_fed.base.modeling.loading import load_weights
from gym_fed.data.chat_templates.rendering import vision_template
from gym_fed.training.run.job import Job
from gym_fed.training.trl_glue import local
from gym_fed.training.vision.conversations import ImageLimits

_Sft: Any = SFTTrainer  # their annotations are not relied on
_PER_TOKEN = ("input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids")
"""Columns of a batch with a value per token, ``[n, t]``, padded on the right."""


def build_vision_trainer(job: Job, *, assistant_only: bool) -> Any:
    """Build TRL's ``SFTTrainer`` on rows of ``vision.encode_image_rows``."""
    return local(VisionTrainer)(
        model=job.model,
        args=SFTConfig(**job.arguments(), max_length=None, dataset_kwargs={"skip_prepare_dataset": True}),
        processing_class=job.tokenizer,
        data_collator=ImageBatches(
            job.tokenizer,
            assistant_only=assistant_only,
            limits=ImageLimits.of(job.config),
            max_length=job.config.max_length,
        ),
        callbacks=job.callbacks,
        **job.datasets(),
    )


class VisionTrainer(_Sft):  # type: ignore[misc]
    """A trainer that resumes from checkpoints whose weights have other names than the model's."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load through ``from_pretrained``, which knows both names.

        ``save_pretrained`` writes LLaVA's and others' weights under the names of older releases; transformers' trainer
        then finds none of them in the model, warns, and continues from the initial weights.
        """
        model = model or self.model
        if hasattr(model, "get_base_model"):  # an adapter's names are PEFT's
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        arguments = {"dtype": model.dtype}
        saved = load_weights(type(model), resume_from_checkpoint, arguments, name=resume_from_checkpoint)
        model.load_state_dict(saved.state_dict())


class ImageBatches:
    """Reads the images of a batch for TRL's ``DataCollatorForVisionLanguageModeling``.

    Args:
        processor: The model's processor.
        assistant_only: Label only the assistant's words.
        limits: Minimum and maximum image sizes.
        max_length: Maximum tokens of a row, to which rows are truncated; ``encode_image_rows`` refuses longer images.
    """

    def __init__(
        self,
        processor: Any,
        *,
        assistant_only: bool,
        limits: ImageLimits | None = None,
        max_length: int | None = None,
    ) -> None:
        self._limits = limits or ImageLimits()
        self._max_length = max_length
        self._collator: Any = DataCollatorForVisionLanguageModeling(
            processor=processor,
            assistant_only_loss=assistant_only,
            chat_template=vision_template(processor) if assistant_only else None,
        )

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        batch = self._collator(
            [
                {
                    "messages": json.loads(row["messages"]),
                    "images": [self._limits.fit(load_image(source)) for source in row["images"]],
                }
                for row in rows
            ]
        )
        for key in _PER_TOKEN:
            if key in batch:
                batch[key] = batch[key][:, : self._max_length]
        return batch
