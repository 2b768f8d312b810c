"""Compute the attention of a packed step, in which tokens attend only to the blocks of their own request.

``attend`` is the entry point. It uses native code on the CPU, and torch in all other cases (capped scores, sinks, a
GPU). ``packed_attention`` adapts it to transformers' ``AttentionInterface``. transformers creates no mask for a name
without a mask function (``masking_utils``), so this module applies causality and sliding windows itself, one request at
a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from gym_quant.kernels import attention as paged
from gym_quant.kernels.attention import PagedLayer
from torch import Tensor, nn
from torch.nn import functional

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward.chunk import Masks, PackedTokens
from gym_fed.serving.forward.kv_cache import KVCache, LayerShape

NAME = "gym_fed_packed"
_KNOWN = frozenset(
    # These are ignored: masks are built below, and the others are for training, other backends, or recording outputs.
    (
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
        "cache_position",
        "layer_idx",
        "deterministic",
        "return_dict",
        "logits_to_keep",
    )
)


_current: ContextVar[PackedTokens | None] = ContextVar("gym_fed_packed_tokens", default=None)


@contextmanager
def packed(tokens: PackedTokens) -> Iterator[None]:
    """Use these tokens in all attention within the block."""
    token = _current.set(tokens)
    try:
        yield
    finally:
        _current.reset(token)


def register() -> None:
    """Register ``NAME`` with transformers; may be called repeatedly."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def attend(
    tokens: PackedTokens,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Append the tokens' keys and values to the caches of their requests, and attend to the caches.

    Appended tokens count only after ``KVCache.advance``, so a failed step can be repeated.

    Args:
        tokens: The tokens of the step.
        layer: The layer's number.
        query: ``[tokens, heads, dim]``; adjacent heads share a key head. Query, key and value may be strided views.
        key: ``[tokens, kv_heads, dim]``.
        value: ``[tokens, kv_heads, value_dim]``.
        scale: The scale of the scores.
        window: The number of tokens that a token attends to, itself included.
        softcap: The bound of the scores (Gemma 2).
        sinks: A learned score per head that takes weight from all tokens (gpt-oss).
        out: The output buffer, ``[tokens, heads, value_dim] float32``.

    Returns:
        ``[tokens, heads, value_dim]`` in the query's dtype, or ``out``.
    """
    plain = softcap is None and sinks is None
    tokens.windows[layer] = window
    tokens.plain = tokens.plain and plain and window is None
    if tokens.batch is not None:
        turned = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        return _into(out, tokens.batch.attend(layer, *turned, scale))
    pool = tokens.spans[0][2].pool
    held = pool.layer(layer, LayerShape(key.shape[1], key.shape[2], value.shape[2]))
    if plain and tokens.native and query.device.type == "cpu":
        shape = *query.shape[:2], value.shape[2]
        into = torch.empty(shape, dtype=torch.float32) if out is None else out
        paged.attend(
            held, tokens.tables, _dense(query), _dense(key), _dense(value), into, scale=scale, window=window
        )
        return into.to(query.dtype) if out is None else out
    parts = [
        attend_by_torch(held, cache, rows[0], rows[1], rows[2], scale, window, softcap, sinks, tokens.masks)
        for a, b, cache in tokens.spans
        for rows in [(query[a:b], key[a:b], value[a:b])]
    ]
    return _into(out, torch.cat(parts))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention over ``packed`` tokens, with transformers' signature.

    Query is ``[1, heads, tokens, dim]``, key and value are ``[1, kv_heads, tokens, dim]``.

    Returns:
        ``[1, tokens, heads, value_dim]``, and None for the weights.

    Raises:
        GymError: ``USAGE`` outside a step; ``MODEL_INVALID`` for arguments that would be ignored.
    """
    tokens = _current.get()
    if tokens is None:
        raise GymError(
            ErrorCode.USAGE,
            "the model is being served, so its forward pass needs a packed step",
            "call MultiVariantModel.step, or close the MultiVariantModel first",
        )
    unknown = sorted(k for k, v in kwargs.items() if k not in _KNOWN and v is not None and v is not False)
    if unknown or attention_mask is not None or kwargs.get("is_causal") is False:
        arguments = ", ".join(unknown) or (
            "attention_mask" if attention_mask is not None else "is_causal=False"
        )
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"the model's attention passes {arguments}, which serving does not support",
        )
    if query.shape[0] != 1:
        raise GymError(ErrorCode.MODEL_INVALID, "the model's attention splits the packed sequence")
    output = attend(
        tokens,
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output[None], None


def _dense(part: Tensor) -> Tensor:
    """Convert to the layout of the native code: float32, with contiguous heads."""
    part = part.to(torch.float32)
    return part if part.stride(2) == 1 and part.stride(1) == part.shape[2] else part.contiguous()


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


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
    """Attend for one request as ``attend`` does; ``masks`` are reused by all layers of a step."""
    count, length = len(query), cache.length + len(query)
    layer.append(cache.blocks, cache.length, key, value)
    # No query attends to keys before the window.
    start = 0 if window is None else max(0, length - window - count + 1)
    keys, values = layer.read(cache.blocks, start, length, query.dtype)
    # Query heads that share a key head are stacked along the positions, so that keys need not be repeated.
    grouped = query.transpose(0, 1).reshape(len(keys), -1, query.shape[-1])
    mask = None
    if count > 1:
        mask = _mask(masks, count, length - start, grouped.shape[1] // count, window, query)
    if softcap is None and sinks is None:
        output = functional.scaled_dot_product_attention(
            grouped[None], keys[None], values[None], attn_mask=mask, scale=scale
        )[0]
    else:
        output = _by_hand(grouped, keys, values, mask, scale, softcap, sinks)
    # [kv_heads, heads / kv_heads * count, dim] to [count, heads, dim]
    return output.reshape(-1, count, output.shape[-1]).transpose(0, 1)


def _mask(masks: Masks, count: int, length: int, groups: int, window: int | None, like: Tensor) -> Tensor:
    """Return a mask ``[groups * count, length]``: 0 where query i (at ``length - count + i``) sees a key, else -inf."""
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
    """Attend with capped scores (Gemma 2) or learned sinks (gpt-oss), which SDPA lacks; softmax in float32."""
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
