"""Batch calibration text as token ids, and distil the scales of encoded deltas on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from gym_quant.codec import CodecError, Encoded
from gym_quant.distill import Batch, distill_scales
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.encoding import IGNORED, encode_rows
from gym_fed.data.string_rows import as_turns
from gym_fed.delta.encode import Coded, Refine
from gym_fed.quantization.config import Calibration
from gym_fed.quantization.report import DistillReport

CalibrationText: TypeAlias = "Sequence[str] | Sequence[dict[str, Any]] | Tensor"
"""Texts, rows of ``load_rows`` (``text`` or ``messages``), or token ids ``[n, t]`` int64 without padding."""


def calibration_batches(
    calibration: CalibrationText, tokenizer: Any, config: Calibration, device: Any = "cpu"
) -> list[Batch]:
    """Tokenise calibration text.

    Texts are joined and cut into sequences, with a loss on all tokens. Conversations are padded, not joined, with a
    loss on the assistant's words. At most ``calibration_samples`` sequences are used, evenly spaced.

    Raises:
        GymError: ``USAGE`` for text without a tokenizer; ``DATA_INVALID`` if no token has a label.
    """
    sequences = _sequences(calibration, tokenizer, config.max_length)
    count = min(len(sequences), config.calibration_samples)
    chosen = [sequences[i * len(sequences) // count] for i in range(count)]
    size = config.distill_batch
    batches = (_batch(chosen[at : at + size]) for at in range(0, count, size))
    return [Batch(b.ids.to(device), b.mask.to(device), b.counted.to(device)) for b in batches]


def plain_sequences(batches: Sequence[Batch]) -> list[Tensor]:
    """Split batches into unpadded sequences: ``[1, t]`` or, if nothing is padded, ``[b, t]``."""
    sequences: list[Tensor] = []
    for batch in batches:
        if bool(batch.mask.all()):
            sequences.append(batch.ids)
        else:
            sequences += [ids[mask][None] for ids, mask in zip(batch.ids, batch.mask, strict=True)]
    return sequences


def _sequences(calibration: CalibrationText, tokenizer: Any, max_length: int) -> list[tuple[Tensor, Tensor]]:
    """Return the ids and labels of each sequence, ``[t]`` int64."""
    if isinstance(calibration, Tensor):
        if (
            calibration.ndim != 2
            or calibration.dtype != torch.int64
            or calibration.shape[0] < 1
            or calibration.shape[1] < 2
        ):
            reason = f"calibration is a tensor {list(calibration.shape)} {calibration.dtype}"
            remedy = "pass token ids as [sequences, tokens] int64, or texts, or rows"
            raise GymError(ErrorCode.DATA_INVALID, reason, remedy)
        cut = calibration[:, :max_length]
        return [(row, row) for row in cut]
    rows = [{"text": row} if isinstance(row, str) else row for row in calibration]
    if tokenizer is None:
        reason = "calibration is text, but there is no tokenizer"
        remedy = "pass tokenizer=..., the base by name, or calibration as token ids"
        raise GymError(ErrorCode.USAGE, reason, remedy)
    if not rows:
        raise GymError(ErrorCode.DATA_INVALID, "calibration has no rows", "pass at least one text")
    rows = as_turns(tokenizer, rows)
    texts = [row for row in rows if "messages" not in row]
    chats = [row for row in rows if "messages" in row]
    encoded = encode_rows(tokenizer, texts, max_length=max_length, packing=True) if texts else []
    if len(encoded) > 1 and len(encoded[-1]["input_ids"]) < max_length:
        encoded.pop()
    encoded += encode_rows(tokenizer, chats, max_length=max_length) if chats else []
    return [(torch.tensor(row["input_ids"]), torch.tensor(row["labels"])) for row in encoded]


def _batch(sequences: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    width = max(len(ids) for ids, _ in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    counted = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, (tokens, labels) in enumerate(sequences):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = True
        counted[row, : len(tokens) - 1] = labels[1:] != IGNORED
    return Batch(ids, mask, counted)


OnStep = Callable[[int, int, float], None]
"""Called with the step, the number of steps and the loss; may raise to stop."""


def distiller(
    policy: CodecPolicy,
    model: Any,
    base: Mapping[str, Tensor],
    tuned: Mapping[str, Tensor],
    rows: Sequence[dict[str, Any]],
    tokenizer: Any,
    *,
    max_length: int,
    seed: int,
    on_step: OnStep | None = None,
) -> Refine:
    """Create a refinement for ``encode_delta`` with the default learning rates of ``Calibration``.

    Args:
        policy: Policy whose ``distill_steps`` and ``distill_bits`` are used.
        model: A model of the base's architecture; its weights are neither used nor changed.
        base: Parameters of the base.
        tuned: Parameters of the teacher.
        rows: Calibration text.
        tokenizer: The base's tokenizer.
        max_length: Tokens per sequence.
        seed: Seed of the batches' order.
        on_step: See ``OnStep``.

    Raises:
        GymError: From the refinement: ``DATA_INVALID`` for rows without content, ``DELTA_INVALID`` if the loss is not
            finite.
    """
    settings = Calibration(
        distill_steps=policy.distill_steps, distill_bits=policy.distill_bits, max_length=max_length, seed=seed
    )
    device = next(iter(model.parameters())).device
    return Distiller(
        settings,
        model,
        {name: tensor.to(device) for name, tensor in base.items()},
        {name: tensor.to(device) for name, tensor in tuned.items()},
        lambda: calibration_batches(rows, tokenizer, settings, device),
        on_step,
    )


class Distiller:
    """A callable that distils its input and stores the ``report``; see ``distiller``, which creates it."""

    def __init__(
        self,
        settings: Calibration,
        model: Any,
        base: Mapping[str, Tensor],
        tuned: Mapping[str, Tensor],
        batches: Callable[[], Sequence[Batch]],
        on_step: OnStep | None = None,
    ) -> None:
        self._settings, self._model, self._base, self._tuned = settings, model, base, tuned
        self._batches, self._on_step = batches, on_step
        self.report: DistillReport | None = None

    def __call__(self, coded: Coded) -> Mapping[str, Encoded]:
        settings, on_step, began = self._settings, self._on_step, time.monotonic()
        try:
            distilled = distill_scales(
                self._model,
                self._base,
                self._tuned,
                coded,
                self._batches(),
                steps=settings.distill_steps,
                lr=settings.distill_lr,
                bit_lr=settings.distill_bits_lr if settings.distill_bits else None,
                loss=settings.distill_loss,
                seed=settings.seed,
                on_step=on_step and (lambda step, loss: on_step(step, settings.distill_steps, loss)),
            )
        except CodecError as error:
            raise GymError(
                ErrorCode.DELTA_INVALID, f"distillation: {error}", "check distill_lr and the calibration text"
            ) from error
        self.report = DistillReport(
            settings.distill_loss,
            settings.distill_steps,
            distilled.num_scales,
            distilled.flipped,
            distilled.loss_before,
            distilled.loss_after,
            time.monotonic() - began,
        )
        return distilled.encoded
