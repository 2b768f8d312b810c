"""The state of a training between two steps: trained weights and AdamW's moments, with their digest.

A state is up to three vectors, ``[n]`` each, of all trained parameters in the model's order: ``weights``, and after
the first step ``exp_avg`` and ``exp_avg_sq``. Vectors instead of a tensor per parameter keep the record fast.
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
    """Copy weights to the CPU, with the moments of an AdamW optimiser if one is given."""
    state = {WEIGHTS: _vector([parameter.detach() for parameter in parameters])}
    if optimizer is not None:
        for moment in MOMENTS:
            found = (optimizer.state.get(parameter, {}).get(moment) for parameter in parameters)
            # A parameter that never had a gradient has no moments.
            state[moment] = _vector(
                [torch.zeros_like(p) if m is None else m for p, m in zip(parameters, found, strict=True)]
            )
    return state


def put_weights(parameters: Sequence[Any], state: Mapping[str, Tensor]) -> None:
    """Copy a state's weights into parameters."""
    with torch.no_grad():
        for parameter, values in zip(parameters, _split(state[WEIGHTS], parameters), strict=True):
            parameter.copy_(values)


def put_state(
    parameters: Sequence[Any], optimizer: Any, state: Mapping[str, Tensor], steps_done: int
) -> None:
    """Copy a state into parameters and their AdamW optimiser, which is then as after ``steps_done`` steps."""
    put_weights(parameters, state)
    moments = {moment: _split(state[moment], parameters) for moment in MOMENTS if moment in state}
    for number, parameter in enumerate(parameters):
        optimizer.state.pop(parameter, None)
        if moments:
            step = torch.tensor(float(steps_done), device=parameter.device)
            copies = {m: parts[number].to(parameter.device, copy=True) for m, parts in moments.items()}
            optimizer.state[parameter] = {"step": step, **copies}


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return the hex sha256 of a state."""
    return _digest(state)


def batch_digest(micro_batches: list[Mapping[str, Any]]) -> str:
    """Return the hex sha256 of a step's batches: of every tensor in them, such as token ids and labels."""
    whole = hashlib.sha256()
    for batch in micro_batches:
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        whole.update(bytes.fromhex(_digest(tensors)))
    return whole.hexdigest()


def relative_distance(found: Tensor, expected: Tensor, scale: float) -> float:
    """Return the L2 norm of ``found - expected`` divided by ``scale``; 0 if they are equal."""
    apart = float((found.double() - expected.double()).norm())
    if apart == 0.0:
        return 0.0
    return apart / scale if scale > 0.0 else float("inf")


def _vector(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).to("cpu")


def _split(vector: Tensor, parameters: Sequence[Any]) -> list[Tensor]:
    parts = torch.split(vector, [parameter.numel() for parameter in parameters])
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
