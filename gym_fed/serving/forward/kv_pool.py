"""The KV cache: keys and values of all requests in blocks of 16 tokens, and each request's own table of blocks.

A request takes a block when its tokens need one, and gives all back when it ends. So what a request may need at most
is not set aside, requests with the same beginning can share its blocks (``branch``, ``prefix_cache``), and no block is
ever moved. A block that is shared is never written to: who writes into its middle takes a copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from gym_quant.kernels.attention import BLOCK_TOKENS

from gym_fed.serving.forward.kv_blocks import KVBlocks, LayerShape
from gym_fed.serving.forward.kv_cache import KVCache

__all__ = ["KVPool", "LayerShape"]


class KVPool(KVBlocks):
    """Blocks of one model, of which requests make their caches; arguments and errors are those of ``KVBlocks``."""

    def new_cache(self, prefix: Sequence[int] = ()) -> KVCache:
        """A cache for one request, which begins with these full blocks."""
        for block in prefix:
            self.share(block)
        return KVCache(self, array("i", prefix), BLOCK_TOKENS * len(prefix))
