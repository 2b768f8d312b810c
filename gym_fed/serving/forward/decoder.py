"""Own forward of Llama, Qwen2, Qwen3 and Mistral on the CPU: the packed tokens of all requests, float32 activations.

A layer is: norm; query, key and value; rotation; attention; output; norm; gate and up; down.
transformers' own forward is what it is compared with, when a model is opened and in tests; of it the rotary module is
used, so that every rope type is theirs. Variants' terms are added by the functions that add them there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from gym_quant.kernels.decode import NormDeltas, NormWeight, Operators, operators
from torch import Tensor, nn

from gym_fed.serving.forward import attention, variant_terms
from gym_fed.serving.forward.base_weights import Projection
from gym_fed.serving.forward.packed_base import Pack, packed_anew
from gym_fed.serving.forward.segments import StepRows
from gym_fed.serving.forward.servable import language_part
from gym_fed.serving.forward.step_buffers import StepBuffers
from gym_fed.serving.forward.target_modules import ModelLayout, TargetModule


@dataclass(frozen=True)
class Norm:
    """A norm's weight, and where variants change it."""

    weight: NormWeight
    target: TargetModule | None

    def deltas(self, step: StepRows | None) -> NormDeltas | None:
        """What the variants of a step add to the weight."""
        if step is None or self.target is None:
            return None
        plan = step.active.plan(self.target)
        if plan is None or plan.vectors is None:
            return None
        return NormDeltas(plan.vectors, step.body.owners)


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's weights."""

    number: int
    window: int | None
    attention_norm: Norm
    qkv: Projection
    q_norm: Norm | None
    k_norm: Norm | None
    output: Projection
    mlp_norm: Norm
    gate_up: Projection
    down: Projection


class Decoder:
    """The forward of one model.

    Args:
        model: One for which ``unfit`` has no objection.
        layout: Of it.
        windows: Sliding window of every layer, as transformers' forward passes it.
    """

    def __init__(self, model: Any, layout: ModelLayout, windows: dict[int, int | None]) -> None:
        config, body = language_part(model)
        first = body.layers[0].self_attn
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim, self._scale, self._inner = first.head_dim, first.scaling, config.intermediate_size
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
            self._heads * self._dim,
            (self._heads + 2 * self._kv_heads) * self._dim,
            self._inner,
        )

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Round no activation within the block: not for serving, where that would be slow."""
        held = [p for layer in self.layers for p in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        for projection in (*held, self.head):
            projection.widen(True)
        try:
            yield
        finally:
            for projection in (*held, self.head):
                projection.widen(False)

    def pack(self, format: str, pack: Pack = packed_anew) -> int:
        """Pack the weights of all linear layers; the model's own are given up, so it computes nothing any more.

        The head, and in formats of 8 and 4 bits the value projections, are in bfloat16: they are a small part of the
        weights and a large one of what is lost.

        Args:
            format: Of ``gym_quant.linear``.
            pack: Packs a matrix, or takes it from the base's packed file.

        Returns:
            Bytes that a step of one token reads.
        """
        found = self.head.pack("bfloat16", name="head", pack=pack)
        for layer in self.layers:
            found += layer.qkv.pack(format, format, "bfloat16", name=f"{layer.number}.qkv", pack=pack)
            found += layer.output.pack(format, name=f"{layer.number}.output", pack=pack)
            found += layer.gate_up.pack(format, format, name=f"{layer.number}.gate_up", pack=pack)
            found += layer.down.pack(format, name=f"{layer.number}.down", pack=pack)
        return found

    def forward(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        tokens: attention.PackedTokens,
        step: StepRows | None,
        wanted: Sequence[int],
        path: str,
    ) -> tuple[Tensor, Tensor]:
        """One forward.

        Args:
            token_ids: Of all requests, one behind the other.
            positions: Of each in its text.
            tokens: The requests, with their caches, and what pictures give to tokens.
            step: The variants of the rows; None: all are of the base.
            wanted: The tokens after which logits are computed.
            path: Of the kernels.

        Returns:
            Logits ``[wanted, vocabulary]`` float32, and the last hidden states ``[tokens, hidden]``, which hold until
            the next forward.
        """
        ops, ids = operators(path), torch.tensor(token_ids)
        at = self._buffers.of(len(token_ids))
        at.hidden.copy_(self._embedding.index_select(0, ids))
        self._add_embeddings(ids, at.hidden, step)
        if tokens.pictures is not None:
            tokens.pictures.put(at.hidden)
        cosine, sine = self._rotary(at.hidden, torch.tensor([positions]))
        angles = (cosine[0], sine[0])
        term: Tensor | None = None
        for layer in self.layers:
            self._normed(ops, layer.attention_norm, term, at, step)
            layer.qkv.project(at.normed, at.qkv, step)
            self._attend(ops, layer, angles, at, tokens, step)
            layer.output.project(at.attended, at.term, step)
            self._normed(ops, layer.mlp_norm, at.term, at, step)
            layer.gate_up.project(at.normed, at.gate_up, step)
            ops.gate(at.gate, at.up, at.gated)
            layer.down.project(at.gated, at.term, step)
            term = at.term
        self._normed(ops, self._norm, term, at, step)
        logits = torch.empty(len(wanted), self.head.size)
        if wanted:
            states = at.normed if len(wanted) == len(ids) else at.normed[list(wanted)]
            self.head.project(states, logits, step)
        return logits, at.normed

    def _add_embeddings(self, ids: Tensor, hidden: Tensor, step: StepRows | None) -> None:
        plan = None
        if step is not None and self._embedding_target is not None:
            plan = step.active.plan(self._embedding_target)
        if step is not None and self._embedding_target is not None and plan is not None:
            variant_terms.add_embedding(self._embedding_target, plan, step, ids, hidden)

    def _normed(
        self, ops: Operators, norm: Norm, term: Tensor | None, at: SimpleNamespace, step: StepRows | None
    ) -> None:
        """The residual sum, and its norm: the sub-layer before adds its output here."""
        ops.add_norm(at.hidden, term, norm.weight, norm.deltas(step), at.normed)

    def _attend(
        self,
        ops: Operators,
        layer: DecoderLayer,
        angles: tuple[Tensor, Tensor],
        at: SimpleNamespace,
        tokens: attention.PackedTokens,
        step: StepRows | None,
    ) -> None:
        heads = at.qkv.view(len(at.qkv), -1, self._dim)
        ends = self._heads, self._heads + self._kv_heads
        queries, keys, values = heads[:, : ends[0]], heads[:, ends[0] : ends[1]], heads[:, ends[1] :]
        if layer.q_norm is None or layer.k_norm is None:
            ops.rotate(heads[:, : ends[1]], *angles)
        else:
            ops.rotate(queries, *angles, layer.q_norm.weight, layer.q_norm.deltas(step))
            ops.rotate(keys, *angles, layer.k_norm.weight, layer.k_norm.deltas(step))
        attention.attend(
            tokens,
            layer.number,
            queries,
            keys,
            values,
            scale=self._scale,
            window=layer.window,
            out=at.attended.view(len(heads), self._heads, -1),
        )
