"""Carry a delta to another base as it is: the same signs, codes and factors, scales perhaps smaller."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gym_quant.codec import CodecError, Params, Payload
from gym_quant.registry import get_codec

from gym_fed.delta.file import DeltaFile
from gym_fed.delta.manifest import TensorRecord
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
        GymError: ``BASE_MISMATCH`` naming the first tensor that the new base has not, or in another shape;
            ``DELTA_INVALID`` naming one whose scales overflow their number format.
    """
    require_shapes(delta, onto)
    if scale <= 0.0:
        raise GymError(ErrorCode.USAGE, f"scale {scale:g} is not above 0", "at 0 nothing is left to carry")
    entries = [
        DeltaEntry(
            record.name,
            record.shape,
            record.codec,
            _scaled_params(record, scale),
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


def _alone(record: TensorRecord, scale: float) -> Params | None:
    """Parameters that scale the tensor without its payload, if its codec has such."""
    return record.params if scale == 1.0 else get_codec(record.codec).scaled_params(record.params, scale)


def _scaled_params(record: TensorRecord, scale: float) -> Params:
    params = _alone(record, scale)
    return record.params if params is None else params


def _payload(delta: DeltaFile, name: str, scale: float) -> Payload:
    record, payload = delta.record(name), delta.payload(name)
    if _alone(record, scale) is not None:
        return payload
    try:
        return get_codec(record.codec).scaled(payload, record.shape, record.params, scale)
    except CodecError as error:
        raise GymError(ErrorCode.DELTA_INVALID, f"tensor {name!r}: {error}") from error
