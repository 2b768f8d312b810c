"""Scale distillation of an update: what a contributor's codec policy asks for, on the contributor's own data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gym_quant import CodecError, Encoded
from gym_quant.distill import Batch, distill_scales
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.encode import Coded, Refine
from gym_fed.errors import ErrorCode, GymError
from gym_fed.quantization.calibration import calibration_batches
from gym_fed.quantization.config import BitDeltaConfig


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
    on_step: Callable[[int, int, float], None] | None = None,
) -> Refine:
    """A refinement for ``encode_delta``, with the learning rates that ``BitDeltaConfig`` has by default.

    Args:
        policy: Its ``distill_steps`` and ``distill_bits`` count.
        model: Of the base's architecture; its own weights do not matter and do not change.
        base: The parameters that the delta is against.
        tuned: The teacher's parameters.
        rows: Calibration text.
        tokenizer: Of the base.
        max_length: Tokens a sequence.
        seed: Of the batches' order.
        on_step: Hears of step, number of steps, and loss; may raise to stop.

    Raises:
        GymError: From the refinement: ``DATA_INVALID`` for rows without content, ``DELTA_INVALID`` when the loss is not
            finite.
    """

    def refine(coded: Coded) -> Mapping[str, Encoded]:
        device = next(iter(model.parameters())).device
        settings = BitDeltaConfig(
            distill_steps=policy.distill_steps,
            distill_bits=policy.distill_bits,
            max_length=max_length,
            seed=seed,
        )
        try:
            return distill_scales(
                model,
                {name: tensor.to(device) for name, tensor in base.items()},
                {name: tensor.to(device) for name, tensor in tuned.items()},
                coded,
                [
                    Batch(b.ids.to(device), b.mask.to(device), b.counted.to(device))
                    for b in calibration_batches(rows, tokenizer, settings)
                ],
                steps=settings.distill_steps,
                lr=settings.distill_lr,
                bit_lr=settings.distill_bits_lr if settings.distill_bits else None,
                loss=settings.distill_loss,
                seed=seed,
                on_step=None
                if on_step is None
                else lambda step, loss: on_step(step, settings.distill_steps, loss),
            ).encoded
        except CodecError as error:
            raise GymError(
                ErrorCode.DELTA_INVALID, f"distillation: {error}", "lower the learning rate"
            ) from error

    return refine
