"""The state of a training between two steps: trained weights and AdamW's moments, with their digest."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments in a state, each named ``<parameter>.<moment>``."""


def trained_parameters(model: Any) -> dict[str, Any]:
    """Return the parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def take_state(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Copy the trained weights, and the moments of every parameter that has them, to the CPU."""
    state = {}
    for name, parameter in trained_parameters(model).items():
        state[name] = parameter.detach().to("cpu", copy=True).contiguous()
        moments = {} if optimizer is None else optimizer.state.get(parameter, {})
        for moment in MOMENTS:
            if moment in moments:
                state[f"{name}.{moment}"] = moments[moment].detach().to("cpu", copy=True).contiguous()
    return state


def put_weights(model: Any, state: Mapping[str, Tensor]) -> None:
    """Copy a state's weights into a model."""
    with torch.no_grad():
        for name, parameter in trained_parameters(model).items():
            parameter.copy_(state[name])


def put_state(model: Any, optimizer: Any, state: Mapping[str, Tensor], steps_done: int) -> None:
    """Copy a state into a model and its AdamW optimiser, which is then as after ``steps_done`` steps."""
    put_weights(model, state)
    for name, parameter in trained_parameters(model).items():
        moments = {m: state[f"{name}.{m}"] for m in MOMENTS if f"{name}.{m}" in state}
        optimizer.state.pop(parameter, None)
        if moments:
            step = torch.tensor(float(steps_done), device=parameter.device)
            copies = {m: tensor.to(parameter.device, copy=True) for m, tensor in moments.items()}
            optimizer.state[parameter] = {"step": step, **copies}


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return the hex sha256 of a state's names, dtypes, shapes and values."""
    return _digest(state)


def batch_digest(micro_batches: list[Mapping[str, Any]]) -> str:
    """Return the hex sha256 of a step's batches: of every tensor in them, such as token ids and labels."""
    whole = hashlib.sha256()
    for batch in micro_batches:
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        whole.update(bytes.fromhex(_digest(tensors)))
    return whole.hexdigest()


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def relative_distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], scale: float) -> float:
    """Return the L2 norm of ``found - expected`` over all tensors, divided by ``scale``; 0 if they are equal."""
    squares = sum(
        float((found[name].double() - tensor.double()).square().sum()) for name, tensor in expected.items()
    )
    if squares == 0.0:
        return 0.0
    return squares**0.5 / scale if scale > 0.0 else float("inf")


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Return the L2 norm over all tensors."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))
