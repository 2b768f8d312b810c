"""All layers of a step as one native call, for consecutive steps of few rows with the same variants.

The calls and their order are those of ``layer_calls``, so the results are bit-identical. A recording is for one number
of rows, one set of variants and the blocks of one pool; another kind of step needs another recording. The first step of
a kind is computed directly: a kind that changes at every step is never recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace

import torch
from gym_quant.kernels.program import Program
from torch import Tensor

from gym_fed.serving.forward.attention import PackedTokens
from gym_fed.serving.forward.base_weights import Unrecordable
from gym_fed.serving.forward.layer_calls import HeadSizes, LayerCalls, RecordedCalls
from gym_fed.serving.forward.segments import StepRows

MOST_ROWS = 16
"""Most rows of a recorded step: with more, products take far longer than Python, and some use other calls."""


class RecordedLayers:
    """One program; it holds references neither to the variants nor to the pool."""

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
    """The last kind of step on some buffers, and its program once the kind has come twice."""

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
            layers: Makes the calls of all layers.
        """
        if path == "torch" or tokens.batch is not None or len(at.hidden) > MOST_ROWS:
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
            except Unrecordable:
                return None  # and so are all steps of this kind: they are not tried again
            self._layers = RecordedLayers(program, calls)
        return self._layers


class StepBuffers:
    """The tensors of a step, reused by the next one of as many rows or fewer."""

    def __init__(self, hidden: int, attended: int, qkv: int, inner: int) -> None:
        self._widths = {"hidden": hidden, "normed": hidden, "term": hidden, "qkv": qkv, "attended": attended}
        self._widths |= {"gate_up": 2 * inner, "gated": inner}
        self._inner, self._rows = inner, 0
        self._held: dict[str, Tensor] = {}
        self._views: dict[int, SimpleNamespace] = {}

    def clear(self) -> None:
        """Drop everything, including recordings, which contain addresses of weights."""
        self._rows = 0
        self._held.clear()
        self._views.clear()

    def of(self, rows: int) -> SimpleNamespace:
        """Return tensors of ``rows`` rows by name, and their ``recording``; contents are those of the step before."""
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
