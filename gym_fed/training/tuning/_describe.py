"""How many weights are trained, in words."""

from __future__ import annotations

from typing import Any


def describe_trainable(model: Any) -> str:
    """Such as ``2,144 of 8,896 weights are trained (24.1 %)``; weights in few bits count as the weights they stand for.

    Args:
        model: A prepared model, or a PEFT model around one.
    """
    trained, total = count_trainable(model)
    return f"{trained:,} of {total:,} weights are trained ({100 * trained / total:.3g} %)"


def count_trainable(model: Any) -> tuple[int, int]:
    """``(trained, all)``; shared weights count once, the packed ones of bitsandbytes as what they were."""
    trained = total = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        count = parameter.numel()
        if state is not None and parameter.element_size() == 1 and len(state.shape) == 2:
            count = state.shape[0] * state.shape[1]
        total += count
        trained += count if parameter.requires_grad else 0
    return trained, total
