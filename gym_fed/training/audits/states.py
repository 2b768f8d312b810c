"""Copy, restore and digest the state of a training run between two steps: trained weights and AdamW's moments.

A state has up to three vectors ``[n]`` over all trained parameters, in the model's order: ``weights``, and after the
first step also ``exp_avg`` and ``exp_avg_sq``. Single vectors are faster to record than one tensor per parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")


def trained_parameters(model: Any) -> list[Any]:
    """Return the parameters that are trained, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def take_state(parameters: Sequence[Any], optimizer: Any = None) -> dict[str, Tensor]:
    """Copy the weights to the CPU, and the moments of an AdamW optimiser if one is given."""
    state = {WEIGHTS: _vector([parameter.detach() for parameter in parameters])}
    if optimizer is not None:
        for moment in MOMENTS:
            # A parameter that has never had a gradient has no moments.
            moments = [optimizer.state.get(parameter, {}).get(moment) for parameter in parameters]
            pairs = zip(parameters, moments, strict=True)
            state[moment] = _vector([torch.zeros_like(p) if m is None else m for p, m in pairs])
    return state


def put_weights(parameters: Sequence[Any], state: Mapping[str, Tensor]) -> None:
    """Copy a state's weights into parameters."""
    with torch.no_grad():
        for parameter, values in zip(parameters, _split(state[WEIGHTS], parameters), strict=True):
            parameter.copy_(values)


def put_state(
    parameters: Sequence[Any], optimizer: Any, state: Mapping[str, Tensor], steps_done: int
) -> None:
    """Copy a state to the parameters and their AdamW optimiser, as they were after ``steps_done`` steps."""
    put_weights(parameters, state)
    moments = {moment: _split(state[moment], parameters) for moment in MOMENTS if moment in state}
    for number, parameter in enumerate(parameters):
        optimizer.state.pop(parameter, None)
        if moments:
            step = torch.tensor(float(steps_done), device=parameter.device)
            copies = {m: parts[number].to(parameter.device, copy=True) for m, parts in moments.items()}
            optimizer.state[parameter] = {"step": step, **copies}


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors with their names, dtypes and shapes, as a hexadecimal string."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().to("cpu").contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def batch_digest(micro_batches: list[Mapping[str, Any]]) -> str:
    """Return the SHA-256 of all tensors in a step's batches, such as token ids and labels, as a hexadecimal string."""
    digest = hashlib.sha256()
    for batch in micro_batches:
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        digest.update(bytes.fromhex(state_digest(tensors)))
    return digest.hexdigest()


def relative_distance(values: Tensor, expected: Tensor, scale: float) -> float:
    """Return the L2 norm of ``values - expected`` divided by ``scale``; 0 if they are equal."""
    distance = float((values.double() - expected.double()).norm())
    if distance == 0.0:
        return 0.0
    return distance / scale if scale > 0.0 else float("inf")


def _vector(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).to("cpu")


def _split(vector: Tensor, parameters: Sequence[Any]) -> list[Tensor]:
    parts = torch.split(vector, [parameter.numel() for parameter in parameters])
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
