"""Measure how much of a delta survives in a written model: rounding to 16 bits can lose most of a fine-tune.

A weight in bfloat16 has 8 significant bits, so a change below 1/512 of it is rounded away. Changes by LoRA are often
that small. The logits barely move then, and so does the fine-tune's own effect on them: errors are measured against the
delta, not against the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.delta.file import DeltaFile

MIN_KEPT = 0.99
"""Minimum fraction of the delta that a default precision preserves; lower precisions must be requested by name."""
_BLOCK = 1 << 22


class KeptDelta:
    """Accumulates the loss of a delta in a written model, tensor by tensor."""

    def __init__(self) -> None:
        self._lost = self._whole = 0.0

    def add(self, base: Tensor, tuned: Tensor, written: Tensor) -> None:
        """Add a tensor of the base, the exact model and the written model, all with the same shape."""
        flat = [tensor.detach().reshape(-1) for tensor in (base, tuned, written)]
        for at in range(0, flat[0].numel(), _BLOCK):
            old, exact, rounded = (tensor[at : at + _BLOCK].to("cpu").double() for tensor in flat)
            self._whole += float((exact - old).square().sum())
            self._lost += float((rounded - exact).square().sum())

    @property
    def share(self) -> float | None:
        """``1 - |written - tuned| / |tuned - base|`` over all tensors, at least 0; None if nothing changed."""
        return max(0.0, 1.0 - (self._lost / self._whole) ** 0.5) if self._whole else None


def share_kept(base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], dtype: str) -> float | None:
    """Return the fraction of ``tuned - base`` that survives rounding the tuned tensors to ``dtype``.

    Args:
        base: Tensors by name; missing ones are not counted.
        tuned: Tensors by name.
        dtype: ``float32``, ``bfloat16`` or ``float16``.

    Returns:
        As ``KeptDelta.share``.
    """
    import torch

    total = KeptDelta()
    for name, tensor in tuned.items():
        if name in base:  # without the rows of added tokens, which do not change the base
            old, new = base[name], tensor.detach()
            if old.shape != new.shape:
                old, new = (part[: min(len(old), len(new))] for part in (old, new))
            total.add(old, new, new.to(getattr(torch, dtype)))
    return total.share


def share_applied(base: Mapping[str, Tensor], delta: DeltaFile, scale: float = 1.0) -> float | None:
    """Return the fraction of ``scale * delta`` that survives adding it to the base (``apply_delta``).

    Args:
        base: Tensors by name, which also have the dtype of the sums; they are not changed.
        delta: A delta of this base; rows of added tokens are no change of the base.
        scale: Factor of the delta.

    Returns:
        As ``KeptDelta.share``.
    """
    total = KeptDelta()
    for name in delta.names:
        old = base[name].detach().to("cpu")
        change = delta.decode(name).mul_(scale)
        total.add(old, old.double() + change.double(), (old.float() + change).to(old.dtype))
        delta.release(name)
    return total.share


def precise_dtype(stored: str, base: Mapping[str, Tensor], tuned: Mapping[str, Tensor]) -> str:
    """Return the default dtype of a written model: the base's if it preserves the delta, otherwise float32."""
    share = share_kept(base, tuned, stored)
    return stored if share is None or share >= MIN_KEPT else "float32"


def mapped_base(folder: Path, tuned: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """Return the memory-mapped tensors of a base's folder; None if names or shapes differ from the model's.

    A separate output head of the tuned model is not required: the base may share the embeddings' weights.
    """
    from gym_fed.base.modeling.checkpoint import Checkpoint

    checkpoint = Checkpoint.find(folder)
    names = [name for name in tuned if not name.endswith("lm_head.weight")]
    if checkpoint is None or any(checkpoint.shape(name) != tuple(tuned[name].shape) for name in names):
        return None
    return checkpoint.mapped()


def kept_text(share: float | None, dtype: str) -> str:
    """Describe the share, with the remedy if it is low; empty if nothing changed."""
    if share is None:
        return ""
    text = f"keeps {share:.1%} of the delta in {dtype}"
    return text if share >= MIN_KEPT else f"{text}: rounding loses the rest; float32 keeps all of it"
