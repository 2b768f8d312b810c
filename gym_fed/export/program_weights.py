"""Comparison of the weights in a program's file with the model's.

Logits show the weights that some texts reach: not the embedding of a token that none of them has, nor an expert that
none of them is routed to. With 8 bits they show no small fault at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted

_SAME_MATRIX = 0.5
"""Maximum distance of a weight from the parameter that it was made of, relative to the parameter; others are at 1.4."""


@dataclass
class StoredWeight:
    """A weight as the file stores it.

    Attributes:
        values: The weight, float32; dequantised if it is stored in few bits.
        most: Maximum distance of a value from the parameter's, which broadcasts to ``values``.
        taken: True once a parameter was found in it.
    """

    values: Any
    most: Any = 0.0
    taken: bool = False


def compare_weights(weights: Iterable[StoredWeight], model: Any) -> dict[str, Any]:
    """Find each parameter of a model among a program's weights: as it is, transposed, or with 1 added (a norm's).

    Args:
        weights: The weights in the file.
        model: The model that it must hold, in float32.

    Returns:
        ``compared`` parameters; ``not_compared`` with the reason if the program has some in another form only.

    Raises:
        GymError: ``EXPORT_DIFFERS`` naming a parameter whose weight in the file has other values.
    """
    by_shape: dict[tuple[int, ...], list[StoredWeight]] = {}
    for weight in weights:
        by_shape.setdefault(tuple(weight.values.shape), []).append(weight)
    parameters = {name: value.detach().float() for name, value in model.named_parameters()}  # tied ones once
    others = [name for name, value in parameters.items() if not _take_same(value, by_shape)]
    for name in others:
        distance = _distance(parameters[name], by_shape)
        if distance < _SAME_MATRIX:
            raise GymError(
                ErrorCode.EXPORT_DIFFERS,
                f"the program differs from the source: its weight of {name} has other values, {distance:.3g} off "
                "relative to the source's; nothing was kept",
                "report this with the model's name; --skip-check writes it anyway",
            )
    result: dict[str, Any] = {"compared": len(parameters) - len(others)}
    if others:
        result["not_compared"] = (
            f"{counted(len(others), 'parameter')} are in the program in another form only"
        )
    return result


def _take_same(parameter: Any, by_shape: dict[tuple[int, ...], list[StoredWeight]]) -> bool:
    """Mark the weight that is this parameter; False if there is none. Equal parameters may share one."""
    for form in _forms(parameter):
        for weight in by_shape.get(tuple(form.shape), ()):
            if bool(((weight.values - form).abs() <= weight.most).all()):
                weight.taken = True
                return True
    return False


def _distance(parameter: Any, by_shape: dict[tuple[int, ...], list[StoredWeight]]) -> float:
    """Return the relative distance of the nearest weight that is no other parameter; infinite if there is none."""
    return min(
        (
            float((weight.values - form).norm() / form.norm().clamp(min=1e-30))
            for form in _forms(parameter)
            for weight in by_shape.get(tuple(form.shape), ())
            if not weight.taken
        ),
        default=float("inf"),
    )


def _forms(parameter: Any) -> list[Any]:
    return (
        [parameter, parameter + 1 if parameter.ndim == 1 else parameter.mT] if parameter.ndim else [parameter]
    )
