"""A causal LM whose one forward serves rows of different variants: any mix of prompts and single new tokens.

All tokens of a step stand in one packed sequence that a stock transformers model reads; attention keeps the requests
apart (``attention``), and forward hooks add each row's variant (``mixed_layers``). transformers' own continuous
batching is not used: it masks every token of a step against all keys of all requests (8 requests of 64 + 32 tokens took
it 1.1 to 1.7 times as long as these steps, for the same tokens; one core), and has neither logits for a guided choice,
a seed a request, nor a place where rows could differ.

On CUDA the sign terms run through Triton kernels that have not been tried on a GPU yet.
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
from gym_fed.serving.engine.generation import HiddenMean
from gym_fed.serving.forward import attention
from gym_fed.serving.forward.attention import KVCache
from gym_fed.serving.forward.loaded import LoadedVariant
from gym_fed.serving.forward.target_modules import ModelLayout
from gym_fed.serving.forward.variant_layers import MixedLayers, MixedRows, Roster, RowMap

_MARK = "_gym_fed_mixed"
_BULK_ROWS = {"cpu": 512}
"""From how many rows of one variant on its bits are decoded for a multiplication of matrices. On a CPU the sign kernel
is as fast up to 256 rows (4096 x 4096, bfloat16, one core: 64 rows 37 ms against 59, 256 rows 112 against 122)."""
_BULK_ROWS_ELSEWHERE = 32
_WINDOWED = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Piece:
    """What one request has in a step.

    Attributes:
        token_ids: A part of its prompt, or its newest token; at least one.
        cache: The request's own; tokens follow what it has.
        variant: None: the base.
        wants_logits: Whether the logits after the last token are wanted.
        hidden: Takes the last hidden states of its tokens, where they are wanted.
    """

    token_ids: list[int]
    cache: KVCache
    variant: LoadedVariant | None = None
    wants_logits: bool = True
    hidden: HiddenMean | None = None


class MixedModel:
    """Serves a model until ``close``; one thread at a time. The model's weights are never written to.

    Args:
        model: A transformers causal LM in float32 or bfloat16.
        kernel: How sign deltas are multiplied: ``exact`` (float32), or ``lookup`` (8-bit tables, CPU only).

    Attributes:
        products: How often a layer's packed deltas of a form (``gym_quant.resident.Resident.form``) were multiplied in
            which way, counted where it is called: sign deltas by the kernel ``exact`` or ``lookup``; ``decoded`` are
            all other forms, and signs for long prompts, whose deltas are decoded for a dense product.

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
        self._roster: Roster | None = None
        self._windows: dict[int, int | None] = {}
        self.vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        self._device = torch.device(self.layout.device)
        self._bulk_rows = _BULK_ROWS.get(self._device.type, _BULK_ROWS_ELSEWHERE)
        stock = self._stock_logits()
        attention.register()
        self._old_attention = self.model.config._attn_implementation
        self.model.set_attn_implementation(attention.NAME)
        self._layers = MixedLayers(model, self.layout)
        setattr(model, _MARK, True)
        try:
            self.bytes_per_token = self._require_same(stock)
            self._require_windows()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take everything off the model again."""
        if getattr(self.model, _MARK, False):
            delattr(self.model, _MARK)
            self._layers.remove()
            self.model.set_attn_implementation(self._old_attention)
            self._roster = None

    def __enter__(self) -> MixedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sign_products(self) -> dict[str, int]:
        """Of ``products`` those of sign deltas, by kernel."""
        return {kernel: self.products[ResidentSigns.form, kernel] for kernel in (*MODES, "decoded")}

    @property
    def packed_products(self) -> dict[str, int]:
        """Of ``products`` those of all other packed deltas, by form."""
        found = Counter({ResidentLevels.form: 0})
        for (form, _), count in dict(self.products).items():
            if form != ResidentSigns.form:
                found[form] += count
        return dict(found)

    def new_cache(self, capacity_hint: int = 16) -> KVCache:
        """An empty cache for one request; memory for so many tokens is taken at first."""
        return KVCache(capacity_hint)

    @torch.inference_mode()
    def step(self, pieces: Sequence[Piece]) -> Tensor:
        """Read all pieces in one forward.

        Returns:
            Logits ``[pieces that want them, vocabulary]`` float32, in order. Whatever a variant's delta does, the
            other rows are not touched by it: its own may be NaN.

        Raises:
            GymError: ``USAGE`` for an empty piece, for two pieces of one cache, and for a variant that was loaded for
                another kernel. Caches are as before then.
        """
        ends, tokens = self._packed(pieces)
        self._windows = tokens.windows
        wanted = [end - 1 for piece, end in zip(pieces, ends, strict=True) if piece.wants_logits]
        keep = torch.tensor(wanted, dtype=torch.int64, device=self._device)
        states: list[Tensor] = []
        watch = None
        if any(piece.hidden is not None for piece in pieces):
            watch = self.model.base_model.register_forward_hook(
                lambda _module, _args, output: states.append(output.last_hidden_state[0])
            )
        with attention.packed(tokens):
            self._layers.rows = self._rows(pieces, ends)
            try:
                inputs = self._inputs(pieces)
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
        for piece, end in zip(pieces, ends, strict=True):
            if piece.hidden is not None:
                piece.hidden.add(states[0][end - len(piece.token_ids) : end])
        for piece in pieces:
            piece.cache.advance(len(piece.token_ids))
        return logits

    def rest(self) -> None:
        """Let go of the last step's variants; the next step takes up its own."""
        self._roster = None

    def _packed(self, pieces: Sequence[Piece]) -> tuple[list[int], attention.PackedTokens]:
        if not pieces or not all(piece.token_ids for piece in pieces):
            raise GymError(ErrorCode.USAGE, "a step needs pieces of at least one token each")
        if len({id(piece.cache) for piece in pieces}) != len(pieces):
            raise GymError(ErrorCode.USAGE, "two pieces of one step have the same cache")
        ends, spans, at = [], [], 0
        for piece in pieces:
            piece.cache.reserve(len(piece.token_ids))
            spans.append((at, at + len(piece.token_ids), piece.cache))
            at += len(piece.token_ids)
            ends.append(at)
        return ends, attention.PackedTokens(spans)

    def _inputs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        ids = [token for piece in pieces for token in piece.token_ids]
        positions = [
            p
            for piece in pieces
            for p in range(piece.cache.length, piece.cache.length + len(piece.token_ids))
        ]
        return {
            "input_ids": torch.tensor([ids], device=self._device),
            "position_ids": torch.tensor([positions], device=self._device),
            "use_cache": False,
        }

    def _rows(self, pieces: Sequence[Piece], ends: Sequence[int]) -> MixedRows | None:
        variants = sorted({piece.variant for piece in pieces if piece.variant is not None}, key=id)
        if not variants:
            self._roster = None  # so that no variant stays in memory for its sake
            return None
        if self._roster is None or self._roster.variants != tuple(variants):
            self._roster = Roster(variants, self.layout)
        number = {id(variant): at for at, variant in enumerate(variants)}
        body, head, wanted = [], [], 0
        for piece, end in zip(pieces, ends, strict=True):
            if piece.variant is not None:
                body.append((number[id(piece.variant)], end - len(piece.token_ids), end))
                if piece.wants_logits:
                    head.append((number[id(piece.variant)], wanted, wanted + 1))
            wanted += piece.wants_logits
        return MixedRows(
            self._roster,
            RowMap(body, ends[-1], self._bulk_rows, self._device),
            RowMap(head, wanted, self._bulk_rows, self._device),
            dispatch.path(),
            self.products,
        )

    @torch.inference_mode()
    def _stock_logits(self) -> Tensor:
        ids = (torch.arange(5, device=self._device) + 1) % self.vocabulary
        places = torch.arange(5, device=self._device)
        out = self.model(input_ids=ids[None], position_ids=places[None], use_cache=False)
        return torch.as_tensor(out.logits[0]).to(torch.float32)

    def _require_same(self, stock: Tensor) -> int:
        """A prompt in two pieces beside another one must give what the stock forward gave. Bytes a token of KV."""
        ids = [(at + 1) % self.vocabulary for at in range(5)]
        cache, other = self.new_cache(), self.new_cache()
        found = []
        for part in (ids[:3], ids[3:4], ids[4:]):
            found.append(self.step([Piece([1 % self.vocabulary], other), Piece(part, cache)])[1])
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
        """Every layer must have asked for the sliding window that its config says: the trial above is too short."""
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
                    f"{wanted}, but its attention asks for {self._windows.get(layer, 'no keys at all')}",
                    "use a model that hands its window to its attention, such as Mistral or Qwen3",
                )


def _require_servable(model: nn.Module, kernel: str) -> None:
    """Refuse by name what packed steps cannot compute, as far as that can be told without running it."""
    from transformers import PreTrainedModel

    from gym_fed.modeling.mixture_of_depths import RoutedModel

    name = type(model).__name__

    def refuse(why: str, hint: str) -> GymError:
        return GymError(ErrorCode.MODEL_INVALID, f"{name} cannot be served: {why}", hint)

    if getattr(model, _MARK, False):
        raise GymError(ErrorCode.USAGE, f"this {name} is being served already", "close that MixedModel first")
    if hasattr(model, "peft_config") or not isinstance(model, PreTrainedModel):
        raise refuse("it is no plain transformers model", "merge its adapter, or serve that as a variant")
    if isinstance(model, RoutedModel):
        raise refuse("mixture of depths has no key-value cache", "serve a model without routers")
    if not model._supports_attention_backend:
        raise refuse("its attention cannot be replaced", "use a model such as Llama, Qwen3 or Mistral")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise refuse("it cannot leave logits out", "use a causal LM such as Llama, Qwen3 or Mistral")
    dtypes = {p.dtype for p in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        told = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise refuse(f"its weights are {told}", "load it in float32 or bfloat16")
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
