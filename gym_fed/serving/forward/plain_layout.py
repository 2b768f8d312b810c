"""The layout of a ``PlainModel``, whose modules are known: no forward is run, so no weight is read."""

from __future__ import annotations

from torch import nn

from gym_fed.serving.forward.plain_model import PlainModel, PlainNorm
from gym_fed.serving.forward.target_modules import Kind, ModelLayout, TargetModule, TargetParameter


def plain_layout(model: PlainModel, kernel: str) -> ModelLayout:
    """What ``ModelLayout.of`` finds by running the model."""
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    target_modules: list[TargetModule] = []
    kinds: dict[str, Kind] = {}
    for name, module in model.named_modules():
        own = {key: names[id(parameter)] for key, parameter in module.named_parameters(recurse=False)}
        if not own:
            continue
        weight, bias = own["weight"], own.get("bias")
        kinds[weight] = "matrix"
        if isinstance(module, PlainNorm):
            kinds[weight] = "norm"
            target = TargetModule(name, "norm", weight, None, eps=module.variance_epsilon)
        elif isinstance(module, nn.Embedding):
            target = TargetModule(name, "embedding", weight, None)
        else:
            target = TargetModule(name, "linear", weight, bias, head=module is model.lm_head)
        if bias is not None:
            kinds[bias] = "bias"
        target_modules.append(target)
    first = next(iter(parameters.values()))
    targets = {name: TargetParameter(tuple(one.shape), kinds[name]) for name, one in parameters.items()}
    dtype = str(first.dtype).removeprefix("torch.")
    return ModelLayout(targets, tuple(target_modules), dtype, str(first.device), kernel)
