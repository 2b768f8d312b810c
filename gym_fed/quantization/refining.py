"""Scale distillation of encoded deltas: what a codec policy asks for, on text of one's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gym_quant.codec import CodecError, Encoded
from gym_quant.distill import Batch, distill_scales
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.encode import Coded, Refine
from gym_fed.errors import ErrorCode, GymError
from gym_fed.quantization.calibration import calibration_batches
from gym_fed.quantization.config import Calibration
from gym_fed.quantization.report import DistillReport

OnStep = Callable[[int, int, float], None]
"""Hears of step, number of steps, and loss; may raise to stop."""


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
    """A refinement for ``encode_delta``, with the learning rates that ``Calibration`` has by default.

    Args:
        policy: Its ``distill_steps`` and ``distill_bits`` count.
        model: Of the base's architecture; its own weights do not matter and do not change.
        base: The parameters that the delta is against.
        tuned: The teacher's parameters.
        rows: Calibration text.
        tokenizer: Of the base.
        max_length: Tokens a sequence.
        seed: Of the batches' order.
        on_step: See ``OnStep``.

    Raises:
        GymError: From the refinement: ``DATA_INVALID`` for rows without content, ``DELTA_INVALID`` when the loss is not
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
    """Distils what it is called with, and keeps the ``report`` of that; arguments as for ``distiller``."""

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
            found = distill_scales(
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
                ErrorCode.DELTA_INVALID, f"distillation: {error}", "lower the learning rate, distill_lr"
            ) from error
        self.report = DistillReport(
            settings.distill_loss,
            settings.distill_steps,
            found.num_scales,
            found.flipped,
            found.loss_before,
            found.loss_after,
            time.monotonic() - began,
        )
        return found.encoded
