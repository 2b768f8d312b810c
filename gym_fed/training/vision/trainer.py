"""Train models that read media with TRL's ``SFTTrainer``, on batches whose media are read from disk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from inspect import signature
from typing import Any

import torch
from trl import SFTConfig, SFTTrainer

from gym_fed.base.modeling.loading import load_weights
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.row_counts import IGNORED
from gym_fed.data.rows import MEDIA
from gym_fed.training.run.job import Job
from gym_fed.training.trl_glue import local
from gym_fed.training.vision.labels import batch_labels
from gym_fed.training.vision.media import ImageLimits, MediaProcessor

_Sft: Any = SFTTrainer  # typed as Any, since TRL's annotations are unreliable
_PER_TOKEN = ("input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids")
"""Columns of a batch with one value per token, ``[n, t]``, padded on the right."""


def build_vision_trainer(job: Job) -> Any:
    """Build TRL's ``SFTTrainer`` on rows of ``encode_media_rows``.

    Raises:
        GymError: ``DATA_INVALID`` for a row without media, if the model's forward pass requires them (BLIP).
    """
    datasets = job.datasets()
    if required := _required_inputs(job.model):
        for rows in filter(None, datasets.values()):
            _require_media(rows["row"], required)
    return local(VisionTrainer)(
        model=job.model,
        args=SFTConfig(
            **job.arguments(),
            max_length=None,
            remove_unused_columns=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        processing_class=job.tokenizer,
        data_collator=media_batches(job),
        callbacks=job.callbacks,
        **datasets,
    )


def _required_inputs(model: Any) -> list[str]:
    """Return the arguments besides the token ids that a model's forward pass requires."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return [
        name
        for name, value in signature(type(base).forward).parameters.items()
        if value.default is value.empty
        and value.kind is value.POSITIONAL_OR_KEYWORD
        and name not in ("self", "input_ids")
    ]


def _require_media(rows: Iterable[str], required: list[str]) -> None:
    for number, row in enumerate(rows, 1):
        values = json.loads(row)
        if not any(values.get(column) for column in MEDIA):
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"row {number} has no media, but the model needs {', '.join(required)} for each row",
                "drop rows without images or audio, or train another model",
            )


def media_batches(job: Job) -> MediaBatches:
    """Return the collator of a run."""
    return MediaBatches(
        job.tokenizer,
        limits=ImageLimits.of(job.config),
        max_length=job.config.max_length,
        dtype=job.model.dtype,
    )


class VisionTrainer(_Sft):  # type: ignore[misc]
    """A trainer that can resume from checkpoints whose weight names differ from the model's."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint with ``from_pretrained``, which converts the names of weights.

        ``save_pretrained`` writes the weights of LLaVA and other models under the names of older releases.
        transformers' trainer would not find them in the model, warn, and continue from the initial weights.
        """
        model = model or self.model
        if hasattr(model, "get_base_model"):  # PEFT determines the weight names of an adapter
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        arguments = {"dtype": model.dtype}
        saved = load_weights(type(model), resume_from_checkpoint, arguments, name=resume_from_checkpoint)
        model.load_state_dict(saved.state_dict())


class MediaBatches:
    """Collates rows of ``encode_media_rows``: reads their media, and returns the model's inputs with labels.

    Args:
        processor: The model's processor.
        limits: Minimum and maximum image sizes.
        max_length: Number of tokens to which rows are truncated; ``encode_media_rows`` refuses rows with media beyond
            it.
        dtype: The model's dtype, for processors that always round their inputs (Llama 4).
    """

    def __init__(
        self,
        processor: Any,
        *,
        limits: ImageLimits | None = None,
        max_length: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._media = MediaProcessor(processor, limits)
        self._max_length, self._dtype = max_length, dtype

    def __call__(self, encoded: list[dict[str, Any]]) -> Any:
        rows = [json.loads(each["row"]) for each in encoded]
        batch = self._media.inputs(rows)
        learned, _ = batch_labels(self._media.processor.tokenizer, batch, rows)
        labels = torch.full_like(batch["input_ids"], IGNORED)
        for row, values in zip(labels, learned, strict=True):
            row[: len(values)] = torch.tensor(values)
        batch["labels"] = labels
        for key in _PER_TOKEN:
            if key in batch:
                batch[key] = batch[key][:, : self._max_length]
        for key, value in batch.items():
            if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
                batch[key] = value.to(self._dtype)
        return batch
