"""Compute attention of packed tokens over a paged KV cache; each request attends to its own blocks.

A layer's cache consists of blocks of 16 tokens (``PagedLayer``). A request's block table lists the blocks of its tokens
in order (``PagedSpans``, built once for all layers of a step). Values are float32, bfloat16, or int8 with a scale per
token and head; sums are float32. A row's result depends only on its own request, not on the path, the number of threads
or the split of a prompt into chunks: each sum has a fixed order, from the first token on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels import attention_reference, dispatch, native
from gym_quant.kernels.attention_reference import BLOCK_TOKENS, KV_DTYPES, PagedLayer

__all__ = ["BLOCK_TOKENS", "KV_DTYPES", "PagedLayer", "PagedSpans", "attend"]

Span = tuple[int, int, int, "array[int]"]
"""A request's first row, row after the last, number of earlier tokens in the cache, and block table
(``array("i")``)."""


class PagedSpans:
    """The requests of a step.

    Args:
        spans: In order, without gaps. Their block tables have room for the new tokens and must not change while this
            is in use.

    Raises:
        CodecError: For rows with gaps, and for a block table that is too short or has another type.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = tuple(spans)
        self.rows = 0
        self._most = -1
        for start, stop, length, blocks in self.spans:
            if start != self.rows or stop <= start:
                raise CodecError(f"rows {start} to {stop} do not follow row {self.rows}")
            num_blocks = -(-(length + stop - start) // BLOCK_TOKENS)
            if blocks.typecode != "i" or length < 0 or len(blocks) < num_blocks:
                raise CodecError(
                    f"rows {start} to {stop} after {length} tokens need a table (array 'i') of {num_blocks} blocks"
                )
            if min(blocks) < 0:
                raise CodecError(f"rows {start} to {stop}: a block number is negative")
            self._most = max(self._most, max(blocks))
            self.rows = stop
        self._table = np.array([(a, b, n, t.buffer_info()[0]) for a, b, n, t in self.spans], dtype=np.int64)
        self._address = int(self._table.ctypes.data)

    def table_for(self, layer: PagedLayer) -> tuple[int, int]:
        """Return the address and number of spans for native code.

        Raises:
            CodecError: For a block that the layer does not have.
        """
        if self._most >= layer.num_blocks:
            raise CodecError(f"there is no block {self._most}: the cache has {layer.num_blocks}")
        return self._address, len(self.spans)


def attend(
    layer: PagedLayer,
    spans: PagedSpans,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> None:
    """Append the rows' keys and values to their requests' blocks and attend to them causally.

    The last two dimensions of all tensors are contiguous; rows may be strided, as in a fused projection.

    Args:
        layer: The layer's cache, on the CPU.
        spans: The rows' requests.
        query: ``[rows, heads, dim] float32``; ``heads`` is a multiple of ``kv_heads``, and adjacent heads share a key
            head.
        key: ``[rows, kv_heads, dim] float32``.
        value: ``[rows, kv_heads, value_dim] float32``.
        out: ``[rows, heads, value_dim] float32``, the output.
        scale: Factor of the scores before the softmax.
        window: Number of tokens to which a token attends, including itself; None for all up to it.

    Raises:
        CodecError: For unsupported shapes and dtypes.
    """
    shapes = (spans.rows, query.shape[1], layer.dim), (spans.rows, layer.kv_heads, layer.dim)
    if query.shape != shapes[0] or key.shape != shapes[1] or query.shape[1] % layer.kv_heads:
        raise _refusal(layer, spans, query, key)
    if value.shape != (spans.rows, layer.kv_heads, layer.value_dim) or out.shape != (
        *query.shape[:2],
        layer.value_dim,
    ):
        raise _refusal(layer, spans, value, out)
    for tensor in (query, key, value, out):
        apart = (
            tensor.shape[1] > 1 and tensor.stride(1) != tensor.shape[2]
        )  # the stride of a single head means nothing
        if tensor.dtype != torch.float32 or tensor.stride(2) != 1 or apart:
            raise CodecError("attention needs float32 tensors with contiguous heads")
    if window is not None and window < 1:
        raise CodecError(f"a window of {window} tokens shows no token")
    path = dispatch.path()
    if path == "torch":
        attention_reference.attend(layer, spans.spans, query, key, value, out, scale, window)
    else:
        native.attend(
            path,
            (query, key, value, out),
            spans.table_for(layer),
            layer.data,
            layer.kind,
            (query.shape[1], layer.kv_heads, layer.dim, layer.value_dim),
            scale,
            window or 0,
        )


def _refusal(layer: PagedLayer, spans: PagedSpans, *tensors: Tensor) -> CodecError:
    shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
    return CodecError(
        f"{shapes} do not fit {spans.rows} rows and {layer.kv_heads} key heads of {layer.dim} and {layer.value_dim}"
    )
