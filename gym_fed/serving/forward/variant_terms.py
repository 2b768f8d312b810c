"""The terms that the variants of a step add at a module, each to its own rows.

``x`` and the output are in the base's dtype, or in float32 with deltas in the base's.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from gym_quant.kernels.resident import SignBatch
from gym_quant.resident import IndexArray
from torch import Tensor

from gym_fed.serving.forward.active_variants import Factors, ModulePlan, Packed
from gym_fed.serving.forward.segments import Segments, StepRows
from gym_fed.serving.forward.target_modules import TargetModule, normal_form


def add_linear(
    target: TargetModule,
    plan: ModulePlan,
    step: StepRows,
    x: Tensor,
    output: Tensor,
    bound: Collection[Packed | Factors] = (),
) -> None:
    """Add the terms of a linear layer with the input ``x`` ``[..., in]`` to ``output`` ``[..., out]``.

    For modules in ``bound``, factors are already added to all rows, and packed terms to rows that are not bulk.
    """
    rows = step.head if target.head else step.body
    flat, y = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
    for packed in plan.packed:
        index = rows.few_in(packed)
        if packed not in bound and len(index) and (packed.place is None or bool((index >= 0).any())):
            step.products[packed.form, packed.batch.kernel] += 1
            _add_few(packed, index, rows, step, step.few(x, flat, rows), y)
        for variant, start, stop in rows.bulk:
            held = packed.by_variant.get(variant)
            if held is not None:
                step.products[packed.form, "decoded"] += 1
                held.add(flat[start:stop], y[start:stop])
    if plan.factors is not None and plan.factors not in bound and len(rows.owner):
        step.products[Factors.form, "torch"] += 1
        a, b, owners = plan.factors.stacked
        some = flat if rows.owned is None else flat.index_select(0, rows.owned)
        # Filled, not multiplied by 0: another variant's factors may be so large that they give infinities here.
        inner = (some.to(a.dtype) @ a.T).masked_fill_(rows.foreign(owners), 0.0)
        _add_to(y, rows.owned, inner @ b)
    if plan.dense:
        for variant, start, stop in rows.spans:
            if variant in plan.dense:
                matrix = plan.dense[variant].matrix
                y[start:stop] += flat[start:stop].to(matrix.dtype) @ matrix.T
    if plan.biases is not None and len(rows.owner):
        _add_to(y, rows.owned, plan.biases.index_select(0, rows.owner))


def _add_few(
    packed: Packed, index: IndexArray, rows: Segments, step: StepRows, some: Tensor, y: Tensor
) -> None:
    batch = packed.batch
    direct = rows.few is None and y.dtype == torch.float32 and (batch.any_stride or y.is_contiguous())
    target = y if direct else torch.zeros(len(some), y.shape[1], device=y.device)
    tables = step.tables(batch, some)
    if tables is None:
        batch.add(some, index, target, step.path)
    else:
        batch.add(some, index, target, step.path, tables)
    if not direct:
        _add_to(y, rows.few, target)


def add_embedding(
    target: TargetModule, plan: ModulePlan, step: StepRows, ids: Tensor, output: Tensor
) -> None:
    """Add the terms of an embedding of ``ids`` to ``output`` ``[..., hidden]``."""
    flat, y = ids.reshape(-1), output.view(-1, output.shape[-1])
    for packed in plan.packed:
        assert isinstance(packed.batch, SignBatch)
        direct = y.dtype == torch.float32 and target.multiplier == 1.0
        to = y if direct else torch.zeros(y.shape, dtype=torch.float32)
        packed.batch.add_rows(step.body.all_in(packed), flat, to)
        if not direct:
            y += to * target.multiplier
    for variant, start, stop in step.body.spans if plan.lookups else ():
        weight = plan.lookups.get(variant)
        if weight is not None:
            term = weight.rows(flat[start:stop])
            y[start:stop] += term if target.multiplier == 1.0 else term * target.multiplier


def add_norm(target: TargetModule, plan: ModulePlan, step: StepRows, x: Tensor, output: Tensor) -> None:
    """Add the terms of a norm of ``x`` to ``output``."""
    rows = step.body
    tokens, y = x.movedim(target.token_axis, 0), output.movedim(target.token_axis, 0)
    some = tokens if rows.owned is None else tokens.index_select(0, rows.owned)
    middle = (1,) * (some.ndim - 2)
    term: Tensor | float = 0.0
    if plan.vectors is not None:
        deltas = plan.vectors.index_select(0, rows.owner).reshape(len(some), *middle, -1)
        term = normal_form(some, target.normalised, target.eps).mul_(deltas)
    if plan.biases is not None:
        term = (
            plan.biases.index_select(0, rows.owner).reshape(len(some), *middle, -1).expand(some.shape) + term
        )
    assert isinstance(term, Tensor)
    _add_to(y, rows.owned, term)


def _add_to(y: Tensor, rows: Tensor | None, term: Tensor) -> None:
    """Add in the wider of the two dtypes, then round to ``y``'s."""
    if rows is None:
        y += term
    else:
        y[rows] = (y[rows] + term).to(y.dtype)
