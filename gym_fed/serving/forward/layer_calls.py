"""The operations of a decoder layer, computed at once (``DirectCalls``) or recorded as a program (``RecordedCalls``).

A program computes all layers of a step in one native call, with the same operations in the same order, so results are
bit-identical. It is valid for one number of rows, one set of variants and the blocks of one pool. It is recorded when a
kind of step occurs for the second time, so that steps that always differ are not recorded.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from gym_quant.kernels.decode import NormDeltas, NormWeight, Operators
from gym_quant.kernels.program import Program
from torch import Tensor

from gym_fed.serving.forward import attention
from gym_fed.serving.forward.base_weights import NotRecordable, Projection
from gym_fed.serving.forward.chunk import PackedTokens
from gym_fed.serving.forward.segments import StepRows
from gym_fed.serving.forward.target_modules import TargetModule


@dataclass(frozen=True)
class Norm:
    """The weight of a norm, and its target module if variants may change it."""

    weight: NormWeight
    target: TargetModule | None

    def deltas(self, step: StepRows | None) -> NormDeltas | None:
        """Return the deltas that the variants of a step add to the weight; None if they add none."""
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
        """Return queries, keys and values, each ``[rows, heads, dim]``, and the view of queries and keys."""
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
    """Computes the operations immediately.

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
        tokens: PackedTokens,
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
        program: The program, to which the calls are added.
        heads: The number of heads.
        at: The buffers shared by every step that runs the program.
        tokens: Requests whose caches belong to the pool of those steps.
        step: Rows with the same variants as every such step, none of them bulk.

    Attributes:
        products: The number of multiplications of each term, by form and kernel.
        windows: The sliding window by layer.
    """

    def __init__(
        self,
        program: Program,
        heads: HeadSizes,
        at: SimpleNamespace,
        tokens: PackedTokens,
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
            raise NotRecordable
        out = self.at.attended.view(queries.shape)
        scale, window = self._heads.scale, layer.window
        self._program.attend(held, queries, keys, values, out, scale=scale, window=window)
        self.windows[layer.number] = window

    def gate(self) -> None:
        self._program.gate(self.at.gate, self.at.up, self.at.gated)

    def _deltas(self, norm: Norm) -> Tensor | None:
        deltas = norm.deltas(self._step)
        return None if deltas is None else deltas.values


MAX_RECORDED_ROWS = 16
"""Maximum number of rows of a recorded step; with more, products take far longer than calls from Python, and some
differ."""


class RecordedLayers:
    """A recorded program, without references to the variants or the pool."""

    def __init__(self, program: Program, calls: RecordedCalls) -> None:
        self._program, self._products, self._windows = program, calls.products, calls.windows
        self._plain = all(window is None for window in calls.windows.values())

    def run(self, tokens: PackedTokens, step: StepRows | None, angles: tuple[Tensor, Tensor]) -> None:
        """Compute the layers for the tokens of this step."""
        first = next(iter(tokens.spans[0][2].pool.layers.values()))
        spans, count = tokens.tables.table_for(first)
        owners = 0 if step is None else step.body.few_owners_at
        angle = {"cosine": angles[0].data_ptr(), "sine": angles[1].data_ptr()}
        self._program.run(spans=spans, count=count, owners=owners, **angle)
        tokens.windows.update(self._windows)
        tokens.plain = tokens.plain and self._plain
        if step is not None:
            step.products.update(self._products)


class Recording:
    """The kind of the last step on a set of buffers, and its program once the kind has occurred twice."""

    def __init__(self) -> None:
        self._kind: tuple[object, ...] | None = None
        self._layers: RecordedLayers | None = None
        self._seen = 0

    def find(
        self,
        tokens: PackedTokens,
        step: StepRows | None,
        path: str,
        at: SimpleNamespace,
        heads: HeadSizes,
        layers: Callable[[LayerCalls], None],
    ) -> RecordedLayers | None:
        """Return the program for steps like this one; None if the step must be computed directly.

        Args:
            tokens: The tokens of the step.
            step: The variants of the step.
            path: The kernels' code path.
            at: The buffers.
            heads: The number of heads.
            layers: Function that makes the calls of all layers.
        """
        if path == "torch" or tokens.batch is not None or len(at.hidden) > MAX_RECORDED_ROWS:
            return None
        if step is not None and (step.body.bulk or step.merged is not None or not len(step.body.few_index)):
            return None
        pool = tokens.spans[0][2].pool
        active = None if step is None else weakref.ref(step.active)
        kind = active, weakref.ref(pool), pool.num_blocks, path
        if kind != self._kind:
            self._kind, self._layers, self._seen = kind, None, 0
        self._seen += 1
        if self._seen == 2:
            program = Program(path)
            calls = RecordedCalls(program, heads, at, tokens, step)
            try:
                layers(calls)
            except NotRecordable:
                return None  # steps of this kind cannot be recorded, so do not try again
            self._layers = RecordedLayers(program, calls)
        return self._layers


class StepBuffers:
    """The tensors of a step, reused by the next step if it has no more rows."""

    def __init__(self, hidden: int, attended: int, qkv: int, inner: int) -> None:
        self._widths = {"hidden": hidden, "normed": hidden, "term": hidden, "qkv": qkv, "attended": attended}
        self._widths |= {"gate_up": 2 * inner, "gated": inner}
        self._inner, self._rows = inner, 0
        self._held: dict[str, Tensor] = {}
        self._views: dict[int, SimpleNamespace] = {}

    def clear(self) -> None:
        """Free all buffers and recordings, which contain addresses of weights."""
        self._rows = 0
        self._held.clear()
        self._views.clear()

    def of(self, rows: int) -> SimpleNamespace:
        """Return tensors of ``rows`` rows by name, with undefined contents, and their ``recording``."""
        if rows > self._rows:
            self._rows = max(8, 1 << (rows - 1).bit_length())
            self._held = {name: torch.empty(self._rows, width) for name, width in self._widths.items()}
            self._views.clear()
        if rows not in self._views:
            views = {name: held[:rows] for name, held in self._held.items()}
            gate_up = views["gate_up"]
            views["gate"], views["up"] = gate_up[:, : self._inner], gate_up[:, self._inner :]
            self._views[rows] = SimpleNamespace(**views, recording=Recording())
        return self._views[rows]
