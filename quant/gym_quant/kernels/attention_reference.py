"""KV cache blocks as tensors, and attention over them in torch: the reference for the native code, and its fallback."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from gym_quant.errors import CodecError

BLOCK_TOKENS = 16
KV_DTYPES = ("float32", "bfloat16", "int8")
_MOST = 127


class PagedLayer:
    """The KV cache blocks of one layer in one byte tensor, read by native code and torch alike.

    A block has one part per key head: keys ``[dim, 16]``, values ``[16, width]`` (``width`` is ``value_dim`` rounded
    up to 16) and, for int8, the float32 scales of 16 keys and 16 values.

    Args:
        num_blocks: Number of blocks.
        kv_heads: Number of key heads.
        dim: A key's dimension.
        value_dim: A value's dimension.
        dtype: One of ``KV_DTYPES``.
        device: The blocks' device.

    Raises:
        CodecError: For an unsupported dtype.
    """

    def __init__(
        self,
        num_blocks: int,
        kv_heads: int,
        dim: int,
        value_dim: int,
        dtype: str,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_bytes = block_bytes(kv_heads, dim, value_dim, dtype)
        self.num_blocks, self.kv_heads, self.dim, self.value_dim, self.dtype = (
            num_blocks,
            kv_heads,
            dim,
            value_dim,
            dtype,
        )
        self.kind = KV_DTYPES.index(dtype)
        self.data = torch.empty(
            num_blocks, kv_heads, self.block_bytes // kv_heads, dtype=torch.uint8, device=device
        )
        width, kind = _width(value_dim), getattr(torch, dtype)
        size = kind.itemsize * BLOCK_TOKENS
        ends = (dim * size, (dim + width) * size, (dim + width) * size + 4 * BLOCK_TOKENS)
        lead = (num_blocks, kv_heads)
        self._keys = self.data[..., : ends[0]].view(kind).view(*lead, dim, BLOCK_TOKENS)
        self._values = self.data[..., ends[0] : ends[1]].view(kind).view(*lead, BLOCK_TOKENS, width)
        self._scales: tuple[Tensor, Tensor] | None = None
        if dtype == "int8":
            self._scales = (
                self.data[..., ends[1] : ends[2]].view(torch.float32),
                self.data[..., ends[2] :].view(torch.float32),
            )

    def append(self, blocks: Sequence[int], length: int, keys: Tensor, values: Tensor) -> None:
        """Write keys ``[new, kv_heads, dim]`` and values ``[new, kv_heads, value_dim]`` after ``length`` tokens."""
        device = self.data.device
        places = torch.arange(length, length + len(keys), device=device)
        numbers = torch.tensor(blocks, device=device)[places // BLOCK_TOKENS]
        slots = places % BLOCK_TOKENS
        if self._scales is not None:
            for held, states in zip(self._scales, (keys, values), strict=True):
                held[numbers, :, slots] = states.to(torch.float32).abs().amax(dim=2) / _MOST
            keys, values = _rounded(keys), _rounded(values)
        self._keys[numbers, :, :, slots] = keys.to(self._keys.dtype)
        self._values[numbers, :, slots, : self.value_dim] = values.to(self._values.dtype)

    def read(self, blocks: Sequence[int], start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Read keys ``[kv_heads, stop - start, dim]`` and values of tokens ``[start, stop)``, as copies."""
        first, last = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        part = slice(start - first * BLOCK_TOKENS, stop - first * BLOCK_TOKENS)
        numbers = torch.tensor(blocks[first:last], dtype=torch.int64, device=self.data.device)
        keys = self._keys[numbers].permute(1, 0, 3, 2).reshape(self.kv_heads, -1, self.dim)[:, part]
        values = self._values[numbers].transpose(0, 1).flatten(1, 2)[:, part, : self.value_dim]
        if self._scales is not None:
            factors = [held[numbers].transpose(0, 1).flatten(1)[:, part, None] for held in self._scales]
            keys, values = keys * factors[0], values * factors[1]
        return keys.to(dtype), values.to(dtype)

    def copy_block(self, source: int, target: int) -> None:
        """Copy block ``source`` to ``target``."""
        self.data[target] = self.data[source]

    def grown(self, num_blocks: int) -> PagedLayer:
        """Return a copy with more blocks appended."""
        grown_layer = PagedLayer(
            num_blocks, self.kv_heads, self.dim, self.value_dim, self.dtype, self.data.device
        )
        grown_layer.data[: self.num_blocks] = self.data
        return grown_layer


def block_bytes(kv_heads: int, dim: int, value_dim: int, dtype: str) -> int:
    """Return the size of a block in bytes.

    Raises:
        CodecError: For a dtype that is not in ``KV_DTYPES``.
    """
    if dtype not in KV_DTYPES:
        raise CodecError(f"KV cache dtype must be {', '.join(KV_DTYPES)}, not {dtype}")
    size = int(getattr(torch, dtype).itemsize)
    scales = 8 * BLOCK_TOKENS if dtype == "int8" else 0
    return kv_heads * (size * BLOCK_TOKENS * (dim + _width(value_dim)) + scales)


def attend(
    layer: PagedLayer,
    spans: Sequence[tuple[int, int, int, array[int]]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    scale: float,
    window: int | None,
) -> None:
    """See ``attention.attend``."""
    groups = query.shape[1] // layer.kv_heads
    for start, stop, length, blocks in spans:
        layer.append(blocks, length, key[start:stop], value[start:stop])
        end = length + stop - start
        keys, values = layer.read(blocks, 0, end, torch.float32)
        places = torch.arange(length, end)[:, None] - torch.arange(end)
        hidden = places < 0 if window is None else (places < 0) | (places >= window)
        queries = query[start:stop].transpose(0, 1).reshape(layer.kv_heads, groups, -1, layer.dim)
        scores = torch.matmul(queries * scale, keys[:, None].transpose(2, 3)).masked_fill(
            hidden, float("-inf")
        )
        result = torch.matmul(torch.softmax(scores, dim=3), values[:, None])
        out[start:stop] = result.flatten(0, 1).transpose(0, 1)


def _width(value_dim: int) -> int:
    return -(-value_dim // 16) * 16


def _rounded(values: Tensor) -> Tensor:
    """Round to int8 with a scale per last dimension (largest magnitude / 127), as float32."""
    wide = values.to(torch.float32)
    most = wide.abs().amax(dim=2, keepdim=True)
    return torch.round(wide * torch.where(most > 0, _MOST / most, 0.0))
