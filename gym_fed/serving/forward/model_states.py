"""The state of requests on the general path: transformers' cache, with one batch row per request.

Requests that are computed in one forward pass share a ``StateBatch``, whose keys are padded on the left to the longest.
A request that is then computed with others is copied into a new batch (``join``); the old one is not changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

_SEQUENCES = ("keys", "values", "indexer_keys")
"""Tensors of a cache layer whose second to last dimension is that of the tokens; all others have a fixed size per
request."""
_CARRIED = ("recurrent_states", "conv1d_state")
"""Attributes in which RecurrentGemma's modules keep state outside the cache."""
_PADDING = 100.0
"""Value of the keys and values of padding, far from 0 so that a model that attends to them fails its trial even in
bfloat16."""
_NODES = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)


@dataclass(eq=False)
class StateBatch:
    """The state after the tokens of some requests.

    Attributes:
        cache: The model's own cache, or its list of tensors (RWKV).
        carried: The state of ``CarriedState``.
        size: The number of requests.
        length: The number of tokens of the longest request.
    """

    cache: Any
    carried: list[Tensor | None]
    size: int
    length: int

    @property
    def attends(self) -> bool:
        """True if the cache has keys and values, which need a mask for padding."""
        layers = getattr(self.cache, "layers", ())
        return any(isinstance(layer, CacheLayerMixin) for layer in layers)

    @property
    def known(self) -> bool:
        """True if the cache consists of transformers' own layers or is a list of tensors, unlike MiniMax's."""
        return type(self.cache) in (DynamicCache, list)

    @property
    def recurrent(self) -> bool:
        """True if it has state in addition to keys and values."""
        layers = getattr(self.cache, "layers", ())
        mixed = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
        return mixed or type(self.cache) is not DynamicCache or bool(self.carried)

    def bytes(self) -> tuple[int, int]:
        """Return the bytes of keys and values, which grow with the tokens, and those of all other state.

        Keys of a sliding window count as growing, although they stop at the window.
        """
        growing = fixed = 0
        for name, tensor in _tensors("", [self.cache, self.carried]):
            if name in _SEQUENCES:
                growing += tensor.nbytes
            else:
                fixed += tensor.nbytes
        return growing, fixed


@dataclass(frozen=True, eq=False)
class StateRow:
    """The state of one request: a row of a batch."""

    batch: StateBatch
    row: int

    def alone(self, length: int) -> StateBatch:
        """Return a batch of only this request, which has ``length`` tokens."""
        return self.batch if self.batch.size == 1 else join([self], [length])


def join(rows: Sequence[StateRow], lengths: Sequence[int]) -> StateBatch:
    """Copy the states of requests into one batch."""
    if rows[0].batch.size == len(rows) and all(
        row.batch is rows[0].batch and row.row == at for at, row in enumerate(rows)
    ):
        return rows[0].batch
    return _joined_batch(rows, lengths)


def copied(row: StateRow, length: int) -> StateRow:
    """Return a copy of one request's state."""
    return StateRow(_joined_batch([row], [length]), 0)


def first_states(row: StateRow, length: int) -> list[Tensor]:
    """Return one request's state in the first layer of each kind, where rounding errors have not accumulated."""
    batch = copied(row, length).batch
    layers = {type(layer): layer for layer in reversed(getattr(batch.cache, "layers", ()))}
    others = (
        [value for name, value in vars(batch.cache).items() if name != "layers"] if layers else batch.cache
    )
    return [tensor for _, tensor in _tensors("", [list(layers.values()), others, batch.carried[:2]])]


def _joined_batch(rows: Sequence[StateRow], lengths: Sequence[int]) -> StateBatch:
    length = max(lengths)
    cache = _joined("", [row.batch.cache for row in rows], rows, lengths)
    carried = _joined("", [row.batch.carried for row in rows], rows, lengths)
    return StateBatch(cache, carried, len(rows), length)


def _joined(name: str, values: list[Any], rows: Sequence[StateRow], lengths: Sequence[int]) -> Any:
    """Join one attribute of the caches, given its value for each request."""
    first = values[0]
    if isinstance(first, Tensor):
        if first.ndim == 0 or first.shape[0] != rows[0].batch.size:
            return first  # the same for all requests, or empty
        parts = [value[row.row : row.row + 1] for value, row in zip(values, rows, strict=True)]
        if name in _SEQUENCES:
            counts = [min(length, part.shape[-2]) for part, length in zip(parts, lengths, strict=True)]
            parts = [
                functional.pad(
                    part[..., part.shape[-2] - count :, :], (0, 0, max(counts) - count, 0), value=_PADDING
                )
                for part, count in zip(parts, counts, strict=True)
            ]
        return torch.cat(parts)
    if name == "cumulative_length":
        return max(lengths)
    if isinstance(first, dict):
        return {key: _joined(str(key), [value[key] for value in values], rows, lengths) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_joined("", list(each), rows, lengths) for each in zip(*values, strict=True))
    if isinstance(first, _NODES):
        joined = copy.copy(first)
        for key in vars(first):
            setattr(joined, key, _joined(key, [getattr(value, key) for value in values], rows, lengths))
        return joined
    if any(True for _ in _tensors("", list(getattr(first, "__dict__", {}).values()))):
        raise TypeError(f"a cache with a {type(first).__name__} cannot be copied")
    return first


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors("", each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors("", each)
    elif isinstance(value, _NODES):
        for key, each in vars(value).items():
            yield from _tensors(key, each)


class CarriedState:
    """The state that modules of one model keep in attributes, which is exchanged with every forward."""

    def __init__(self, model: nn.Module) -> None:
        self._locations = [(m, name) for m in model.modules() for name in _CARRIED if name in vars(m)]

    def put(self, carried: Sequence[Tensor | None] | None) -> None:
        """Set the state; None is the state of an empty text."""
        for at, (module, name) in enumerate(self._locations):
            setattr(module, name, None if carried is None else carried[at])

    def take(self) -> list[Tensor | None]:
        """Return the state, and reset it."""
        carried = [getattr(module, name) for module, name in self._locations]
        self.put(None)
        return carried
