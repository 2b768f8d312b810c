"""A causal LM that serves requests of different variants in one forward, in any mix of prefill and decode.

All tokens of a step are one packed sequence: ``attention`` keeps the requests apart, and rows get their own variants.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from gym_quant.kernels import dispatch
from gym_quant.kernels.attention import BLOCK_TOKENS
from torch import Tensor

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward import attention, trial
from gym_fed.serving.forward.chunk import Chunk, PackedTokens, packed_tokens
from gym_fed.serving.forward.decoder import Decoder
from gym_fed.serving.forward.hooked import HookedForward
from gym_fed.serving.forward.kv_cache import KVCache, KVPool
from gym_fed.serving.forward.packed_base import PackedBase
from gym_fed.serving.forward.padded import BatchAttention
from gym_fed.serving.forward.plain_model import PlainModel, plain_layout
from gym_fed.serving.forward.segments import StepVariants
from gym_fed.serving.forward.target_modules import ModelLayout
from gym_fed.serving.forward.trial import base_format_for, kernel_for, prepare
from gym_fed.serving.forward.variant_weights import LoadedVariant

_log = logging.getLogger(__name__)
_FORWARDS = {"decoder": 0, "transformers": 0}


class MultiVariantModel:
    """A model that is served until ``close``; one thread at a time. Its weights are never written to.

    Steps are computed by ``Decoder`` if it supports the model's class, otherwise by transformers' forward, which
    also computes everything that is merged or batched together.

    Args:
        model: A transformers causal LM in float32 or bfloat16.
        kernel: The kernel for sign deltas: ``exact`` (float32), or by tables of 8 or 16 bits, ``lookup`` and
            ``lookup16`` (CPU only), which multiply evenly spaced levels too; ``auto``: see ``trial.kernel_for``.
        base_format: The format of the linear layers: one of ``gym_quant.linear``, which frees the model's own weights,
            also after ``close``; ``auto``: see ``trial.base_format_for``. None: the model's own weights.
        kv_dtype: The type of the KV cache: ``float32``, ``bfloat16``, ``int8``, or ``auto``, the weights' own.
        packed_base: The file of the layers in ``base_format``.

    Attributes:
        base_format: The format of the linear layers in memory.
        packed: Whether the layers are packed, so that the model's own weights are gone.
        forwards: Number of steps by implementation.
        products: Multiplications of a layer's packed deltas by form (``gym_quant.resident.Resident.form``) and kernel.
            ``decoded`` counts forms that the kernel does not multiply, and long prompts under ``exact``, for which
            deltas are decoded for a dense product.
        attends_plainly: Whether no layer caps its scores, has sinks or a sliding window, as of the last step.
        pool: The blocks of ``new_cache``; it grows as needed.

    Raises:
        GymError: ``MODEL_INVALID``, with the reason, for a model that packed steps cannot compute; ``USAGE`` if it is
            already being served.
    """

    def __init__(
        self,
        model: Any,
        *,
        kernel: Literal["auto", "exact", "lookup", "lookup16"] = "exact",
        base_format: str | None = None,
        kv_dtype: str = "auto",
        packed_base: PackedBase | None = None,
    ) -> None:
        trial.require_servable(model, chosen := kernel_for(kernel, base_format, model))
        self.model = model.eval()
        plain = isinstance(model, PlainModel)
        self.layout = (plain_layout if plain else ModelLayout.of)(model, chosen)
        self.forwards = Counter(_FORWARDS)
        self._variants = StepVariants(self.layout)
        self.products = self._variants.products
        self._decoder: Decoder | None = None
        self.attends_plainly, self.packed, self.base_format = False, False, self.layout.dtype
        self.vocabulary = len(model.get_input_embeddings().weight)
        self._device = torch.device(self.layout.device)
        name, why_not = type(model).__name__, trial.unfit(model)
        self.pool = KVPool(dtype=self.layout.dtype if why_not else "float32", device=self._device)
        self._windows: dict[int, int | None] = {}
        with nullcontext() if why_not else trial.in_float32(model):
            stock = None if plain else trial.transformers_logits(model)
        self._hooked = None if plain else HookedForward(model, self.layout)
        setattr(model, trial.MARK, True)
        try:
            if self._hooked is not None and stock is not None:
                with nullcontext() if why_not else trial.in_float32(model):
                    trial.require_same(self, stock)
                trial.require_windows(model, self._windows)
            if not why_not:
                self._decoder = Decoder(model, self.layout, self._windows)
            packed = base_format and base_format_for(base_format, self.layout.dtype, why_not, name)
            if self._decoder is not None:
                prepare(self, self._decoder, stock, packed or None, packed_base)
                self.packed, self.base_format = bool(packed), packed or self.base_format
            kv_dtype = self.layout.dtype if kv_dtype == "auto" else kv_dtype
            self.pool = KVPool(dtype=kv_dtype, shapes=self.pool.shapes, device=self._device)
        except BaseException:
            self.close()
            raise
        self.forwards = Counter(_FORWARDS)  # without those of the trial
        how = self.forward + (why_not and f", as {why_not}")
        _log.info("%s: steps by %s; linear layers in %s", name, how, self.base_format)

    def close(self) -> None:
        """Restore the model."""
        if getattr(self.model, trial.MARK, False):
            delattr(self.model, trial.MARK)
            if self._hooked is not None:
                self._hooked.close()
            self._variants.release()

    def __enter__(self) -> MultiVariantModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sign_products(self) -> dict[str, int]:
        """The number of ``products`` of sign deltas, by kernel."""
        return self._variants.sign_products()

    @property
    def packed_products(self) -> dict[str, int]:
        """The number of ``products`` of all other packed deltas, by form."""
        return self._variants.packed_products()

    def new_cache(self) -> KVCache:
        """Create an empty cache for one request, with blocks of ``pool``."""
        return self.pool.new_cache()

    def new_pool(self, bytes_limit: int | None = None) -> KVPool:
        """Create a separate pool of blocks.

        Raises:
            GymError: ``CONFIG_INVALID`` for a limit below one block.
        """
        return KVPool(bytes_limit, dtype=self.pool.dtype, shapes=self.pool.shapes, device=self._device)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in the KV cache."""
        return self.pool.block_bytes // BLOCK_TOKENS

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk], *, merge: bool = False) -> Tensor:
        """Run all chunks in one forward.

        Args:
            chunks: The chunks, each with its own cache.
            merge: Whether to multiply base and delta at once (``MergedWeights``) if all chunks have one variant. Not
                for serving: the last bits of an answer would depend on the other requests.

        Returns:
            Logits ``[rows, vocabulary]`` float32: the ``Chunk.rows`` of every chunk, in order. A broken variant
            changes only its own rows, which may be NaN.

        Raises:
            GymError: ``USAGE`` for an empty chunk, for more logits than a chunk has tokens, for two chunks with the
                same cache, and for a variant that was loaded for a different kernel. The caches are unchanged then.
        """
        ends, tokens = packed_tokens(chunks)
        ids = [token for chunk in chunks for token in chunk.token_ids]
        positions = [p for c in chunks for p in range(c.cache.length, c.cache.length + len(c.token_ids))]
        logit_rows = [
            at for chunk, end in zip(chunks, ends, strict=True) for at in range(end - chunk.rows, end)
        ]
        rows = self._variants.rows([(c.variant, len(c.token_ids), c.rows) for c in chunks], merge)
        if self._hooked is not None and (self._decoder is None or (merge and not self.packed)):
            pooled = any(chunk.hidden is not None for chunk in chunks)
            with attention.packed(tokens):
                logits, states = self._hooked.forward(
                    ids, positions, rows, logit_rows, pooled, tokens.pictures
                )
            self.forwards["transformers"] += 1
        else:
            assert self._decoder is not None  # a model without hooks has a decoder
            logits, states = self._decoder.forward(ids, positions, tokens, rows, logit_rows, dispatch.path())
            self.forwards["decoder"] += 1
        self._windows, self.attends_plainly = tokens.windows, tokens.plain
        for chunk, end in zip(chunks, ends, strict=True):
            if chunk.hidden is not None and states is not None:
                chunk.hidden.add(states[end - len(chunk.token_ids) : end])
            chunk.cache.advance(len(chunk.token_ids))
        return logits

    @torch.inference_mode()
    def step_together(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        parts: Sequence[tuple[LoadedVariant | None, int, int]],
        wanted: Sequence[int],
        batch: BatchAttention,
        merge: bool = False,
    ) -> Tensor:
        """Run one forward of tokens that ``batch`` attends; only if ``attends_plainly``.

        Args:
            token_ids: The token ids of all texts, concatenated.
            positions: The position of each token in its text.
            parts: Variant, tokens and wanted logits of each run of texts of one variant, in order.
            wanted: The tokens after which logits ``[wanted, vocabulary]`` are computed, in order.
            batch: The attention, which separates the texts.
            merge: As in ``step``.

        Raises:
            GymError: ``USAGE`` if the base is packed or a ``PlainModel``.
        """
        if self.packed or self._hooked is None:
            how = f"packed in {self.base_format}" if self.packed else "of a plain model"
            problem = f"the base's linear layers are {how}, which only step can compute"
            raise GymError(ErrorCode.USAGE, problem, "open a transformers model without base_format")
        with attention.packed(PackedTokens((), batch=batch)):
            logits, _ = self._hooked.forward(token_ids, positions, self._variants.rows(parts, merge), wanted)
        self.forwards["transformers"] += 1
        return logits

    @property
    def forward(self) -> str:
        """The implementation that computes steps: ``decoder`` or ``transformers``."""
        return "transformers" if self._decoder is None else "decoder"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return next(iter(self.model.parameters())).dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return self._device

    def release_variants(self) -> None:
        """Drop the references to the last step's variants."""
        self._variants.release()
