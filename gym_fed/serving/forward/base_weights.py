"""The decoder's linear layers, with the model's own weights, which torch multiplies, or packed weights.

Modules that share their input form one ``Projection``. A packed format joins them in one matrix. The model's own
weights are multiplied one by one, since joining them would copy them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from gym_quant.kernels.factors import FactorMatrix, FactorTerms
from gym_quant.kernels.program import Program
from gym_quant.kernels.resident import BoundTerms, SignBatch
from gym_quant.linear import PackedLinear
from torch import Tensor, nn
from torch.nn import functional

from gym_fed.base.modeling.checkpoint import release_pages
from gym_fed.serving.forward import segments
from gym_fed.serving.forward.active_variants import ActiveVariants, Factors, Packed
from gym_fed.serving.forward.packed_base import Layers, Pack, pack_in_memory
from gym_fed.serving.forward.segments import Segments, StepRows
from gym_fed.serving.forward.target_modules import TargetModule

_DECODED_ROWS = 1024
"""Number of rows of a packed matrix that are decoded at a time."""


class BaseLinear(Protocol):
    """The interface of a matrix ``[out, in]`` in any format."""

    def multiply(self, x: Tensor, y: Tensor) -> None:
        """Compute ``y[n, out] = x[n, in] @ W.T``, both float32 on the CPU."""

    def record(self, program: Program, x: Tensor, y: Tensor) -> bool:
        """Add the product to a program; return False if it cannot be recorded."""


class NotRecordable(Exception):
    """Raised when a step to be recorded does not consist only of native calls."""


class TorchLinear:
    """A module's own weight in float32 or bfloat16; activations are rounded to its dtype, as in the module.

    Attributes:
        wide: Whether to keep activations in float32 instead.
    """

    wide = False

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._transposed = weight, weight.T

    def multiply(self, x: Tensor, y: Tensor) -> None:
        if self._weight.dtype == torch.float32:
            torch.mm(x, self._transposed, out=y)
        elif self.wide:
            y.copy_(wide_product(x, self._weight))
        else:
            y.copy_(functional.linear(x.to(self._weight.dtype), self._weight))

    def record(self, program: Program, x: Tensor, y: Tensor) -> bool:
        return False


class DecodedLinear:
    """A packed matrix that torch multiplies in decoded blocks: slow, but independent of the packed kernels."""

    def __init__(self, packed: PackedLinear) -> None:
        self.packed = packed

    def multiply(self, x: Tensor, y: Tensor) -> None:
        for start in range(0, self.packed.rows, _DECODED_ROWS):
            stop = min(self.packed.rows, start + _DECODED_ROWS)
            y[:, start:stop] = x @ self.packed.decode_block(start, stop).T

    def record(self, program: Program, x: Tensor, y: Tensor) -> bool:
        return False


class Projection:
    """Linear modules with the same input, whose outputs are concatenated to ``[n, size]``.

    Args:
        modules: The modules.
        targets: The target module of each; None if variants cannot change it.
    """

    def __init__(self, modules: Sequence[nn.Linear], targets: Sequence[TargetModule | None]) -> None:
        stops = torch.tensor([module.out_features for module in modules]).cumsum(0).tolist()
        places = list(zip([0, *stops], stops, strict=False))
        self.size = stops[-1]
        self._modules = tuple(modules)
        self._places = [slice(*place) for place in places]
        self._targets = [
            (t, slice(*place)) for t, place in zip(targets, places, strict=True) if t is not None
        ]
        self._linears: list[tuple[BaseLinear, slice]] = [
            (TorchLinear(module.weight.detach()), slice(*place))
            for module, place in zip(modules, places, strict=True)
        ]
        biases = [module.bias for module in modules]
        self._bias = None
        if any(bias is not None for bias in biases):
            wide = [
                torch.zeros(module.out_features) if bias is None else bias.detach().to(torch.float32)
                for module, bias in zip(modules, biases, strict=True)
            ]
            self._bias = torch.cat(wide)

    def compare(self, begin: bool) -> None:
        """Turn comparison mode on or off; in it, activations are float32 and packed weights are decoded."""
        for number, (linear, part) in enumerate(self._linears):
            if isinstance(linear, TorchLinear):
                linear.wide = begin
            elif begin and isinstance(linear, PackedLinear):
                self._linears[number] = DecodedLinear(linear), part
            elif not begin and isinstance(linear, DecodedLinear):
                self._linears[number] = linear.packed, part

    def project(self, x: Tensor, y: Tensor, step: StepRows | None) -> None:
        """Compute ``y = x @ W.T + bias``, and add the terms of the rows' variants.

        Args:
            x: ``[n, in]`` float32, contiguous.
            y: ``[n, size]`` float32, contiguous; overwritten.
            step: The variants; None: all rows belong to the base.
        """
        for linear, part in self._linears:
            if part.stop - part.start == self.size:
                linear.multiply(x, y)
            elif len(x) == 1 or isinstance(linear, TorchLinear):
                linear.multiply(x, y[:, part])
            else:
                product = torch.empty(len(x), part.stop - part.start)
                linear.multiply(x, product)
                y[:, part] = product
        if self._bias is not None:
            y += self._bias
        if step is None:
            return
        self._add_variants(x, y, step)

    def record(
        self, program: Program, x: Tensor, y: Tensor, step: StepRows | None
    ) -> Counter[tuple[str, str]]:
        """Record ``project`` in a program, for rows that are not bulk.

        Returns:
            The number of multiplications of its terms, by form and kernel.

        Raises:
            NotRecordable: If a part of ``project`` is not a native call.
        """
        for linear, part in self._linears:
            if not linear.record(program, x, y[:, part]):
                raise NotRecordable
        if self._bias is not None:
            program.add_bias(self._bias, y)
        if step is None or all(step.active.plan(target) is None for target, _ in self._targets):
            return Counter()
        bound = bound_terms(step.active, self._targets, step.path)
        if bound is None or not bound.record(program, x, y):
            raise NotRecordable
        for target, part in bound.rest:
            plan = step.active.plan(target)
            if plan is None or plan.dense or not bound.done.issuperset(plan.packed):
                raise NotRecordable
            if plan.biases is not None:
                program.add_bias(plan.biases, y[:, part])
        return bound.signs + bound.factors

    def _add_variants(self, x: Tensor, y: Tensor, step: StepRows) -> None:
        if not self._targets:
            return
        rows = step.head if self._targets[0][0].head else step.body
        bound = bound_terms(step.active, self._targets, step.path)
        targets: Targets = self._targets
        if bound is not None and rows.spans:
            bound.add(x, y, rows, step.products)
            targets = self._targets if rows.bulk else bound.rest
        for target, part in targets:
            plan = step.active.plan(target)
            if plan is not None:
                step.forget_input()
                done = () if bound is None else bound.done
                segments.add_linear(target, plan, step, x, y[:, part], done)

    def layers(self, *formats: str, name: str) -> Layers:
        """Return the matrices that ``pack`` creates; adjacent modules with the same format are joined.

        Args:
            formats: The format of every module.
            name: The name in the base's packed file.
        """
        cols = self._modules[0].in_features
        return {
            f"{name}.{start}": (formats[start], self._places[stop - 1].stop - self._places[start].start, cols)
            for start, stop in _runs(formats)
        }

    def pack(self, *formats: str, name: str, pack: Pack = pack_in_memory) -> int:
        """Pack the weights; the modules' own weights are freed.

        Args:
            formats: The format of every module.
            name: The name in the base's packed file.
            pack: Function that packs a matrix, or reads it from that file.

        Returns:
            The number of bytes that a product with one row reads.
        """
        self._linears = []
        num_bytes = 0
        for start, stop in _runs(formats):
            weights = [module.weight.detach() for module in self._modules[start:stop]]
            packed = pack(f"{name}.{start}", formats[start], weights)
            part = slice(self._places[start].start, self._places[stop - 1].stop)
            self._linears.append((packed, part))
            num_bytes += packed.nbytes
        for module in self._modules:
            release_pages(module.weight)  # the embedding may keep it, but needs few of its rows
            module.weight = nn.Parameter(module.weight.detach()[:0].clone(), requires_grad=False)
        return num_bytes


def _runs(formats: Sequence[str]) -> list[tuple[int, int]]:
    """Return the start and end of each run of adjacent modules with the same format."""
    starts = [n for n, format in enumerate(formats) if n == 0 or formats[n - 1] != format]
    return list(zip(starts, [*starts[1:], len(formats)], strict=True))


Targets = Sequence[tuple[TargetModule, slice]]
"""The modules of a projection, and the columns of each in the common output."""
Add = Callable[[int, int, int, int, int], None]
"""A native call that adds terms, from the addresses of ``x``, the rows' variants, and ``y``."""


@dataclass(frozen=True, eq=False)
class Bound:
    """The terms that one or two native calls add.

    Attributes:
        done: The deltas that the calls multiply; packed ones only for rows that are not bulk.
        signs: Number of multiplied packed deltas, by form and kernel.
        factors: Number of multiplied factor deltas, by form and kernel.
        rest: Modules with further terms, which the calls do not add.
    """

    done: frozenset[Packed | Factors]
    signs: Counter[tuple[str, str]]
    factors: Counter[tuple[str, str]]
    rest: Targets
    _add_signs: Add | None
    _add_factors: Add | None
    _terms: BoundTerms | None
    _low_rank: FactorTerms | None

    def record(self, program: Program, x: Tensor, y: Tensor) -> bool:
        """Record ``add`` in a program, for rows that are not bulk; return False if it cannot be recorded."""
        if self._terms is not None and not self._terms.record(program, x, y):
            return False
        if self._low_rank is not None:
            self._low_rank.record(program, x, y)
        return True

    def add(self, x: Tensor, y: Tensor, rows: Segments, products: Counter[tuple[str, str]]) -> None:
        """Add the terms; packed ones only for the rows that are not bulk.

        Args:
            x: ``[n, in]`` float32, contiguous.
            y: ``[n, out]`` float32, contiguous.
            rows: The variants of the rows.
            products: The counter of products, which is updated.
        """
        if self._add_signs is not None and len(rows.few_index):
            self._add_signs(x.data_ptr(), len(x), rows.few_owners_at, y.data_ptr(), y.shape[1])
            products.update(self.signs)
        if self._add_factors is not None:
            self._add_factors(x.data_ptr(), len(x), rows.owners.data_ptr(), y.data_ptr(), y.shape[1])
            products.update(self.factors)


def bound_terms(active: ActiveVariants, targets: Targets, path: str) -> Bound | None:
    """Bind terms to native calls; return None without native code, or for deltas that it cannot read."""
    key = targets[0][0].module, path
    if key not in active.bound:
        active.bound[key] = _bound(active, targets, path)
    bound: Bound | None = active.bound[key]
    return bound


def _bound(active: ActiveVariants, targets: Targets, path: str) -> Bound | None:
    if path == "torch":
        return None
    signs: list[tuple[Packed, SignBatch, int]] = []
    factors: list[tuple[Factors, FactorMatrix]] = []
    rest: list[tuple[TargetModule, slice]] = []
    for target, part in targets:
        plan = active.plan(target)
        if plan is None:
            continue
        more = bool(plan.dense) or plan.biases is not None
        for packed in plan.packed:
            if isinstance(packed.batch, SignBatch) and packed.batch.native:
                signs.append((packed, packed.batch, part.start))
            else:
                more = True
        if plan.factors is not None:
            factors.append(
                (plan.factors, FactorMatrix(part.stop - part.start, part.start, plan.factors.pairs))
            )
        if more:
            rest.append((target, part))
    if not signs and not factors:
        return None
    terms = None
    if signs:
        terms = BoundTerms(
            [batch for _, batch, _ in signs],
            [column for _, _, column in signs],
            [packed.place for packed, _, _ in signs],
        )
    low_rank = None
    if factors:
        a, _ = next(iter(factors[0][0].pairs.values()))
        low_rank = FactorTerms([matrix for _, matrix in factors], len(active.variants), a.shape[1])
    return Bound(
        frozenset([packed for packed, _, _ in signs] + [held for held, _ in factors]),
        Counter((packed.form, batch.kernel) for packed, batch, _ in signs),
        Counter({(Factors.form, "native"): len(factors)}),
        rest,
        None if terms is None else terms.bind(path),
        None if low_rank is None else low_rank.bind(path),
        terms,
        low_rank,
    )


_WIDE_CHUNK = 1 << 20
"""Number of weights that ``wide_product`` converts at a time."""


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x[..., in] @ weight.T`` in float32, a block of rows at a time, without a copy of the whole weight.

    The pages of a memory-mapped weight are released, since comparisons read all layers before any is packed.
    """
    rows, cols = weight.shape
    wide, step = x.to(torch.float32).reshape(-1, cols), max(1, _WIDE_CHUNK // cols)
    product = torch.empty(len(wide), rows, device=weight.device)
    buffer = torch.empty(min(step, rows), cols, device=weight.device)
    for start in range(0, rows, step):
        block = weight[start : start + step]
        torch.mm(wide, buffer[: len(block)].copy_(block).T, out=product[:, start : start + len(block)])
    release_pages(weight)
    return product.reshape(*x.shape[:-1], rows)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute activations in float32 within the block; weights are converted block by block.

    Args:
        model: A model with only linear layers and embeddings from ``torch.nn``, and norms that follow their input's
            dtype.
    """
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.dtype != torch.float32:
            module.forward = partial(_linear, module)  # type: ignore[method-assign]
            undo.append(partial(delattr, module, "forward"))
        elif isinstance(module, nn.Embedding):
            undo.append(module.register_forward_hook(lambda _module, _args, output: output.float()).remove)
    try:
        yield
    finally:
        for step in undo:
            step()


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    product = wide_product(x, module.weight)
    return product if module.bias is None else product + module.bias.float()
