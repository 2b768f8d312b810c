"""Attention of a packed step: every request's tokens attend to that request's own cache, and to nothing else.

Registered with transformers' ``AttentionInterface``. A name without a mask function gets no mask from the model
(``masking_utils``), so this module applies causality and sliding windows itself, one request at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.forward.padded import BatchAttention

_SMALLEST = 16


class KVCache:
    """Keys and values of one request's tokens. ``MultiVariantModel.new_cache`` makes one; only a step writes to it.

    Args:
        capacity_hint: Tokens for which memory is allocated at first; it grows when they are exceeded.
    """

    def __init__(self, capacity_hint: int = _SMALLEST) -> None:
        self._capacity = max(_SMALLEST, capacity_hint)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens in the cache: the position of the next one."""
        return self._length

    @property
    def capacity(self) -> int:
        """Tokens that fit before the next growth."""
        return self._capacity

    @property
    def bytes(self) -> int:
        """Allocated memory, including the part that is not filled yet."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers.values())

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens."""
        wanted = self._length + tokens
        if wanted <= self._capacity:
            return
        while self._capacity < wanted:
            self._capacity *= 2
        for number, (keys, values) in self._layers.items():
            self._layers[number] = (self._grown(keys), self._grown(values))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens' keys and values (``[kv_heads, new, dim]``); room is reserved already.

        They count only after ``advance``, so that a step that failed can be repeated.

        Returns:
            All keys ``[kv_heads, length + new, dim]`` and values of the layer, as views.
        """
        held = self._layers.get(layer)
        if held is None:
            held = (self._empty(keys), self._empty(values))
            self._layers[layer] = held
        stop = self._length + keys.shape[1]
        held[0][:, self._length : stop] = keys
        held[1][:, self._length : stop] = values
        return held[0][:, :stop], held[1][:, :stop]

    def advance(self, tokens: int) -> None:
        """Count the tokens of a step that has succeeded."""
        self._length += tokens

    def truncate(self, length: int) -> None:
        """Drop all tokens from this position on.

        Raises:
            ValueError: For a position beyond the last.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"length {length} is not from 0 to {self._length}")
        self._length = length

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer that count, as views where that is possible."""
        keys, values = self._layers[layer]
        return keys[:, : self._length], values[:, : self._length]

    def branch(self, tokens: int) -> KVCache:
        """A cache for another text with the same beginning, with memory for so many tokens behind it.

        The beginning is read from this one, which must not be truncated below it while the branch is in use.
        """
        return _Branch(self, tokens)

    def _empty(self, like: Tensor) -> Tensor:
        heads, _, dim = like.shape
        return torch.empty(heads, self._capacity, dim, dtype=like.dtype, device=like.device)

    def _grown(self, old: Tensor) -> Tensor:
        new = self._empty(old)
        new[:, : self._length] = old[:, : self._length]
        return new


class _Branch(KVCache):
    """A cache that keeps only what follows the beginning that it shares.

    Args:
        beginning: Holds the beginning: its tokens of now.
        capacity_hint: Tokens behind it.
    """

    def __init__(self, beginning: KVCache, capacity_hint: int) -> None:
        super().__init__(capacity_hint)
        self._beginning = beginning
        self._shared = beginning.length

    @property
    def length(self) -> int:
        return self._shared + self._length

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        own = super().write(layer, keys, values)
        return self._behind_beginning(layer, own)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._behind_beginning(layer, super().read(layer))

    def truncate(self, length: int) -> None:
        super().truncate(length - self._shared)

    def _behind_beginning(self, layer: int, own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        keys, values = self._beginning.read(layer)
        return (
            torch.cat((keys[:, : self._shared], own[0]), dim=1),
            torch.cat((values[:, : self._shared], own[1]), dim=1),
        )


NAME = "gym_fed_packed"
_KNOWN = frozenset(
    # Ignored: masks are made below; the others concern training, other backends, or the recording of outputs.
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


@dataclass
class PackedTokens:
    """Where each request's tokens are in the packed sequence, and its cache."""

    spans: Sequence[tuple[int, int, KVCache]]
    """First token, token after the last, cache; in order, without gaps."""

    windows: dict[int, int | None] = field(default_factory=dict)
    """Sliding window that the model passed for every layer that attended."""

    masks: dict[tuple[int, int, int, int | None], Tensor] = field(default_factory=dict)

    batch: BatchAttention | None = None
    """In the place of ``spans``."""

    plain: bool = True
    """Whether no layer capped its scores, had sinks, or a sliding window."""


_current: ContextVar[PackedTokens | None] = ContextVar("gym_fed_packed_tokens", default=None)


@contextmanager
def packed(tokens: PackedTokens) -> Iterator[None]:
    """Attention within the block is over these tokens."""
    token = _current.set(tokens)
    try:
        yield
    finally:
        _current.reset(token)


def register() -> None:
    """Register ``NAME`` with transformers; may be called repeatedly."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


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
    """Attention over ``packed`` tokens, with transformers' signature.

    Query is ``[1, heads, tokens, dim]``, key and value are ``[1, kv_heads, tokens, dim]``.

    Returns:
        ``[1, tokens, heads, value_dim]``, and no weights.

    Raises:
        GymError: ``USAGE`` outside a step; ``MODEL_INVALID`` for arguments that would be ignored.
    """
    tokens = _current.get()
    if tokens is None:
        raise GymError(
            ErrorCode.USAGE,
            "the model is being served, so its forward needs a packed step",
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
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    tokens.windows[layer] = sliding_window
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts: list[Tensor] = []
    plain = softcap is None and s_aux is None
    tokens.plain = tokens.plain and plain and sliding_window is None
    keys_new, values_new, queries = key[0], value[0], query[0]
    if tokens.batch is not None:
        return tokens.batch.attend(layer, queries, keys_new, values_new, scale)[None], None
    for start, stop, cache in tokens.spans:
        count = stop - start
        keys, values = cache.write(layer, keys_new[:, start:stop], values_new[:, start:stop])
        kv_heads, length = keys.shape[0], keys.shape[1]
        if sliding_window is not None and length > sliding_window + count - 1:  # no query sees what is before
            length = sliding_window + count - 1
            keys, values = keys[:, -length:], values[:, -length:]
        # Query heads that share a key head are stacked along the positions, so that no key is repeated.
        grouped = queries[:, start:stop].reshape(kv_heads, -1, queries.shape[-1])
        mask = None
        if count > 1:
            mask = _mask(tokens, count, length, grouped.shape[1] // count, sliding_window, query)
        if plain:
            found = functional.scaled_dot_product_attention(
                grouped[None], keys[None], values[None], attn_mask=mask, scale=scale
            )[0]
        else:
            found = _by_hand(grouped, keys, values, mask, scale, softcap, s_aux)
        # [kv_heads, heads / kv_heads * count, dim] to [count, heads, dim]
        parts.append(found.reshape(-1, count, found.shape[-1]).transpose(0, 1))
    return torch.cat(parts)[None], None


def _mask(
    tokens: PackedTokens, count: int, length: int, groups: int, window: int | None, like: Tensor
) -> Tensor:
    """``[groups * count, length]``, 0 where query i (at ``length - count + i``) may see a key and -inf elsewhere."""
    key = (count, length, groups, window)
    mask = tokens.masks.get(key)
    if mask is None:
        distance = torch.arange(length - count, length, device=like.device)[:, None] - torch.arange(
            length, device=like.device
        )
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        mask = torch.zeros(count, length, dtype=like.dtype, device=like.device)
        mask = mask.masked_fill_(hidden, float("-inf")).repeat(groups, 1)
        tokens.masks[key] = mask
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
