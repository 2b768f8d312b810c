"""Attention of one request by torch: where there is no native code, and for capped scores, sinks, and a GPU."""

from __future__ import annotations

import torch
from gym_quant.kernels.attention import PagedLayer
from torch import Tensor
from torch.nn import functional

from gym_fed.serving.forward.kv_cache import KVCache

Masks = dict[tuple[int, int, int, int | None], Tensor]
"""By tokens, keys, query heads of a key head, and window."""


def attend_by_torch(
    layer: PagedLayer,
    cache: KVCache,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    masks: Masks,
) -> Tensor:
    """As ``attention.attend``, of one request; ``masks`` are kept for all layers of a step."""
    count, length = len(query), cache.length + len(query)
    layer.append(cache.blocks, cache.length, key, value)
    start = 0 if window is None else max(0, length - window - count + 1)  # no query sees what is before
    keys, values = layer.read(cache.blocks, start, length, query.dtype)
    # Query heads that share a key head are stacked along the positions, so that no key is repeated.
    grouped = query.transpose(0, 1).reshape(len(keys), -1, query.shape[-1])
    mask = None
    if count > 1:
        mask = _mask(masks, count, length - start, grouped.shape[1] // count, window, query)
    if softcap is None and sinks is None:
        found = functional.scaled_dot_product_attention(
            grouped[None], keys[None], values[None], attn_mask=mask, scale=scale
        )[0]
    else:
        found = _by_hand(grouped, keys, values, mask, scale, softcap, sinks)
    # [kv_heads, heads / kv_heads * count, dim] to [count, heads, dim]
    return found.reshape(-1, count, found.shape[-1]).transpose(0, 1)


def _mask(masks: Masks, count: int, length: int, groups: int, window: int | None, like: Tensor) -> Tensor:
    """``[groups * count, length]``, 0 where query i (at ``length - count + i``) may see a key and -inf elsewhere."""
    key = (count, length, groups, window)
    mask = masks.get(key)
    if mask is None:
        distance = torch.arange(length - count, length, device=like.device)[:, None] - torch.arange(
            length, device=like.device
        )
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        mask = torch.zeros(count, length, dtype=like.dtype, device=like.device)
        mask = mask.masked_fill_(hidden, float("-inf")).repeat(groups, 1)
        masks[key] = mask
    return mask


def _by_hand(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """With capped scores (Gemma 2) or a learned sink per head (gpt-oss), which SDPA lacks; softmax in float32."""
    scores = torch.matmul(query, keys.transpose(1, 2)).to(torch.float32) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        per_head = sinks.reshape(len(keys), -1)
        column = per_head.repeat_interleave(query.shape[1] // per_head.shape[1], dim=1)[:, :, None]
        weights = torch.softmax(torch.cat([scores, column.to(scores.dtype)], dim=2), dim=2)[:, :, :-1]
    else:
        weights = torch.softmax(scores, dim=2)
    return torch.matmul(weights.to(values.dtype), values)
