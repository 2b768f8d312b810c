"""The forward pass of Llama, Qwen2, Qwen3 and Mistral on the CPU, over packed tokens, with float32 activations.

A layer computes: norm; query, key and value; rotation; attention; output; norm; gate and up; down. transformers' own
forward pass is the reference, both when a model is opened and in tests. Its rotary module is used, so every rope type
is supported. The terms of variants are added by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from gym_quant.huge_pages import in_huge_pages
from gym_quant.kernels.decode import NormWeight, operators
from gym_quant.linear import get_linear
from torch import Tensor, nn

from gym_fed.serving.forward import segments
from gym_fed.serving.forward.base_weights import Projection
from gym_fed.serving.forward.chunk import PackedTokens, Position, position_ids
from gym_fed.serving.forward.layer_calls import (
    DecoderLayer,
    DirectCalls,
    HeadSizes,
    LayerCalls,
    Norm,
    StepBuffers,
)
from gym_fed.serving.forward.packed_base import Layers, Pack, pack_in_memory
from gym_fed.serving.forward.plain_model import language_part
from gym_fed.serving.forward.segments import StepRows
from gym_fed.serving.forward.target_modules import ModelLayout


class Decoder:
    """The forward pass of one model.

    Args:
        model: A model for which ``unfit`` returns an empty string.
        layout: Its layout.
        windows: The sliding window of every layer, as transformers' forward passes it.
    """

    def __init__(self, model: Any, layout: ModelLayout, windows: dict[int, int | None]) -> None:
        config, body = language_part(model)
        first = body.layers[0].self_attn
        queries, keys = config.num_attention_heads, config.num_key_value_heads
        self._heads = HeadSizes(queries, keys, first.head_dim, first.scaling)
        self._rotary, self._embedding = body.rotary_emb, body.embed_tokens.weight
        targets = {target.module: target for target in layout.target_modules}
        names = {module: name for name, module in model.named_modules()}

        def fused(*modules: nn.Linear) -> Projection:
            return Projection(modules, [targets.get(names[module]) for module in modules])

        def norm(module: Any) -> Norm:
            weight = module.weight.detach().to(torch.float32).contiguous()
            return Norm(NormWeight(weight, module.variance_epsilon), targets.get(names[module]))

        def head_norm(module: Any) -> Norm | None:
            return None if module is None else norm(module)

        self._embedding_target = targets.get(names[body.embed_tokens])
        self.layers = [
            DecoderLayer(
                number,
                windows.get(number),
                norm(layer.input_layernorm),
                fused(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                head_norm(getattr(layer.self_attn, "q_norm", None)),
                head_norm(getattr(layer.self_attn, "k_norm", None)),
                fused(layer.self_attn.o_proj),
                norm(layer.post_attention_layernorm),
                fused(layer.mlp.gate_proj, layer.mlp.up_proj),
                fused(layer.mlp.down_proj),
            )
            for number, layer in enumerate(body.layers)
        ]
        self._norm, self.head = norm(body.norm), fused(model.lm_head)
        self._buffers = StepBuffers(
            config.hidden_size,
            queries * first.head_dim,
            (queries + 2 * keys) * first.head_dim,
            config.intermediate_size,
        )

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Keep activations in float32 and decode packed weights within the block, for comparisons."""
        self._buffers.clear()  # of recorded layers, which multiply as before
        for projection, _, _ in self._packing("bfloat16"):
            projection.compare(True)
        try:
            yield
        finally:
            self._buffers.clear()
            for projection, _, _ in self._packing("bfloat16"):
                projection.compare(False)

    def layers_in(self, format: str) -> Layers:
        """Return the matrices that ``pack`` creates."""
        layers: Layers = {}
        for projection, formats, name in self._packing(format):
            layers |= projection.layers(*formats, name=name)
        return layers

    def pack(self, format: str, pack: Pack = pack_in_memory) -> int:
        """Pack the weights of all linear layers, and free the model's own, so that it can no longer be run.

        In 8- and 4-bit formats the value projections are in bfloat16, and the head has more bits than the other layers,
        since they are a small part of the weights but account for much of the error.

        Args:
            format: A format of ``gym_quant.linear``.
            pack: Function that packs a matrix, or reads it from the base's packed file.

        Returns:
            The number of bytes that a step of one token reads.
        """
        self._buffers.clear()
        packing = self._packing(format)
        with in_huge_pages():
            return sum(
                projection.pack(*formats, name=name, pack=pack) for projection, formats, name in packing
            )

    def forward(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int] | Sequence[Position],
        tokens: PackedTokens,
        step: StepRows | None,
        wanted: Sequence[int],
        path: str,
    ) -> tuple[Tensor, Tensor]:
        """Run one forward pass.

        Args:
            token_ids: The token ids of all requests, concatenated.
            positions: The position of each token in its text: a number, or three.
            tokens: The requests, with their caches and picture features.
            step: The variants of the rows; None: all belong to the base.
            wanted: The tokens after which logits are computed.
            path: The kernels' code path.

        Returns:
            Logits ``[wanted, vocabulary]`` float32, and the last hidden states ``[tokens, hidden]``, which are valid
            until the next forward pass.
        """
        ids = torch.tensor(token_ids)
        at = self._buffers.of(len(token_ids))
        at.hidden.copy_(self._embedding.index_select(0, ids))
        self._add_embeddings(ids, at.hidden, step)
        if tokens.pictures is not None:
            tokens.pictures.put(at.hidden)
        cosine, sine = self._rotary(at.hidden, position_ids(positions, ids.device))
        angles = (cosine[0], sine[0])
        recorded = at.recording.find(tokens, step, path, at, self._heads, self._layers)
        if recorded is None:
            self._layers(DirectCalls(operators(path), self._heads, at, tokens, step, angles))
        else:
            recorded.run(tokens, step, angles)
        logits = torch.empty(len(wanted), self.head.size)
        if wanted:
            states = at.normed if len(wanted) == len(ids) else at.normed[list(wanted)]
            self.head.project(states, logits, step)
        return logits, at.normed

    def _packing(self, format: str) -> Iterator[tuple[Projection, tuple[str, ...], str]]:
        """Iterate over all linear layers, with their modules' formats and their name in the base's packed file."""
        yield self.head, (get_linear(format).head_format,), "head"
        for layer in self.layers:
            yield layer.qkv, (format, format, "bfloat16"), f"{layer.number}.qkv"
            yield layer.output, (format,), f"{layer.number}.output"
            yield layer.gate_up, (format, format), f"{layer.number}.gate_up"
            yield layer.down, (format,), f"{layer.number}.down"

    def _add_embeddings(self, ids: Tensor, hidden: Tensor, step: StepRows | None) -> None:
        plan = None
        if step is not None and self._embedding_target is not None:
            plan = step.active.plan(self._embedding_target)
        if step is not None and self._embedding_target is not None and plan is not None:
            segments.add_embedding(self._embedding_target, plan, step, ids, hidden)

    def _layers(self, calls: LayerCalls) -> None:
        at, term = calls.at, None
        for layer in self.layers:
            calls.norm(layer.attention_norm, term)
            calls.project(layer.qkv, at.normed, at.qkv)
            calls.attend(layer)
            calls.project(layer.output, at.attended, at.term)
            calls.norm(layer.mlp_norm, at.term)
            calls.project(layer.gate_up, at.normed, at.gate_up)
            calls.gate()
            calls.project(layer.down, at.gated, at.term)
            term = at.term
        calls.norm(self._norm, term)
