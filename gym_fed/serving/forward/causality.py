"""Check that no token of a model attends to later ones, which comparing logits in bfloat16 would not reveal."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.serving.forward.model_arguments import text_arguments
from gym_fed.serving.forward.trial import tokens

_log = logging.getLogger(__name__)
_SEEN = 3


def require_causal(model: Any) -> None:
    """Refuse a model whose logits depend on later tokens, by their gradient, which is exactly 0 in a causal model.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    embedded: list[Tensor] = []

    def watch(_module: Any, _args: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0].clone()  # CTRL multiplies its embedding's output in place

    embedding = model.get_input_embeddings()
    ids = torch.tensor(tokens(embedding.weight.shape[0]), device=embedding.weight.device)
    hook = embedding.register_forward_hook(watch)
    try:
        with torch.enable_grad():
            logits = model(**text_arguments(model, ids)).logits
            (gradient,) = torch.autograd.grad(logits[0, :_SEEN].float().sum(), embedded[:1])
    except Exception as error:  # noqa: BLE001 - a model's own kernels may have no gradients
        _log.warning(
            "%s has no gradients (%s): comparing only its logits", type(model).__name__, plain(error, 100)
        )
        return
    finally:
        hook.remove()
    if bool((gradient[0, _SEEN:].abs() > 0).any()):
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{type(model).__name__} cannot be served: its tokens attend to later ones",
            "if it was trained as a decoder, set is_decoder: true in its config.json",
        )
