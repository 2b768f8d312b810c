"""A causal LM that serves requests of different variants in one forward: any mix of prefill and decode.

All tokens of a step form one packed sequence for a stock transformers model. ``attention`` keeps the requests apart,
and the forward hooks of ``variant_layers`` add each row's variant. transformers' own continuous batching is not used:
it masks every token of a step against all keys of all requests. (8 requests of 64 + 32 tokens took it 1.1 to 1.7 times
as long as these steps, for the same tokens; one core.) It has neither logits for guided decoding, nor a seed per
request, nor a place where rows could differ.

On CUDA the sign terms run through a Triton kernel, tried in Triton's interpreter and not on a GPU yet.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from gym_quant.kernels import dispatch
from gym_quant.kernels.matmul import MODES
from gym_quant.kernels.resident import ResidentSigns
from gym_quant.resident import ResidentLevels
from torch import Tensor, nn

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.forward import attention
from gym_fed.serving.forward.attention import KVCache
from gym_fed.serving.forward.hidden_mean import HiddenMean
from gym_fed.serving.forward.loaded import LoadedVariant
from gym_fed.serving.forward.padded import BatchAttention
from gym_fed.serving.forward.target_modules import ModelLayout
from gym_fed.serving.forward.variant_layers import ActiveVariants, Segments, StepRows, VariantLayers

_MARK = "_gym_fed_multi_variant"
_BULK_ROWS = {"cpu": 512}
"""From this many rows of one variant on, its bits are decoded for a dense product. On a CPU the sign kernel is as fast
up to 256 rows (4096 x 4096, bfloat16, one core: 64 rows 37 ms against 59, 256 rows 112 against 122)."""
_BULK_ROWS_ELSEWHERE = 32
_WINDOWED = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Chunk:
    """The tokens of one request in a step.

    Attributes:
        token_ids: A part of its prompt (prefill), or its newest token (decode); at least one.
        cache: The request's own; the tokens are appended to it.
        variant: None: the base.
        wants_logits: Whether to compute the logits after the last token.
        num_logits: After how many of its last tokens they are computed then; scoring a text needs more than one.
        hidden: Collects the last hidden states of its tokens, for an embedding.
    """

    token_ids: list[int]
    cache: KVCache
    variant: LoadedVariant | None = None
    wants_logits: bool = True
    hidden: HiddenMean | None = None
    num_logits: int = 1

    @property
    def rows(self) -> int:
        """Rows of logits that a step returns for it."""
        return self.num_logits if self.wants_logits else 0


class MultiVariantModel:
    """Serves a model until ``close``; one thread at a time. The model's weights are never written to.

    Args:
        model: A transformers causal LM in float32 or bfloat16.
        kernel: How sign deltas are multiplied: ``exact`` (float32), or ``lookup`` (8-bit tables, CPU only).

    Attributes:
        products: Multiplications of a layer's packed deltas by form (``gym_quant.resident.Resident.form``) and way,
            counted at the call: sign deltas by the kernel ``exact`` or ``lookup``; ``decoded`` are all other forms, and
            signs for long prompts, whose deltas are decoded for a dense product.
        attends_plainly: Whether no layer caps its scores, has sinks or a sliding window, by the last step.

    Raises:
        GymError: ``MODEL_INVALID``, with the reason, for a model that packed steps cannot compute; ``USAGE`` when it is
            being served already.
    """

    def __init__(self, model: Any, *, kernel: Literal["exact", "lookup"] = "exact") -> None:
        _require_servable(model, kernel)
        self.model = model
        self.model.eval()
        self.layout = ModelLayout.of(model, kernel)
        self.products: Counter[tuple[str, str]] = Counter()
        self._active: ActiveVariants | None = None
        self._windows: dict[int, int | None] = {}
        self.attends_plainly = False
        self.vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        self._device = torch.device(self.layout.device)
        self._bulk_rows = _BULK_ROWS.get(self._device.type, _BULK_ROWS_ELSEWHERE)
        stock = self._stock_logits()
        attention.register()
        self._old_attention = self.model.config._attn_implementation
        self.model.set_attn_implementation(attention.NAME)
        self._layers = VariantLayers(model, self.layout)
        setattr(model, _MARK, True)
        try:
            self.bytes_per_token = self._require_same(stock)
            self._require_windows()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Restore the model."""
        if getattr(self.model, _MARK, False):
            delattr(self.model, _MARK)
            self._layers.remove()
            self.model.set_attn_implementation(self._old_attention)
            self._active = None

    def __enter__(self) -> MultiVariantModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sign_products(self) -> dict[str, int]:
        """Those ``products`` that are of sign deltas, by kernel."""
        return {kernel: self.products[ResidentSigns.form, kernel] for kernel in (*MODES, "decoded")}

    @property
    def packed_products(self) -> dict[str, int]:
        """Those ``products`` that are of all other packed deltas, by form."""
        found = Counter({ResidentLevels.form: 0})
        for (form, _), count in dict(self.products).items():
            if form != ResidentSigns.form:
                found[form] += count
        return dict(found)

    def new_cache(self, capacity_hint: int = 16) -> KVCache:
        """An empty cache for one request, with memory for so many tokens at first."""
        return KVCache(capacity_hint)

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk], *, merge: bool = False) -> Tensor:
        """Run all chunks in one forward.

        Args:
            chunks: Each of a cache of its own.
            merge: Whether products with base and delta may be made at once (``MergedWeights``) where all chunks are of
                one variant. Not while serving: the last bits of an answer would depend on what is beside it.

        Returns:
            Logits ``[rows, vocabulary]`` float32: the ``Chunk.rows`` of every chunk, in order. A broken variant
            changes only its own rows, which may be NaN.

        Raises:
            GymError: ``USAGE`` for an empty chunk, for more logits than a chunk has tokens, for two chunks of one
                cache, and for a variant that was loaded for another kernel. The caches are unchanged then.
        """
        ends, tokens = self._packed(chunks)
        self._windows = tokens.windows
        wanted = [at for chunk, end in zip(chunks, ends, strict=True) for at in range(end - chunk.rows, end)]
        keep = torch.tensor(wanted, dtype=torch.int64, device=self._device)
        states: list[Tensor] = []
        watch = None
        if any(chunk.hidden is not None for chunk in chunks):
            watch = self.model.base_model.register_forward_hook(
                lambda _module, _args, output: states.append(output.last_hidden_state[0])
            )
        with attention.packed(tokens):
            self._layers.rows = self._rows(
                [(chunk.variant, len(chunk.token_ids), chunk.rows) for chunk in chunks], merge
            )
            try:
                inputs = self._inputs(chunks)
                if wanted:
                    found = self.model(**inputs, logits_to_keep=keep).logits
                    logits: Tensor = found[0].to(torch.float32)
                else:
                    self.model.base_model(**inputs)
                    logits = torch.empty(0, self.vocabulary, device=self._device)
            finally:
                self._layers.rows = None
                if watch is not None:
                    watch.remove()
        self.attends_plainly = tokens.plain
        for chunk, end in zip(chunks, ends, strict=True):
            if chunk.hidden is not None:
                chunk.hidden.add(states[0][end - len(chunk.token_ids) : end])
        for chunk in chunks:
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
        """One forward of tokens that ``batch`` attends; only where ``attends_plainly``.

        Args:
            token_ids: Of all texts, one behind the other.
            positions: Of each token in its text.
            parts: Variant, tokens and wanted logits of each run of texts of one variant, in order.
            wanted: The tokens after which logits are computed, in order.
            batch: Keeps the texts apart.
            merge: As in ``step``.

        Returns:
            Logits ``[wanted, vocabulary]`` float32.
        """
        keep = torch.tensor(wanted, dtype=torch.int64, device=self._device)
        with attention.packed(attention.PackedTokens((), batch=batch)):
            self._layers.rows = self._rows(parts, merge)
            try:
                found = self.model(
                    input_ids=torch.tensor([list(token_ids)], device=self._device),
                    position_ids=torch.tensor([list(positions)], device=self._device),
                    use_cache=False,
                    logits_to_keep=keep,
                ).logits
            finally:
                self._layers.rows = None
        logits: Tensor = found[0].to(torch.float32)
        return logits

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        found: torch.dtype = getattr(torch, self.layout.dtype)
        return found

    @property
    def device(self) -> torch.device:
        """Of its weights."""
        return self._device

    def release_variants(self) -> None:
        """Drop the references to the last step's variants; the next step takes its own."""
        self._active = None

    def _packed(self, chunks: Sequence[Chunk]) -> tuple[list[int], attention.PackedTokens]:
        if not chunks or not all(chunk.token_ids for chunk in chunks):
            raise GymError(ErrorCode.USAGE, "a step needs chunks of at least one token each")
        if not all(chunk.num_logits in range(1, len(chunk.token_ids) + 1) for chunk in chunks):
            raise GymError(ErrorCode.USAGE, "num_logits must be from 1 to the tokens of the chunk")
        if len({id(chunk.cache) for chunk in chunks}) != len(chunks):
            raise GymError(ErrorCode.USAGE, "two chunks of one step have the same cache")
        ends, spans, at = [], [], 0
        for chunk in chunks:
            chunk.cache.reserve(len(chunk.token_ids))
            spans.append((at, at + len(chunk.token_ids), chunk.cache))
            at += len(chunk.token_ids)
            ends.append(at)
        return ends, attention.PackedTokens(spans)

    def _inputs(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        ids = [token for chunk in chunks for token in chunk.token_ids]
        positions = [
            p
            for chunk in chunks
            for p in range(chunk.cache.length, chunk.cache.length + len(chunk.token_ids))
        ]
        return {
            "input_ids": torch.tensor([ids], device=self._device),
            "position_ids": torch.tensor([positions], device=self._device),
            "use_cache": False,
        }

    def _rows(self, parts: Sequence[tuple[LoadedVariant | None, int, int]], merge: bool) -> StepRows | None:
        """Of each part its variant, tokens, and rows of logits."""
        variants = sorted({variant for variant, _, _ in parts if variant is not None}, key=id)
        if not variants:
            self._active = None  # so that it keeps no variant in memory
            return None
        if self._active is None or self._active.variants != tuple(variants):
            self._active = ActiveVariants(variants, self.layout, self._bulk_rows)
        number = {id(variant): at for at, variant in enumerate(variants)}
        body: list[tuple[int, int, int]] = []
        head: list[tuple[int, int, int]] = []
        end = wanted = 0
        for variant, tokens, logits in parts:
            if variant is not None:
                _append(body, number[id(variant)], end, end + tokens)
                if logits:
                    _append(head, number[id(variant)], wanted, wanted + logits)
            end, wanted = end + tokens, wanted + logits
        return StepRows(
            self._active,
            Segments(body, end, self._bulk_rows, self._device),
            Segments(head, wanted, self._bulk_rows, self._device),
            dispatch.path(),
            self.products,
            self._active.merged if merge and [span[1:] for span in body] == [(0, end)] else None,
        )

    @torch.inference_mode()
    def _stock_logits(self) -> Tensor:
        ids = (torch.arange(5, device=self._device) + 1) % self.vocabulary
        places = torch.arange(5, device=self._device)
        out = self.model(input_ids=ids[None], position_ids=places[None], use_cache=False)
        return torch.as_tensor(out.logits[0]).to(torch.float32)

    def _require_same(self, stock: Tensor) -> int:
        """Compare a prompt in chunks, beside another, with the stock forward. Returns KV bytes per token."""
        ids = [(at + 1) % self.vocabulary for at in range(5)]
        cache, other = self.new_cache(), self.new_cache()
        found = []
        for part in (ids[:3], ids[3:4], ids[4:]):
            found.append(self.step([Chunk([1 % self.vocabulary], other), Chunk(part, cache)])[1])
        wanted = stock[[2, 3, 4]]
        off = float((torch.stack(found) - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
        name = type(self.model).__name__
        if not off <= (1e-3 if self.layout.dtype == "float32" else 5e-2):
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{name} cannot be served: its logits in a packed step are off by {off:.1e} of the largest, so it has "
                "state besides keys and values",
                "use a decoder with ordinary attention, such as Llama, Qwen3 or Mistral",
            )
        return cache.bytes // cache.capacity

    def _require_windows(self) -> None:
        """Every layer must have passed the sliding window of its config: the trial above is too short to show it."""
        config: Any = self.model.config.get_text_config()
        size = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            slides = size is not None and getattr(config, "use_sliding_window", True)
            kinds = ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
        for layer, kind in enumerate(kinds):
            wanted = size if kind == "sliding_attention" else None
            if layer not in self._windows or self._windows[layer] != wanted:
                raise GymError(
                    ErrorCode.MODEL_INVALID,
                    f"{type(self.model).__name__} cannot be served: layer {layer} should have a sliding window of "
                    f"{wanted}, but its attention uses {self._windows.get(layer, 'no keys at all')}",
                    "use a model that passes its window to its attention, such as Mistral or Qwen3",
                )


def _append(spans: list[tuple[int, int, int]], variant: int, start: int, stop: int) -> None:
    """Add a variant's rows, to its last span where they follow it."""
    if spans and spans[-1][0] == variant and spans[-1][2] == start:
        spans[-1] = (variant, spans[-1][1], stop)
    else:
        spans.append((variant, start, stop))


def _require_servable(model: nn.Module, kernel: str) -> None:
    """Refuse by name what packed steps cannot compute, as far as that is known without running it."""
    from transformers import PreTrainedModel

    from gym_fed.modeling.mixture_of_depths import RoutedModel

    name = type(model).__name__

    def refuse(why: str, hint: str) -> GymError:
        return GymError(ErrorCode.MODEL_INVALID, f"{name} cannot be served: {why}", hint)

    if getattr(model, _MARK, False):
        raise GymError(
            ErrorCode.USAGE, f"this {name} is being served already", "close that MultiVariantModel first"
        )
    if hasattr(model, "peft_config") or not isinstance(model, PreTrainedModel):
        raise refuse("it is not a plain transformers model", "merge its adapter, or serve that as a variant")
    if isinstance(model, RoutedModel):
        raise refuse("mixture of depths has no key-value cache", "serve a model without routers")
    if not model._supports_attention_backend:
        raise refuse("its attention cannot be replaced", "use a model such as Llama, Qwen3 or Mistral")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise refuse("it cannot leave logits out", "use a causal LM such as Llama, Qwen3 or Mistral")
    dtypes = {p.dtype for p in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        found_dtypes = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise refuse(f"its weights are {found_dtypes}", "load it in float32 or bfloat16")
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        raise refuse("its weights are on several devices", "load it on one")
    if kernel == "lookup" and next(iter(devices)).type != "cpu":
        raise GymError(ErrorCode.USAGE, "kernel lookup is for the CPU", "use exact")
    config: Any = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - set(_WINDOWED)
    if kinds:
        raise refuse(f"its layers are {', '.join(sorted(kinds))}", "use a model with ordinary attention")
    rope = getattr(config, "rope_parameters", None) or {}
    found = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    stretching = {str(r.get("rope_type")) for r in found} & {"dynamic", "longrope"}
    if stretching:
        raise refuse(
            f"rope type {stretching.pop()} depends on the longest request of a step",
            "use yarn, linear or llama3",
        )
