"""Supervised fine-tuning: next-token loss on the assistant's messages (conversations) or on all tokens (texts).

Models that read images, sound or video also learn from conversations with media; see ``gym_fed.training.vision``. Of
the other losses (``sft.loss_type``), TRL computes DFT; EAFT and ASFT are defined here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

from gym_fed.base.modeling.processors import is_processor
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.core.text import counted
from gym_fed.data.chat_templates.conversation import REASONING_KEYS
from gym_fed.data.encoding import iter_encoded
from gym_fed.data.row_counts import IGNORED, EncodedRows, RowCounts
from gym_fed.data.rows import Row
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.model.reference import copy_at_start, has_named_reference, named_reference
from gym_fed.training.rows.packing import pack_best_fit
from gym_fed.training.run.job import Job
from gym_fed.training.vision.conversations import encode_media_rows, without_media

if TYPE_CHECKING:
    from torch import Tensor


_Trainer: Any = object  # typed as Any, since a mix-in uses attributes of its trainer

_TOP_TOKENS = 20
"""Number of most likely tokens that approximate the whole distribution, as in the EAFT paper."""


class Sft(Algorithm):
    """SFT with TRL's ``SFTTrainer`` on rows that are already tokenised, without TRL's cache and worker processes."""

    packs = True
    streams = True
    per_example = True
    shards = True
    splits_rows = True
    pipelines = True
    uses_model_loss = True
    reads_images = True
    federates = True
    takes_reference = True
    tried = (
        "every method, optimiser and feature; images, audio and video with tiny models of ten classes; two processes; "
        "federated rounds"
    )

    @classmethod
    def beside(cls, config: TrainingConfig, *, adapted: bool) -> tuple[int, int]:
        return (int(uses_anchor(config)), 0)

    @classmethod
    def logits(cls, config: TrainingConfig) -> Literal["tiled", "whole", "none"]:
        own = loss_arguments(config)[1]
        return super().logits(config) if own is None and config.privacy is None else "whole"

    def check(self, config: TrainingConfig) -> None:
        check_token_loss(config)

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[dict[str, Any]]:
        if is_processor(tokenizer):
            require_plain_loss(config)
            reason = "privacy: per-example gradients are not tested with models that read images or audio"
            refuse_first((config.privacy is not None, reason, "use a text-only model"))
            options = {"assistant_only": self.assistant_only(config), "packing": bool(self.packing(config))}
            return encode_media_rows(config, tokenizer, rows, **options)
        counts = RowCounts()
        encoded = EncodedRows(self._encode_each(config, tokenizer, rows, counts), counts)
        if not encoded:
            raise counts.nothing_learned(config.max_length)
        return encoded

    def encode_each(
        self, config: TrainingConfig, tokenizer: Any, rows: Iterable[Row], counts: RowCounts
    ) -> Iterator[dict[str, Any]] | None:
        return None if is_processor(tokenizer) else self._encode_each(config, tokenizer, rows, counts)

    def _encode_each(
        self, config: TrainingConfig, tokenizer: Any, rows: Iterable[Row], counts: RowCounts
    ) -> Iterator[dict[str, Any]]:
        packing = self.packing(config)
        row_notes = _RowNotes()
        encoded = iter_encoded(
            tokenizer,
            row_notes.watched(without_media(rows)),
            max_length=config.max_length,
            assistant_only=self.assistant_only(config),
            packing=packing is True,
            keep_all=config.privacy is not None,
            counts=counts,
            mask_history=config.mask_history,
            reasoning=config.reasoning,
        )
        for row in pack_best_fit(encoded, config.max_length) if packing == "bfd" else encoded:
            yield {**row, "length": len(row["input_ids"])}
        by_default = self.assistant_only_default and config.assistant_only_loss is None
        counts.notes += row_notes.notes(config, learns_prompts=by_default and not self.assistant_only(config))

    def build(self, job: Job) -> Any:
        from trl import SFTConfig, SFTTrainer

        from gym_fed.training.trl_glue import local

        if is_processor(job.tokenizer):
            from gym_fed.training.vision.trainer import build_vision_trainer

            return build_vision_trainer(job)
        named, loss = loss_arguments(job.config)
        arguments = SFTConfig(
            **job.arguments(),
            **named,
            # Packed rows have their final length and need no padding.
            max_length=None if job.config.packing == "bfd" else job.config.max_length,
            padding_free=job.config.packing == "bfd",
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        if job.config.privacy is not None:
            from gym_fed.training.private.loop import attach_plan, private

            return attach_plan(self._create(local(private(SFTTrainer)), job, arguments), job)
        if not uses_anchor(job.config):
            return self._create(local(routed(SFTTrainer)), job, arguments, compute_loss_func=loss)
        anchor = named_reference(job.config, job.model) or copy_at_start(job.model)
        trainer = self._create(local(anchored(routed(SFTTrainer))), job, arguments, compute_loss_func=loss)
        trainer.anchor = anchor
        return trainer

    def _create(self, trainer: Any, job: Job, arguments: Any, **more: Any) -> Any:
        from gym_fed.training.rows.streamed import follow_stream

        built = trainer(
            model=job.model,
            args=arguments,
            processing_class=job.tokenizer,
            callbacks=job.callbacks,
            **job.datasets(),
            **more,
        )
        follow_stream(built, job.encoded)
        return built

    def packing(self, config: TrainingConfig) -> bool | Literal["bfd"]:
        default = self.packing_default and not self.assistant_only(config)
        return default if config.packing is None else config.packing

    def assistant_only(self, config: TrainingConfig) -> bool:
        """Return True if prompts are excluded from the loss."""
        if config.assistant_only_loss is not None:
            return config.assistant_only_loss
        return self.assistant_only_default and config.packing is not True


class _RowNotes:
    """Counts the rows that are encoded, for notes about them."""

    def __init__(self) -> None:
        self._rows, self._reasoning, self._no_text = 0, 0, 0

    def watched(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Count and yield the rows."""
        for row in rows:
            self._rows += 1
            self._no_text += "text" not in row
            messages = row.get("messages", ())
            self._reasoning += any(message.get(key) for message in messages for key in REASONING_KEYS)
            yield row

    def notes(self, config: TrainingConfig, *, learns_prompts: bool) -> list[str]:
        """Return notes about dropped reasoning, and about prompts that are learned only because of ``packing``."""
        notes, rows = [], counted(self._rows, "row")
        if config.reasoning != "learn" and self._reasoning:
            every = counted(self._rows, "row", "are")
            notes.append(f"reasoning: {config.reasoning}: {self._reasoning} of {every} trained on without it")
        if learns_prompts and self._no_text:
            notes.append(
                f"warning: packing: true also trains on the prompts of {self._no_text} of {rows}; to train only on "
                "the answers, set packing: bfd; if prompts are intended, set train_on_prompt: true"
            )
        return notes


def check_token_loss(config: TrainingConfig) -> None:
    """Refuse a loss other than ``nll`` if the run would not compute it."""
    named = "reference_model" if config.reference_model else "reference_adapter"
    changed, strategy = _changed(config), config.distributed_strategy
    unused = f"{named}: {config.algorithm} does not use a reference model with this loss"
    split = f"sft.loss_type: asft needs a second model, but {strategy} can shard only one"
    conflict = next((key for key in ("privacy", "mixture_of_depths", "liger") if getattr(config, key)), None)
    ignored = has_named_reference(config) and not uses_anchor(config)
    refuse_first(
        (ignored, unused, f"set sft.loss_type: asft, or remove {named}"),
        (uses_anchor(config) and strategy != "ddp", split, "use distributed.strategy: ddp, or dft"),
        (
            changed and conflict,
            f"sft.{changed} cannot be combined with {conflict}, which has its own loss",
            f"remove sft.{changed}, or {conflict}",
        ),
    )


def require_plain_loss(config: TrainingConfig) -> None:
    """Refuse a loss other than ``nll`` for a model that reads images or sound."""
    key = _changed(config)
    reason = f"sft.{key}: models that read images or audio are trained with nll"
    refuse_first((key, reason, f"remove sft.{key}"))


def loss_arguments(config: TrainingConfig) -> tuple[dict[str, Any], Callable[..., Any] | None]:
    """Return keyword arguments for ``trl.SFTConfig``, and the ``compute_loss_func`` for its trainer."""
    settings = config.sft
    if settings is None:
        return {}, None
    if settings.loss_type == "eaft":
        return {}, partial(entropy_adaptive_loss, alpha=settings.eaft_alpha)
    if settings.loss_type == "asft":
        return {}, partial(anchored_loss, alpha=settings.asft_alpha)
    return {"loss_type": settings.loss_type, "label_smoothing_factor": settings.label_smoothing}, None


def entropy_adaptive_loss(
    outputs: Any, labels: Tensor, num_items_in_batch: Any = None, *, alpha: float = 1.0
) -> Tensor:
    """Return ``- sum_t (H_t / ln K)^alpha log p(y_t)`` over the labelled tokens, divided by their number.

    ``H_t`` is the entropy of the ``K = 20`` most likely tokens, renormalised, without a gradient. Labels that
    contradict a confident model therefore have little weight. Diao et al. 2026, "Entropy-Adaptive Fine-Tuning".

    Args:
        outputs: The model's outputs, with ``logits`` ``[n, t, v]``.
        labels: ``[n, t]``; -100 is ignored.
        num_items_in_batch: Number of labelled tokens in the whole step; by default in this batch.
        alpha: Exponent of the weight.
    """
    import torch
    from torch.nn.functional import cross_entropy

    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:].to(outputs.logits.device)
    with torch.no_grad():
        count = min(_TOP_TOKENS, logits.shape[-1])
        top = logits.topk(count).values.log_softmax(-1)
        weights = (-(top.exp() * top).sum(-1) / math.log(count)).clamp(min=0) ** alpha
    losses = cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    number = (targets != IGNORED).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss: Tensor = (losses * weights).sum() / number
    return loss


def anchored_loss(
    outputs: Any,
    labels: Tensor,
    num_items_in_batch: Any = None,
    *,
    reference_logits: Tensor,
    alpha: float = 0.1,
) -> Tensor:
    """Return ``sum_t -p_t log p_t + alpha KL(reference || policy)`` over the labelled tokens, divided by their number.

    ``p_t`` is the probability of the label; the factor ``p_t`` has no gradient (DFT). Zhu et al. 2025, "Anchored
    Supervised Fine-Tuning". The divergence has the direction that the paper's code and LLaMA-Factory use.

    Args:
        outputs: The model's outputs, with ``logits`` ``[n, t, v]``.
        labels: ``[n, t]``; -100 is ignored.
        num_items_in_batch: Number of labelled tokens in the whole step; by default in this batch.
        reference_logits: ``[n, t, v]`` logits of the frozen model.
        alpha: Weight of the divergence.
    """
    learned = labels[:, 1:].to(outputs.logits.device) != IGNORED
    targets = labels[:, 1:].to(outputs.logits.device)[learned]
    policy = outputs.logits[:, :-1][learned].float().log_softmax(-1)
    reference = reference_logits[:, :-1][learned].float().log_softmax(-1)
    log_probs = policy.gather(-1, targets[:, None])[:, 0]
    divergence = (reference.exp() * (reference - policy)).sum(-1)
    number = learned.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss: Tensor = (-log_probs.detach().exp() * log_probs + alpha * divergence).sum() / number
    return loss


def uses_anchor(config: TrainingConfig) -> bool:
    """Return True if the loss compares the model with a frozen copy."""
    return config.sft is not None and config.sft.loss_type == "asft"


class _Anchored(_Trainer):  # type: ignore[misc]
    """A mix-in for TRL trainers that passes the logits of the frozen model ``anchor`` to ``compute_loss_func``."""

    anchor: Any
    compute_loss_func: Any

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        import torch

        loss = self.compute_loss_func
        with torch.no_grad():
            unlabelled = {key: value for key, value in inputs.items() if key != "labels"}
            logits = self.anchor(**unlabelled, use_cache=False).logits
        self.compute_loss_func = partial(loss, reference_logits=logits)
        try:
            return super().compute_loss(model, inputs, *args, **more)
        finally:
            self.compute_loss_func = loss


class _Routed(_Trainer):  # type: ignore[misc]
    """A mix-in for TRL trainers that adds the router loss of a mixture of experts to a custom loss.

    TRL adds ``router_aux_loss_coef`` times the router loss only to losses that it computes itself.
    """

    compute_loss_func: Any
    label_smoother: Any

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        name = "label_smoother" if self.compute_loss_func is None else "compute_loss_func"
        own, routers = getattr(self, name), []

        def watched(outputs: Any, *args: Any, **more: Any) -> Any:
            if self.aux_loss_enabled:
                routers.append(outputs.aux_loss)
            return own(outputs, *args, **more)

        setattr(self, name, own and watched)
        try:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            setattr(self, name, own)
        # A mean over batches, as in TRL. With num_items_in_batch, transformers does not divide by the number of
        # batches.
        steps = 1 if num_items_in_batch is None else self.current_gradient_accumulation_steps
        more = sum(self.router_aux_loss_coef * router / steps for router in routers)
        return (loss[0] + more, loss[1]) if return_outputs else loss + more


@cache
def routed(trainer: type) -> type:
    """Return a TRL trainer class whose custom losses include the router loss of a mixture of experts."""
    return type(trainer.__name__, (_Routed, trainer), {"__doc__": trainer.__doc__})


@cache
def anchored(trainer: type) -> type:
    """Return a TRL trainer class whose loss compares the model with ``anchor``, a frozen model."""
    return type(trainer.__name__, (_Anchored, trainer), {"__doc__": trainer.__doc__})


def _changed(config: TrainingConfig) -> str | None:
    """Return the key in the ``sft`` section that changes the loss; None if none does."""
    if config.sft is None:
        return None
    if config.sft.loss_type != "nll":
        return "loss_type"
    return "label_smoothing" if config.sft.label_smoothing else None
