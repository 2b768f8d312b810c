"""Patch vLLM's LoRA support to accept a `.gymdelta` as an adapter; imported only inside vLLM.

Written for vLLM 0.32. ``apply`` refuses a vLLM that lacks one of the methods that it replaces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gym_quant.resident import IndexArray
from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from gym_fed.serving.vllm_plugin.settings import PluginSettings
from gym_fed.serving.vllm_plugin.slots import DeviceLayer, HostLayer, StepSlots
from gym_fed.serving.vllm_plugin.variants import (
    DIGEST,
    EMBEDDING,
    HEAD,
    object_path,
    open_object,
    read_variant,
)
from gym_fed.serving.vllm_plugin.wiring import LinearPlace, NormPlace, Shard, Wiring

_SUFFIX = ".gymdelta"
_PATCHED = "gym_fed_patched"


def apply() -> None:
    """Replace the methods, unless this process has already done so.

    Raises:
        RuntimeError: If this vLLM lacks one of them.
    """
    if getattr(LoRAModelManager, _PATCHED, False):
        return
    for owner, name, patch in _PATCHES:
        if not callable(getattr(owner, name, None)):
            raise RuntimeError(
                f"this vLLM has no {owner.__name__}.{name}: gym-fed's plug-in is for vLLM 0.32"
            )
        setattr(owner, name, patch(getattr(owner, name)))
    setattr(LoRAModelManager, _PATCHED, True)


def _create_lora_modules(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def create(self: Any) -> None:
        original(self)
        self.gym_wiring = _wire(self)

    return create


def _load_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Read a `.gymdelta` and check it completely, since an error at this point ends only one request."""

    @functools.wraps(original)
    def load(self: Any, request: Any) -> Any:
        path = Path(request.lora_path)
        if path.suffix != _SUFFIX:
            return original(self, request)
        variant = read_variant(open_object(path))
        config = self.lora_config
        if variant.rank > config.max_lora_rank:
            raise ValueError(f"{path}: rank {variant.rank} exceeds --max-lora-rank {config.max_lora_rank}")
        loras = {
            name: LoRALayerWeights(
                name, len(a), len(a), a.to(config.lora_dtype), b.to(config.lora_dtype).contiguous()
            )
            for name, (a, b) in variant.factors.items()
        }
        model = LoRAModel(request.lora_int_id, max(1, variant.rank), loras)
        model.gym_prepared = self._adapter_manager.gym_wiring.prepare(variant)
        model.gym_factors = bool(loras)
        return model

    return load


def _create_merged_loras_inplace(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def merge(self: Any, lora_model: Any) -> None:
        if lora_model.loras:  # a variant with only sign deltas has nothing to pack
            original(self, lora_model)

    return merge


def _activate_adapter(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def activate(self: Any, lora_id: int) -> bool:
        activated = original(self, lora_id)
        if activated:
            prepared = getattr(self._registered_adapters.get(lora_id), "gym_prepared", None)
            self.gym_wiring.activate(self.lora_index_to_id.index(lora_id), prepared)
        return activated

    return activate


def _set_adapter_mapping(original: Callable[..., None]) -> Callable[..., None]:
    """Set gym-fed's slots, and hide variants without factors from vLLM's LoRA kernels."""

    @functools.wraps(original)
    def set_mapping(self: Any, mapping: Any) -> None:
        slots = {lora_id: slot for slot, lora_id in enumerate(self.lora_index_to_id) if lora_id is not None}
        held = self._registered_adapters.cache
        ours = {
            lora_id: slot for lora_id, slot in slots.items() if hasattr(held.get(lora_id), "gym_prepared")
        }
        wiring: Wiring = self.gym_wiring
        wiring.step.update(
            [ours.get(lora_id, -1) for lora_id in mapping.index_mapping],
            [ours.get(lora_id, -1) for lora_id in mapping.prompt_mapping],
        )
        hidden = {lora_id for lora_id in ours if not held[lora_id].gym_factors}
        self.gym_lora_slots = sorted(
            slots[lora_id] for lora_id in set(mapping.index_mapping) & slots.keys() - hidden
        )
        shown = replace(
            mapping,
            index_mapping=tuple(0 if i in hidden else i for i in mapping.index_mapping),
            prompt_mapping=tuple(0 if i in hidden else i for i in mapping.prompt_mapping),
        )
        original(self, shown)

    return set_mapping


def _apply_lora_to_output(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def apply_lora(self: Any, x: Tensor, output: Tensor) -> Tensor:
        place: LinearPlace | None = getattr(self, "gym_place", None)
        if place is None:
            return original(self, x, output)
        manager = self.gym_manager
        step: StepSlots = manager.gym_wiring.step
        layer, slots = place.slots, step.tokens[: x.shape[0]]
        if isinstance(layer, HostLayer):
            _add_factors(self, manager.gym_lora_slots, x, output)
            if not step.used:
                return output
            layer.add(x, output, step.token_index)
        else:
            output = original(self, x, output)
            layer.add(x, output, slots)
        if place.bias is not None and (isinstance(layer, DeviceLayer) or place.bias.occupied):
            output += place.bias.rows(slots).to(output.dtype)
        return output

    return apply_lora


def _add_factors(layer: Any, used: list[int], x: Tensor, output: Tensor) -> None:
    """Add low-rank terms slot by slot on a CPU.

    vLLM's CPU kernels treat slot -1, which means no adapter, as the last slot, so rows of the base would get its
    adapter. They also copy the factors once per row.
    """
    if not used:
        return
    of_row = layer.punica_wrapper.token_lora_indices
    for slot in used:
        rows = (of_row == slot).nonzero()[:, 0]
        if not len(rows):
            continue
        own, column = x[rows], 0
        parts = zip(layer.lora_a_stacked, layer.lora_b_stacked, layer.output_slices, strict=True)
        for a, b, size in parts:
            output[rows, column : column + size] += (own @ a[slot, 0].T) @ b[slot, 0].T
            column += size


def _norm_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        result = original(self, x, residual)
        place: NormPlace | None = getattr(self, "gym_place", None)
        if place is None:
            return result
        step: StepSlots = self.gym_step
        if not place.factors.values.is_cuda and not (step.used and place.factors.occupied):
            return result
        out = result[0] if isinstance(result, tuple) else result
        factors = place.factors.rows(step.tokens[: out.shape[0]])
        factors = factors.view(factors.shape[0], *[1] * (out.ndim - 2), factors.shape[1])
        scaled = (out.to(torch.float32) * factors).to(out.dtype)
        return (scaled, *result[1:]) if isinstance(result, tuple) else scaled

    return forward


def _embedding_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def forward(self: Any, input_: Tensor) -> Tensor:
        output = original(self, input_)
        slots = getattr(self, "gym_table", None)
        if slots is None:
            return output
        step: StepSlots = self.gym_step
        if isinstance(slots, DeviceLayer):
            slots.add_rows(input_, output, step.tokens[: input_.shape[0]])
        elif step.used:
            slots.add_rows(input_, output, step.token_index)
        return output

    return forward


def _get_logits(original: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    @functools.wraps(original)
    def get_logits(
        self: Any,
        hidden_states: Tensor,
        lm_head: Any,
        embedding_bias: Tensor | None,
        *rest: Any,
        **named: Any,
    ) -> Tensor | None:
        logits = original(self, hidden_states, lm_head, embedding_bias, *rest, **named)
        slots = getattr(self, "gym_table", None)
        if slots is None or logits is None:
            return logits
        step: StepSlots = self.gym_step
        sized = logits[:, : slots.sizes[0]]
        if isinstance(slots, DeviceLayer):
            slots.add(hidden_states, sized, _logit_slots(step, hidden_states)[0])
        elif step.used:
            slots.add(hidden_states, sized, _logit_slots(step, hidden_states)[1])
        return logits

    return get_logits


def _logit_slots(step: StepSlots, hidden: Tensor) -> tuple[Tensor, IndexArray]:
    """Return the slot of every row of hidden states, on the device and on the host.

    vLLM computes logits of the sampled rows, which it copies together, and, for prompt log-probabilities, of a run of
    tokens, which is a slice of all hidden states. The slice's offset shows which tokens they are.
    """
    rows = hidden.shape[0]
    if hidden.untyped_storage().nbytes() == hidden.nbytes and rows == len(step.sampler_index):
        return step.samplers[:rows], step.sampler_index
    first = hidden.storage_offset() // hidden.stride(0)
    return step.tokens[first : first + rows], step.token_index[first : first + rows]


def _wire(manager: Any) -> Wiring:
    """Find the places of a model at which deltas are added, and store each on its module."""
    settings = PluginSettings.read()
    step = StepSlots(manager.max_num_batched_tokens, manager.device)
    tied = bool(getattr(manager.model.config, "tie_word_embeddings", False))
    wiring = Wiring(step, manager.lora_slots, settings.kernel, tied, manager.device)
    manager.gym_lora_slots = []
    for name, layer in manager.modules.items():
        if isinstance(layer, BaseLinearLayerWithLoRA):
            parts = manager.packed_modules.get(name) or [name]
            bias = layer.base_layer.bias is not None
            row_parallel = isinstance(layer.base_layer, RowParallelLinear)
            place = wiring.add_linear(
                name, parts, _shards(layer), bias=bias, adds_bias=not row_parallel or layer.tp_rank == 0
            )
            # Through __dict__, to bypass nn.Module's attributes and vLLM's forwarding of unknown names.
            layer.__dict__.update(gym_place=place, gym_manager=manager)
    for full_name, module in manager.model.named_modules():
        name = full_name.removesuffix(".base_layer")
        if type(module) is RMSNorm and module.has_weight:
            module.__dict__.update(gym_place=wiring.add_norm(name, module.weight.data), gym_step=step)
        elif name == EMBEDDING and isinstance(module, VocabParallelEmbedding):
            table = wiring.add_table(EMBEDDING, module.org_vocab_size, module.embedding_dim)
            module.__dict__.update(gym_table=table, gym_step=step)
    head = getattr(manager.model, HEAD, None)
    logits = getattr(manager.model, "logits_processor", None)
    if isinstance(head, ParallelLMHead | VocabParallelEmbedding) and isinstance(
        logits, LogitsProcessor | LogitsProcessorWithLoRA
    ):
        table = wiring.add_table(HEAD, head.org_vocab_size, head.embedding_dim)
        logits.__dict__.update(gym_table=table, gym_step=step)
    return wiring


def _shards(layer: Any) -> list[Shard]:
    """Return the shard of each part of a layer that this rank holds."""
    base, rank, size = layer.base_layer, layer.tp_rank, layer.tp_size
    if isinstance(base, RowParallelLinear):
        cols = base.input_size_per_partition
        full = (base.output_size, base.input_size)
        return [Shard(slice(0, base.output_size), slice(rank * cols, (rank + 1) * cols), full)]
    ranks = getattr(layer, "output_ids", (rank,) * len(layer.output_slices))
    totals = getattr(base, "output_sizes", None) or [base.output_size]
    if size == 1 or len(totals) != len(layer.output_slices):
        totals = [rows * size for rows in layer.output_slices]
    columns = slice(0, base.input_size)
    if hasattr(base, "total_num_kv_heads"):  # keys and values may be replicated between ranks
        heads = [base.total_num_heads, base.total_num_kv_heads, base.total_num_kv_heads]
        totals = [count * base.head_size for count in heads]
    return [
        Shard(slice(own * rows, (own + 1) * rows), columns, (total, base.input_size))
        for own, rows, total in zip(ranks, layer.output_slices, totals, strict=True)
    ]


_PATCHES: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (LoRAModelManager, "_create_lora_modules", _create_lora_modules),
    (LoRAModelManager, "_create_merged_loras_inplace", _create_merged_loras_inplace),
    (LoRAModelManager, "activate_adapter", _activate_adapter),
    (LoRAModelManager, "_set_adapter_mapping", _set_adapter_mapping),
    (WorkerLoRAManager, "_load_adapter", _load_adapter),
    (BaseLinearLayerWithLoRA, "_apply_lora_to_output", _apply_lora_to_output),
    (RMSNorm, "forward", _norm_forward),
    (VocabParallelEmbedding, "forward", _embedding_forward),
    (LogitsProcessor, "_get_logits", _get_logits),
    (LogitsProcessorWithLoRA, "_get_logits", _get_logits),
)
"""The owner and name of each method, and the function that wraps it."""


_NAME = "gym-fed"


class DigestResolver(LoRAResolver):  # type: ignore[misc]
    """Resolves the SHA-256 of a `.gymdelta` to its file in the variant store.

    The gateway, which alone has the server's key, requests a digest only after verifying the owner's signature. The
    worker checks that the file's bytes have this digest.

    Args:
        objects: The folder ``objects/`` of the store.
    """

    def __init__(self, objects: Path) -> None:
        self._objects = objects

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter with this digest; None for any other name, or a missing file."""
        del base_model_name
        if not DIGEST.fullmatch(lora_name):
            return None
        path = object_path(self._objects, lora_name)
        # vLLM replaces this number with its own counter.
        return LoRARequest(lora_name, 1, str(path)) if path.is_file() else None


def register_resolver() -> None:
    """Register the resolver of digests, if the gateway has set a store."""
    objects = PluginSettings.read().objects
    if objects is not None and _NAME not in LoRAResolverRegistry.get_supported_resolvers():
        LoRAResolverRegistry.register_resolver(_NAME, DigestResolver(objects))
