"""A causal LM that computes requests of different variants in one forward pass, in any mix of prefill and decode.

All tokens of a step are one packed sequence, in which ``attention`` separates the requests. Models that do not support
this use the general path, with transformers' own cache (``general``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from gym_quant.kernels import dispatch
from torch import Tensor

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward import added_tokens, attention, trial
from gym_fed.serving.forward.base_weights import in_float32
from gym_fed.serving.forward.chunk import Chunk, PackedTokens, packed_tokens, positions_of_step, reserve_room
from gym_fed.serving.forward.decoder import Decoder
from gym_fed.serving.forward.hooked import HookedForward
from gym_fed.serving.forward.kv_cache import KVCache, KVPool
from gym_fed.serving.forward.model_arguments import keep_weights
from gym_fed.serving.forward.packed_base import PackedBase
from gym_fed.serving.forward.padded import BatchAttention
from gym_fed.serving.forward.plain_model import PlainModel, plain_layout
from gym_fed.serving.forward.segments import StepVariants
from gym_fed.serving.forward.target_modules import ModelLayout
from gym_fed.serving.forward.trial import base_format_for, kernel_for, prepare, require_causal
from gym_fed.serving.forward.variant_weights import LoadedVariant

if TYPE_CHECKING:
    from gym_fed.serving.forward.general import GeneralForward


_log = logging.getLogger(__name__)
_FORWARDS = {"decoder": 0, "transformers": 0, "general": 0}


class MultiVariantModel:
    """A model that is served until ``close``. Not thread-safe. The weights are never modified.

    Steps are computed by ``Decoder`` if it supports the model's class, otherwise by transformers' forward pass, which
    also computes merged and batched forward passes. If that cannot compute packed steps either, the general path does.

    Args:
        model: A transformers causal LM in float32 or bfloat16.
        kernel: The kernel for sign deltas: ``exact`` (float32), or by tables of 8 or 16 bits, ``lookup`` and
            ``lookup16`` (CPU only), which multiply evenly spaced levels too; ``auto``: see ``trial.kernel_for``.
        base_format: The format of the linear layers: one of ``gym_quant.linear``, which permanently frees the model's
            own weights; ``auto``: see ``trial.base_format_for``. None: the model's own weights.
        kv_dtype: The type of the KV cache: ``float32``, ``bfloat16``, ``int8``, or ``auto``, the weights' own.
        packed_base: The file of the layers in ``base_format``.

    Attributes:
        base_format: The format of the linear layers in memory.
        packed: True if the layers are packed, so that the model's own weights are gone.
        forwards: Number of forward passes by implementation; a step on the general path has one or more.
        products: Multiplications of a layer's packed deltas by form (``gym_quant.resident.Resident.form``) and kernel.
            ``decoded`` counts forms that the kernel does not multiply, and long prompts under ``exact``, for which
            deltas are decoded for a dense product.
        described: A description of the steps' implementation, why it was chosen, and what requests share.
        attends_plainly: True if no layer caps its scores, has sinks or a sliding window, according to the last step.
        pool: The blocks of ``new_cache``; it grows as needed.

    Raises:
        GymError: ``MODEL_INVALID``, with the reason, for a model that cannot be served; ``CONFIG_INVALID`` for a
            ``base_format`` or ``kv_dtype`` that it does not support; ``USAGE`` if it is already being served.
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
        self._decoder: Decoder | None = None
        self._hooked: HookedForward | None = None
        self._general: GeneralForward | None = None
        self._rescale_every = keep_weights(model)
        setattr(model, trial.MARK, True)
        try:
            self._open(chosen, base_format, kv_dtype, packed_base)
        except BaseException:
            self._restore()
            raise
        _log.info("%s; linear layers in %s", self.described, self.base_format)

    def _open(
        self, kernel: str, base_format: str | None, kv_dtype: str, packed_base: PackedBase | None
    ) -> None:
        model = self.model
        plain = isinstance(model, PlainModel)
        try:
            self.layout = (plain_layout if plain else ModelLayout.of)(model, kernel)
        except Exception as error:
            raise trial.unservable(model, error) from error
        self.forwards = Counter(_FORWARDS)
        self._variants = StepVariants(self.layout)
        self.products = self._variants.products
        self.attends_plainly, self.packed, self.base_format = False, False, self.layout.dtype
        self.vocabulary = len(model.get_input_embeddings().weight)
        self._head_is_plain = False
        self._device = torch.device(self.layout.device)
        name, unpacked = type(model).__name__, trial.unpacked(model)
        own = "it has parameters that a variant can only replace" if self.layout.replaceable else ""
        why_not = unpacked or trial.unfit(model) or own
        self.pool = KVPool(dtype=self.layout.dtype if why_not else "float32", device=self._device)
        self._windows: dict[int, int | None] = {}
        with nullcontext() if why_not else in_float32(model):
            stock = None if plain else trial.transformers_logits(model)
        if stock is not None and why_not:
            require_causal(model)
        if stock is not None and not unpacked:
            unpacked = self._try_packed(stock, wide=not why_not)
            if unpacked and not why_not and self.layout.dtype != "float32":
                stock = trial.transformers_logits(model)  # the general path computes in the model's dtype
                self.pool = KVPool(dtype=self.layout.dtype, device=self._device)
            why_not = why_not or unpacked
        if stock is not None and unpacked:
            self._open_general(stock)
        packed = base_format and base_format_for(base_format, self.layout.dtype, why_not, name)
        if not why_not:
            self._decoder = Decoder(model, self.layout, self._windows)
            prepare(self, self._decoder, stock, packed or None, packed_base)
            self.packed, self.base_format = bool(packed), packed or self.base_format
        self.pool = self._pool_of(kv_dtype)
        self.forwards = Counter(_FORWARDS)  # do not count those of the trial
        self.described = f"{name}: steps by {self.forward}" + (why_not and f", as {why_not}")
        if self._general is not None:
            self.described += f"; {self._general.described}"

    def close(self) -> None:
        """Restore the model."""
        if getattr(self.model, trial.MARK, False):
            self._restore()
            self._variants.release()

    def _restore(self) -> None:
        delattr(self.model, trial.MARK)
        for forward in (self._hooked, self._general):
            if forward is not None:
                forward.close()
        if self._rescale_every:
            self.model.config.rescale_every = self._rescale_every
            # RWKV's forward pass set this, although it divided nothing.
            self.model.base_model.layers_are_rescaled = False

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
        return self.pool.like(bytes_limit)

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token in the KV cache."""
        return self.pool.bytes_per_token

    def _try_packed(self, stock: Tensor, *, wide: bool) -> str:
        """Try packed steps with transformers' forward pass; return why they fail, or an empty string."""
        try:
            self._hooked = HookedForward(self.model, self.layout)
            with in_float32(self.model) if wide else nullcontext():
                trial.require_same(self, stock)
            trial.require_windows(self.model, self._windows)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - the general path is tried next, and reports its own errors
            if self._hooked is not None:
                self._hooked.close()
                self._hooked = None
            return error.message if isinstance(error, GymError) else repr(error)
        return ""

    def _open_general(self, stock: Tensor) -> None:
        """Open the general path; if the model's cache fails or gives different logits, do so without it."""
        from gym_fed.serving.forward.general import (
            GeneralForward,  # imports transformers
            open_state_pool,
        )

        for cached in (True, False):
            try:
                layout = ModelLayout.of(self.model, self.layout.kernel, cached=cached)
                self._general = GeneralForward(self.model, layout, cached=cached)
                self.layout, self._variants = layout, StepVariants(layout)
                self.products = self._variants.products
                self.pool = open_state_pool(self, self._general, stock)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:  # the second attempt reports it
                if self._general is not None:
                    self._general.close()
                    self._general = None
                if not cached:
                    raise trial.unservable(self.model, error) from error
                _log.warning("%s: its cache cannot be used: %s", type(self.model).__name__, error)
            else:
                return

    def _pool_of(self, kv_dtype: str) -> KVPool:
        if self._general is None:
            dtype = self.layout.dtype if kv_dtype == "auto" else kv_dtype
            return KVPool(dtype=dtype, shapes=self.pool.shapes, device=self._device)
        if kv_dtype not in ("auto", self.layout.dtype):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"kv_dtype {kv_dtype}: {type(self.model).__name__} keeps its state in {self.layout.dtype}",
                "leave engine.kv_dtype at auto",
            )
        return self.pool.like(None)

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk], *, merge: bool = False) -> Tensor:
        """Run all chunks in one forward pass.

        Args:
            chunks: The chunks, each with its own cache.
            merge: True to multiply the sum of the base and the delta (``MergedWeights``) if all chunks have the same
                variant. Not for serving, where the last bits of an answer would depend on other requests.

        Returns:
            Logits ``[rows, vocabulary]`` float32: the ``Chunk.rows`` of every chunk, in order. A broken variant
            changes only its own rows, which may be NaN. If a variant has added tokens, the vocabulary is the largest
            of the chunks, and the logits of tokens that a chunk's own vocabulary lacks are -inf.

        Raises:
            GymError: ``USAGE`` for an empty chunk, for more logits than a chunk has tokens, for two chunks with the
                same cache, and for a variant that was loaded for a different kernel. The caches are unchanged then.
        """
        reserve_room(chunks)
        self._variants.keep(chunk.variant for chunk in chunks)
        groups = _groups(chunks)
        if len(groups) == 1:
            logits, states = self._compute(chunks, merge)
        else:
            logits, states = self._compute_groups(chunks, groups, merge)
        for chunk, hidden in zip(chunks, states, strict=True):
            if chunk.hidden is not None and hidden is not None:
                chunk.hidden.add(hidden)
            chunk.cache.advance(len(chunk.token_ids))
        return logits

    def _compute_groups(
        self, chunks: Sequence[Chunk], groups: Sequence[Sequence[int]], merge: bool
    ) -> tuple[Tensor, list[Tensor | None]]:
        logits: dict[int, Tensor] = {}
        states: dict[int, Tensor | None] = {}
        for group in groups:
            part = [chunks[at] for at in group]
            rows, hidden = self._compute(part, merge)
            logits.update(zip(group, torch.split(rows, [chunk.rows for chunk in part]), strict=True))
            states.update(zip(group, hidden, strict=True))
        places = range(len(chunks))
        return added_tokens.stacked([logits[at] for at in places]), [states[at] for at in places]

    def _compute(self, chunks: Sequence[Chunk], merge: bool) -> tuple[Tensor, list[Tensor | None]]:
        """Return the logits of chunks, and the hidden states of those that need them."""
        if not any(chunk.variant is not None and chunk.variant.vocabulary for chunk in chunks):
            return self._forward(chunks, merge)
        if self._decoder is None and not self._head_is_plain:
            with added_tokens.trial_chunk(self.new_cache()) as chunk:
                added_tokens.require_plain_head(self.model, *self._forward([chunk], merge=False))
            self._head_is_plain = True
        logits, states = self._forward(list(map(added_tokens.with_added_embeddings, chunks)), merge)
        return added_tokens.with_added_logits(logits, chunks, states), states

    def _forward(self, chunks: Sequence[Chunk], merge: bool) -> tuple[Tensor, list[Tensor | None]]:
        if self._general is not None:
            before = self._general.forwards
            computed = self._general.step(chunks, partial(self._variants.rows, merge=merge))
            self.forwards["general"] += self._general.forwards - before
            return computed
        ends, tokens = packed_tokens(chunks)
        ids = [token for chunk in chunks for token in chunk.token_ids]
        positions = positions_of_step(chunks)
        logit_rows = [
            at for chunk, end in zip(chunks, ends, strict=True) for at in range(end - chunk.rows, end)
        ]
        rows = self._variants.rows([(c.variant, len(c.token_ids), c.rows) for c in chunks], merge)
        if self._hooked is not None and (self._decoder is None or (merge and not self.packed)):
            pooled = any(chunk.needs_states for chunk in chunks)
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
        hidden = [
            None if not chunk.needs_states or states is None else states[end - len(chunk.token_ids) : end]
            for chunk, end in zip(chunks, ends, strict=True)
        ]
        return logits, hidden

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
        """Run one forward pass with the attention of ``batch``, for a model that ``attends_plainly``.

        Args:
            token_ids: The token ids of all texts, concatenated.
            positions: The position of each token in its text.
            parts: The variant, tokens and rows of logits of each run of texts of one variant, in order.
            wanted: The tokens after which logits ``[wanted, vocabulary]`` are computed, in order.
            batch: The attention, which separates the texts.
            merge: See ``step``.

        Raises:
            GymError: ``USAGE`` if the base is packed, a ``PlainModel`` or on the general path.
        """
        if self.packed or self._hooked is None:
            how = f"packed in {self.base_format}" if self.packed else f"computed by {self.forward}"
            problem = f"the base's linear layers are {how}, which only step can compute"
            raise GymError(ErrorCode.USAGE, problem, "open a transformers model without base_format")
        self._variants.keep(variant for variant, _, _ in parts)
        with attention.packed(PackedTokens((), batch=batch)):
            rows = self._variants.rows(parts, merge)
            logits, _ = self._hooked.forward(token_ids, positions, rows, wanted)
        self.forwards["transformers"] += 1
        return logits

    @property
    def whole_prompts(self) -> bool:
        """True if a prompt must be computed in one forward pass, since its state cannot be extended by many tokens."""
        return self._general is not None and not self._general.continues

    @property
    def forward(self) -> str:
        """The implementation that computes steps: ``decoder``, ``transformers`` or ``general``."""
        if self._general is not None:
            return "general"
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


def _groups(chunks: Sequence[Chunk]) -> list[list[int]]:
    """Group chunks by forward pass; a variant that replaces parameters gets its own."""
    groups: dict[LoadedVariant | None, list[int]] = {}
    for at, chunk in enumerate(chunks):
        alone = chunk.variant is not None and chunk.variant.replaced
        groups.setdefault(chunk.variant if alone else None, []).append(at)
    return list(groups.values())
