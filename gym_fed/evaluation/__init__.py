"""How good a model is: held-out loss, exact match, single answers. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "ChatSession": "gym_fed.evaluation.chat",
    "answer": "gym_fed.evaluation.generation",
    "exact_match": "gym_fed.evaluation.generation",
    "generate_batch": "gym_fed.evaluation.generation",
    "heldout_loss": "gym_fed.evaluation.loss",
}
__all__ = ["ChatSession", "answer", "exact_match", "generate_batch", "heldout_loss"]

if TYPE_CHECKING:
    from gym_fed.evaluation.chat import ChatSession
    from gym_fed.evaluation.generation import answer, exact_match, generate_batch
    from gym_fed.evaluation.loss import heldout_loss


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'gym_fed.evaluation' has no attribute {name!r}")
