"""S2-Attn, the shifted sparse attention of LongLoRA (Chen et al. 2023, section 3.2 and algorithm 1).

A row is split into groups. Half of the heads attend within them, the other half within groups shifted by half a
group, which connects adjacent groups. The paper rolls the row around its end, so that the last group sees the first
tokens and needs a mask against this leak. Here the shifted groups begin with half a group instead, so every token
attends only to earlier tokens of its own group. The cost is ``length * group`` instead of ``length ** 2``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F


def group_size(length: int, ratio: float) -> int:
    """Return the tokens per group: the fraction ``ratio`` of a row, at least 2."""
    return max(2, math.ceil(length * ratio))


def shifted_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor | None,
    *,
    size: int,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute causal attention within groups, which are shifted for the second half of the heads.

    Args:
        query: ``[batch, heads, length, d]``.
        key: ``[batch, heads, length, d]``, with shared heads repeated.
        value: ``[batch, heads, length, d]``, with shared heads repeated.
        allowed: ``[batch, 1, length, length]`` bool, True where a query may attend; None for causal attention without
            padding.
        size: Number of tokens in a group.
        scaling: Factor of the logits; None for ``1 / sqrt(d)``.
        dropout: Dropout rate of the attention weights.

    Returns:
        ``[batch, heads, length, d]``.
    """
    half = query.shape[1] // 2
    parts = []
    for heads, offset in ((slice(0, half), 0), (slice(half, None), size // 2)):
        if query[:, heads].shape[1]:  # with a single head, the first half is empty
            parts.append(
                _in_groups(
                    query[:, heads], key[:, heads], value[:, heads], allowed, size, offset, scaling, dropout
                )
            )
    return torch.cat(parts, dim=1)


def _in_groups(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor | None,
    size: int,
    offset: int,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Compute attention for half of the heads, with group boundaries at ``offset + n * size``."""
    batch, heads, length, width = query.shape
    left = (size - offset) % size
    right = -(left + length) % size
    groups = (left + length + right) // size

    def fold(states: torch.Tensor) -> torch.Tensor:
        padded = F.pad(states, (0, 0, left, right))
        return padded.view(batch, heads, groups, size, width).transpose(1, 2).flatten(0, 1)

    causal = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
    if allowed is None:
        real = F.pad(torch.ones(length, dtype=torch.bool, device=query.device), (left, right))
        mask = (causal & real.view(groups, 1, size)).unsqueeze(0)
    else:
        wide = F.pad(allowed[:, 0], (left, right, left, right), value=False)
        blocks = wide.view(allowed.shape[0], groups, size, groups, size)
        mask = torch.diagonal(blocks, dim1=1, dim2=3).movedim(-1, 1) & causal
    # Padding tokens that attend to nothing would give NaN. They attend to themselves, and their output is dropped.
    mask = mask | torch.eye(size, dtype=torch.bool, device=query.device)
    mask = mask.expand(batch, groups, size, size).flatten(0, 1).unsqueeze(1)
    out = F.scaled_dot_product_attention(
        fold(query), fold(key), fold(value), attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    unfolded = out.view(batch, groups, heads, size, width).transpose(1, 2).flatten(2, 3)
    return unfolded[:, :, left : left + length]


def register_shift_attention(ratio: float) -> str:
    """Register the attention with transformers and return its name.

    In training mode a model attends within groups; in evaluation mode or with a cache, it attends fully, using SDPA.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        length = query.shape[2]
        if not module.training or key.shape[2] != length:
            full: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
            return full
        shared = query.shape[1] // key.shape[1]
        out = shifted_attention(
            query,
            repeat_kv(key, shared),
            repeat_kv(value, shared),
            attention_mask,
            size=group_size(length, ratio),
            scaling=scaling,
            dropout=dropout,
        )
        return out.transpose(1, 2).contiguous(), None

    name = f"gym_shift_attention_{ratio}"
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name
