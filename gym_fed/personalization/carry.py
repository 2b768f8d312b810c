"""Carry a delta to another base as it is: the same signs, codes and factors, scales perhaps smaller."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gym_quant import Params, Payload
from gym_quant.codecs.lora import is_quantised

from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, DeltaInfo, write_delta
from gym_fed.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec


def carry_delta(delta: DeltaFile, onto: BaseSpec, out: Path, scale: float = 1.0) -> DeltaInfo:
    """Write ``scale * delta`` as a delta of another base.

    At scale 1 the payload is the same to the bit; at others the scales (or values) are multiplied and rounded to their
    number format, and everything else is the same.

    Args:
        delta: Of the old base.
        onto: The new one.
        out: The new file.
        scale: Above 0.

    Raises:
        GymError: ``BASE_MISMATCH`` naming the first tensor that the new base has not, or in another shape.
    """
    require_shapes(delta, onto)
    if scale <= 0.0:
        raise GymError(ErrorCode.USAGE, f"scale {scale:g} is not above 0", "at 0 nothing is left to carry")
    entries = [
        DeltaEntry(
            record.name,
            record.shape,
            record.codec,
            scaled_params(record.codec, record.params, scale),
            partial(_payload, delta, record.name, scale),
        )
        for record in delta.manifest.tensors
    ]
    return write_delta(out, entries, onto, delta.manifest.extra)


def require_shapes(delta: DeltaFile, onto: BaseSpec) -> None:
    """Refuse a base that the delta does not fit.

    Raises:
        GymError: ``BASE_MISMATCH`` naming the tensor.
    """
    for record in delta.manifest.tensors:
        found = onto.shapes.get(record.name)
        if found != record.shape:
            has = "no such tensor" if found is None else f"it in shape {list(found)}"
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"tensor {record.name!r} {list(record.shape)}: the base {onto.model_name!r} has {has}",
                "a variant can be carried to a base of the same architecture only",
            )


def scaled_params(codec: str, params: Params, scale: float) -> Params:
    """Parameters of ``scale`` times a delta; factors as trained have their scaling there."""
    if codec != "lora" or is_quantised(params):
        return dict(params)
    product = float(params.get("scaling", 1.0)) * scale
    rest = {key: value for key, value in params.items() if key != "scaling"}
    return rest if product == 1.0 else {**rest, "scaling": product}


def scaled_payload(codec: str, params: Params, payload: Payload, scale: float) -> Payload:
    """The payload of ``scale`` times a delta: every codec is linear in its floating-point fields."""
    if scale == 1.0 or scaled_params(codec, params, scale) != dict(params):
        return dict(payload)

    def scales(field: str) -> bool:
        # A product of two sides: one of them is enough.
        return codec != "lora" or field.startswith("b")

    return {
        field: (tensor.float() * scale).to(tensor.dtype)
        if tensor.is_floating_point() and scales(field)
        else tensor
        for field, tensor in payload.items()
    }


def _payload(delta: DeltaFile, name: str, scale: float) -> Payload:
    record = delta.record(name)
    return scaled_payload(record.codec, record.params, delta.payload(name), scale)
