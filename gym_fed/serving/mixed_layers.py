"""Forward hooks that add, for each row of a step, the term of that row's variant; the base's weights are only read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gym_quant import CodecError
from gym_quant.resident import IndexArray
from torch import Tensor, nn

from gym_fed.serving.model_layout import ModelLayout, Site, normal_form
from gym_fed.serving.roster import Packed, Roster, RowMap, SitePlan


@dataclass
class MixedRows:
    """The step that is being computed: its variants and whose the rows are."""

    roster: Roster
    body: RowMap
    head: RowMap
    path: str
    """Of the sign kernels."""
    products: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Counts which form of packed deltas was multiplied in which way: for a bulk span it is ``decoded``."""
    _given: Tensor | None = None
    _few: Tensor | None = None

    def few(self, x: Tensor, flat: Tensor, rows: RowMap) -> Tensor:
        """The rows that are multiplied one by one, float32. Query, key and value share them: they have one input."""
        if self._given is not x or self._few is None:
            some = flat if rows.few is None else flat.index_select(0, rows.few)
            self._given, self._few = x, some.to(torch.float32).contiguous()
        return self._few


class MixedLayers:
    """The hooks of one model. Without ``rows`` they return at once."""

    def __init__(self, model: nn.Module, layout: ModelLayout) -> None:
        self.rows: MixedRows | None = None
        self._handles = []
        for site in layout.sites:
            module = model.get_submodule(site.module)
            self._handles.append(module.register_forward_hook(self._hook(site)))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, site: Site) -> Any:
        add = {"linear": _add_linear, "embedding": _add_embedding, "norm": _add_norm}[site.kind]

        def hook(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            rows = self.rows
            if rows is None:
                return
            plan = rows.roster.plan(site)
            if plan is not None:
                add(site, plan, rows, args[0], output)

        return hook


def _add_linear(site: Site, plan: SitePlan, step: MixedRows, x: Tensor, output: Tensor) -> None:
    rows = step.head if site.head else step.body
    flat, y = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
    for packed in plan.packed:
        index = rows.few_in(packed)
        if len(index) and (packed.place is None or bool((index >= 0).any())):
            step.products[packed.form, packed.batch.kernel] += 1
            _add_few(packed, index, rows, step.few(x, flat, rows), y, step.path)
        for variant, start, stop in rows.bulk:
            held = packed.by_variant.get(variant)
            if held is not None:
                step.products[packed.form, "decoded"] += 1
                held.add(flat[start:stop], y[start:stop])
    if plan.factors is not None and len(rows.owner):
        some = flat if rows.owned is None else flat.index_select(0, rows.owned)
        # Filled, not multiplied by 0: another's factors may be so large that its ranks are infinite here.
        inner = (some @ plan.factors.a.T).masked_fill_(rows.foreign(plan.factors.owners), 0.0)
        _add_to(y, rows.owned, inner @ plan.factors.b.T)
    if plan.dense:
        for variant, start, stop in rows.spans:
            if variant in plan.dense:
                y[start:stop] += flat[start:stop] @ plan.dense[variant].matrix.T
    if plan.biases is not None and len(rows.owner):
        _add_to(y, rows.owned, plan.biases.index_select(0, rows.owner))


def _add_few(packed: Packed, index: IndexArray, rows: RowMap, some: Tensor, y: Tensor, path: str) -> None:
    batch = packed.batch
    if batch.kernel != "lookup" and rows.few is None and y.dtype == torch.float32 and y.is_contiguous():
        batch.add(some, index, y, path)
        return
    term = torch.zeros(len(some), y.shape[1], device=y.device)
    try:
        batch.add(some, index, term, path)
    except CodecError:  # look-up cannot round what is not finite; the other rows are not to suffer for it
        finite = torch.isfinite(some).all(dim=1)
        term.zero_()
        batch.add(some, np.where(finite.numpy(), index, -1), term, path)
        term[~finite] = float("nan")
    _add_to(y, rows.few, term)


def _add_embedding(site: Site, plan: SitePlan, step: MixedRows, ids: Tensor, output: Tensor) -> None:
    flat, y = ids.reshape(-1), output.view(-1, output.shape[-1])
    for variant, start, stop in step.body.spans:
        operand = plan.lookups.get(variant)
        if operand is not None:
            term = operand.rows(flat[start:stop])
            y[start:stop] += term if site.multiplier == 1.0 else term * site.multiplier


def _add_norm(site: Site, plan: SitePlan, step: MixedRows, x: Tensor, output: Tensor) -> None:
    rows = step.body
    tokens, y = x.movedim(site.token_axis, 0), output.movedim(site.token_axis, 0)
    some = tokens if rows.owned is None else tokens.index_select(0, rows.owned)
    middle = (1,) * (some.ndim - 2)
    term: Tensor | float = 0.0
    if plan.vectors is not None:
        deltas = plan.vectors.index_select(0, rows.owner).reshape(len(some), *middle, -1)
        term = normal_form(some, site.normalised, site.eps).mul_(deltas)
    if plan.biases is not None:
        term = (
            plan.biases.index_select(0, rows.owner).reshape(len(some), *middle, -1).expand(some.shape) + term
        )
    assert isinstance(term, Tensor)
    _add_to(y, rows.owned, term)


def _add_to(y: Tensor, rows: Tensor | None, term: Tensor) -> None:
    """In the wider of both number formats, then rounded to ``y``'s."""
    if rows is None:
        y += term
    else:
        y[rows] = (y[rows] + term).to(y.dtype)
