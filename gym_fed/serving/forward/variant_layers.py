"""The hooks that add variants' terms to the modules of a transformers model. The base's weights are only read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from gym_fed.serving.forward import variant_terms
from gym_fed.serving.forward.active_variants import ModulePlan
from gym_fed.serving.forward.segments import StepRows
from gym_fed.serving.forward.target_modules import ModelLayout, TargetModule


class VariantLayers:
    """The hooks of one model. Without ``rows`` they return at once."""

    def __init__(self, model: nn.Module, layout: ModelLayout) -> None:
        self.rows: StepRows | None = None
        self._handles = []
        for target in layout.target_modules:
            module = model.get_submodule(target.module)
            if target.kind == "linear":
                self._handles.append(module.register_forward_pre_hook(self._before_linear(target)))
            self._handles.append(module.register_forward_hook(self._hook(target)))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_linear(self, target: TargetModule) -> Any:
        """Leaves the module no rows where base and delta are multiplied at once."""

        def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
            rows = self.rows
            if rows is None or rows.merged is None or target.weight is None:
                return None
            delta = rows.active.variants[0].weights.get(target.weight)
            rows.product = rows.merged.product(target.module, module, delta, args[0])
            return None if rows.product is None else (args[0][:, :0],)

        return hook

    def _hook(self, target: TargetModule) -> Any:
        adders: dict[str, Callable[..., None]] = {
            "linear": variant_terms.add_linear,
            "embedding": variant_terms.add_embedding,
            "norm": variant_terms.add_norm,
        }
        add = adders[target.kind]

        def hook(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            rows = self.rows
            if rows is None:
                return None
            plan = rows.active.plan(target)
            if plan is None:
                return None
            product, rows.product = rows.product, None
            if product is None:
                add(target, plan, rows, args[0], output)
            else:
                _add_to_merged(plan, rows, product)
            return product

        return hook


def _add_to_merged(plan: ModulePlan, step: StepRows, product: Tensor) -> None:
    for packed in plan.packed:
        step.products[packed.form, "decoded"] += 1
    if plan.biases is not None:
        product += plan.biases[0]
