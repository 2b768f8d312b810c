"""Compare the weights in an exported program with those of the model.

Logits depend only on weights that the probe texts reach: not on the embedding of a token that none of them contains,
nor on an expert that none of them is routed to. With 8 bits, the tolerance of logits hides small errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted

_MAX_STEPS = 0.51
"""Maximum rounding error in steps of a channel: half a step, and the scale's own rounding."""


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A weight as the file stores it.

    Attributes:
        values: The weight, float32; dequantised if it is stored in few bits.
        name: Its name in the file; a parameter of that name must have these values.
        levels: Steps between the smallest and largest value of a channel (the last dimension); 0: stored exactly.
    """

    values: Any
    name: str = ""
    levels: int = 0


def compare_weights(weights: Iterable[StoredWeight], model: Any) -> dict[str, Any]:
    """Find each parameter of a model among a program's weights: unchanged, transposed, or (for norms) with 1 added.

    A weight belongs to one parameter; equal parameters may share one. A weight in 8 bits may be off by the rounding
    error of the parameter's own steps, whatever scale the file gives.

    Args:
        weights: The weights in the file.
        model: The model that it must hold, in float32.

    Returns:
        ``compared``: the number of parameters; ``not_compared``: a note if the program has some only in another form.

    Raises:
        GymError: ``EXPORT_DIFFERS`` naming a parameter whose weight in the file (of the same name, or unmatched and of
            the same shape) has other values.
    """
    named = model.named_parameters(remove_duplicate=False)
    parameters = {name: value.detach().float() for name, value in named}
    found: dict[str, StoredWeight] = {}
    by_shape: dict[tuple[int, ...], list[StoredWeight]] = {}  # not yet matched to a parameter
    for weight in weights:
        if weight.name in parameters:
            found[weight.name] = weight
        else:
            by_shape.setdefault(tuple(weight.values.shape), []).append(weight)
    for name, weight in found.items():
        if not any(_matches(weight, form) for form in _forms(parameters[name])):
            raise _differs(name, parameters[name], weight)
    for name in [name for name in parameters if name not in found]:
        if (match := _of_value(parameters[name], by_shape)) is not None:
            by_shape[tuple(match.values.shape)].remove(match)
            found[name] = match
    for _, buffer in model.named_buffers():  # a program also stores them as weights
        shape, values = tuple(buffer.shape), buffer.float()
        by_shape[shape] = [weight for weight in by_shape.get(shape, ()) if not _matches(weight, values)]
    others = [name for name in parameters if name not in found]
    for name in others:
        if (nearest := _nearest_rest(parameters[name], by_shape)) is not None:
            raise _differs(name, parameters[name], nearest)
    matched = [parameters[name] for name in found]
    lost = [name for name in others if not any(parameters[name].equal(one) for one in matched)]
    result: dict[str, Any] = {"compared": len(list(model.parameters())) - len(lost)}
    if lost:
        result["not_compared"] = (
            f"{counted(len(lost), 'parameter', 'are')} stored in the program only in a different form"
        )
    return result


def _of_value(parameter: Any, by_shape: dict[tuple[int, ...], list[StoredWeight]]) -> StoredWeight | None:
    """Return the stored weight that matches a parameter; of several quantised ones, the nearest."""
    near: list[StoredWeight] = []
    for form in _forms(parameter):
        for weight in by_shape.get(tuple(form.shape), ()):
            if _matches(weight, form):
                if not weight.levels:
                    return weight
                near.append(weight)
    return min(near, key=lambda weight: _distance(parameter, weight), default=None)


def _matches(weight: StoredWeight, form: Any) -> bool:
    """Return True if the weight has the values of this form of a parameter; never for values that are not finite."""
    if weight.values.shape != form.shape:
        return False
    allowed: Any = 0.0
    if weight.levels:
        channels = form.reshape(-1, form.shape[-1])
        # Zero is one of the levels.
        span = channels.amax(0).clamp(min=0) - channels.amin(0).clamp(max=0)
        allowed = _MAX_STEPS * span / weight.levels
    return bool(((weight.values - form).abs() <= allowed).all())


def _nearest_rest(parameter: Any, by_shape: dict[tuple[int, ...], list[StoredWeight]]) -> StoredWeight | None:
    """Return the nearest of the unmatched weights of a parameter's shape; None if there is none."""
    shapes = {tuple(form.shape): None for form in _forms(parameter)}
    rest = [weight for shape in shapes for weight in by_shape.get(shape, ())]
    return min(rest, key=lambda weight: _distance(parameter, weight), default=None)


def _distance(parameter: Any, weight: StoredWeight) -> float:
    """Return the relative distance of a weight from the nearest form; infinite if it has no finite value."""
    found = [
        float((weight.values - form).norm() / form.norm().clamp(min=1e-30))
        for form in _forms(parameter)
        if form.shape == weight.values.shape
    ]
    return min((value for value in found if math.isfinite(value)), default=math.inf)


def _differs(name: str, parameter: Any, weight: StoredWeight) -> GymError:
    distance = _distance(parameter, weight)
    values = (
        "different values" if math.isfinite(distance) else "a different shape, or values that are not finite"
    )
    if math.isfinite(distance):
        values += f" (relative difference {distance:.3g})"
    return GymError(
        ErrorCode.EXPORT_DIFFERS,
        f"the program differs from the source: its weight {name} has {values}; nothing was written",
        "report this with the model's name; --skip-check writes it anyway",
    )


def _forms(parameter: Any) -> list[Any]:
    if not parameter.ndim:
        return [parameter]
    return [parameter, parameter + 1 if parameter.ndim == 1 else parameter.mT]
