"""The operations of a decoder layer: ``DirectCalls`` computes them, ``RecordedCalls`` records them as a program."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

from gym_quant.kernels.decode import NormDeltas, NormWeight, Operators
from gym_quant.kernels.program import Program
from torch import Tensor

from gym_fed.serving.forward import attention
from gym_fed.serving.forward.base_weights import Projection, Unrecordable
from gym_fed.serving.forward.segments import StepRows
from gym_fed.serving.forward.target_modules import TargetModule


@dataclass(frozen=True)
class Norm:
    """A norm's weight, and its target module where variants may change it."""

    weight: NormWeight
    target: TargetModule | None

    def deltas(self, step: StepRows | None) -> NormDeltas | None:
        """Return the deltas that the variants of a step add to the weight."""
        if step is None or self.target is None:
            return None
        plan = step.active.plan(self.target)
        if plan is None or plan.vectors is None:
            return None
        return NormDeltas(plan.vectors, step.body.owners)


@dataclass(frozen=True)
class HeadSizes:
    """The head layout of every layer: numbers of query and key heads, head size, and scale of the scores."""

    queries: int
    keys: int
    dim: int
    scale: float

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each ``[rows, heads, dim]``, and the view of both that are rotated."""
        heads, ends = qkv.view(len(qkv), -1, self.dim), (self.queries, self.queries + self.keys)
        return heads[:, : ends[0]], heads[:, ends[0] : ends[1]], heads[:, ends[1] :], heads[:, : ends[1]]


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one layer."""

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


class LayerCalls(ABC):
    """The operations of a layer, on the buffers of a step."""

    at: SimpleNamespace

    @abstractmethod
    def norm(self, norm: Norm, term: Tensor | None) -> None:
        """Add the previous sub-layer's output to the residual, and normalise."""

    @abstractmethod
    def project(self, projection: Projection, x: Tensor, y: Tensor) -> None:
        """Compute ``y`` from ``x``."""

    @abstractmethod
    def attend(self, layer: DecoderLayer) -> None:
        """Rotate queries and keys, append keys and values to the caches, and attend."""

    @abstractmethod
    def gate(self) -> None:
        """Apply the gated activation."""


class DirectCalls(LayerCalls):
    """Computes at once.

    Args:
        ops: The elementwise operators.
        heads: The number of heads.
        at: The step's buffers.
        tokens: The requests.
        step: The variants of the rows.
        angles: Cosine and sine, ``[rows, dim]``.
    """

    def __init__(
        self,
        ops: Operators,
        heads: HeadSizes,
        at: SimpleNamespace,
        tokens: attention.PackedTokens,
        step: StepRows | None,
        angles: tuple[Tensor, Tensor],
    ) -> None:
        self.at = at
        self._ops, self._heads, self._tokens, self._step, self._angles = ops, heads, tokens, step, angles

    def norm(self, norm: Norm, term: Tensor | None) -> None:
        self._ops.add_norm(self.at.hidden, term, norm.weight, norm.deltas(self._step), self.at.normed)

    def project(self, projection: Projection, x: Tensor, y: Tensor) -> None:
        projection.project(x, y, self._step)

    def attend(self, layer: DecoderLayer) -> None:
        queries, keys, values, rotated = self._heads.split(self.at.qkv)
        if layer.q_norm is None or layer.k_norm is None:
            self._ops.rotate(rotated, *self._angles)
        else:
            self._ops.rotate(queries, *self._angles, layer.q_norm.weight, layer.q_norm.deltas(self._step))
            self._ops.rotate(keys, *self._angles, layer.k_norm.weight, layer.k_norm.deltas(self._step))
        attention.attend(
            self._tokens,
            layer.number,
            queries,
            keys,
            values,
            scale=self._heads.scale,
            window=layer.window,
            out=self.at.attended.view(queries.shape),
        )

    def gate(self) -> None:
        self._ops.gate(self.at.gate, self.at.up, self.at.gated)


class RecordedCalls(LayerCalls):
    """Records the operations as a program of native calls.

    Args:
        program: Gets the calls.
        heads: The number of heads.
        at: The buffers of every step that will run it.
        tokens: Requests whose caches are of their pool.
        step: Rows with the variants of every such step, none of them bulk.

    Attributes:
        products: How often each term is multiplied, by form and kernel.
        windows: The sliding window by layer.
    """

    def __init__(
        self,
        program: Program,
        heads: HeadSizes,
        at: SimpleNamespace,
        tokens: attention.PackedTokens,
        step: StepRows | None,
    ) -> None:
        self.at = at
        self.products: Counter[tuple[str, str]] = Counter()
        self.windows: dict[int, int | None] = {}
        self._program, self._heads, self._step = program, heads, step
        self._layers = tokens.spans[0][2].pool.layers

    def norm(self, norm: Norm, term: Tensor | None) -> None:
        self._program.add_norm(self.at.hidden, term, norm.weight, self._deltas(norm), self.at.normed)

    def project(self, projection: Projection, x: Tensor, y: Tensor) -> None:
        self.products += projection.record(self._program, x, y, self._step)

    def attend(self, layer: DecoderLayer) -> None:
        queries, keys, values, rotated = self._heads.split(self.at.qkv)
        if layer.q_norm is None or layer.k_norm is None:
            self._program.rotate(rotated, None, None)
        else:
            self._program.rotate(queries, layer.q_norm.weight, self._deltas(layer.q_norm))
            self._program.rotate(keys, layer.k_norm.weight, self._deltas(layer.k_norm))
        held = self._layers.get(layer.number)
        if held is None or (held.kv_heads, held.dim, held.value_dim) != (*keys.shape[1:], keys.shape[2]):
            raise Unrecordable
        out = self.at.attended.view(queries.shape)
        scale, window = self._heads.scale, layer.window
        self._program.attend(held, queries, keys, values, out, scale=scale, window=window)
        self.windows[layer.number] = window

    def gate(self) -> None:
        self._program.gate(self.at.gate, self.at.up, self.at.gated)

    def _deltas(self, norm: Norm) -> Tensor | None:
        deltas = norm.deltas(self._step)
        return None if deltas is None else deltas.values
