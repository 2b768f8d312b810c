"""Reward models with a value head, as saved by LLaMA-Factory and older TRL trainers.

``value_head.safetensors`` has ``v_head.summary.weight`` ``[1, width]`` and ``v_head.summary.bias`` ``[1]``. The score
is the head's value at the last token.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gym_fed.core.errors import ErrorCode, GymError

HEAD = "value_head.safetensors"
_NAMES = ("v_head.summary.weight", "v_head.summary.bias")


class ValueHeadModel(torch.nn.Module):
    """A language model with a value head, with the interface of a single-label classifier: ``logits`` ``[n, 1]``."""

    def __init__(self, model: Any, head: torch.nn.Linear) -> None:
        super().__init__()
        self.model, self.head = model, head
        self.config = model.config

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """Return the values at the last tokens; padding is on the right."""
        model: Any = self.model
        hidden = model(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False
        ).hidden_states[-1]
        last = hidden[torch.arange(len(hidden), device=hidden.device), attention_mask.sum(-1) - 1]
        return SimpleNamespace(logits=self.head(last.float()))


def load_value_head_model(name: str, folder: Path, dtype: str) -> ValueHeadModel:
    """Load the model ``name``, with the value head in its ``folder`` in float32.

    Raises:
        GymError: ``MODEL_INVALID`` for a head with missing tensors, the wrong width, or values that are not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from gym_fed.base.models import load_model

    model = load_model(name, dtype=dtype).model
    width = int(model.config.get_text_config().hidden_size)
    try:
        tensors = load_file(folder / HEAD)
        weight, bias = (tensors[key].float() for key in _NAMES)
        if weight.shape != (1, width) or bias.shape != (1,):
            raise ValueError(
                f"its shapes are {list(weight.shape)} and {list(bias.shape)}, not [1, {width}] and [1]"
            )
        if not (weight.isfinite().all() and bias.isfinite().all()):
            raise ValueError("it has values that are not finite")
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{folder / HEAD} is not a value head of this model: {error}",
            "use the folder that belongs to this head",
        ) from error
    head = torch.nn.Linear(width, 1)
    head.load_state_dict({"weight": weight, "bias": bias})
    return ValueHeadModel(model, head)
