"""What a variant adds to one parameter of the base, in the form in which the mixed step computes with it.

A delta's codec decides (``Codec.resident``): a form that stays packed, or factors; what has none is decoded once to the
base's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from gym_quant import CodecError, get_codec
from gym_quant.codec import as_matrix
from gym_quant.resident import Resident, ResidentFactors, Transposed
from torch import Tensor

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.forward.loaded import LoadedVariant, Operand
from gym_fed.serving.forward.target_modules import ModelLayout, Slot

if TYPE_CHECKING:
    from gym_fed.delta.file import DeltaFile
    from gym_fed.delta.manifest import TensorRecord

__all__ = [
    "DenseOperand",
    "FactorOperand",
    "ModelLayout",
    "PackedOperand",
    "VectorOperand",
    "load_operands",
    "loaded_variant",
]


@dataclass(frozen=True, eq=False)
class PackedOperand(Operand):
    """Packed as the codec says, ``[out, in]``: sign bits and scales, codes and scales, or a form of another author."""

    held: Resident

    @property
    def resident_bytes(self) -> int:
        return self.held.nbytes

    def rows(self, rows: Tensor) -> Tensor:
        return self.held.decode_rows(rows)


@dataclass(frozen=True, eq=False)
class FactorOperand(Operand):
    """A low-rank delta as its factors; ``transposed`` where the parameter lies ``[in, out]``."""

    held: ResidentFactors
    transposed: bool = False

    @property
    def resident_bytes(self) -> int:
        return self.held.nbytes

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``[r, in]`` and ``[out, r]``, the scaling in one of them, in the number format of the step."""
        a, b = self.held.factors(dtype)
        return (b.T, a.T) if self.transposed else (a, b)

    def rows(self, rows: Tensor) -> Tensor:
        return self.held.decode_rows(rows)


@dataclass(frozen=True, eq=False)
class DenseOperand(Operand):
    """The whole matrix ``[out, in]`` in the base's dtype: codecs without a packed form."""

    matrix: Tensor

    @property
    def resident_bytes(self) -> int:
        return self.matrix.nbytes

    def rows(self, rows: Tensor) -> Tensor:
        return self.matrix[rows]


@dataclass(frozen=True, eq=False)
class VectorOperand(Operand):
    """A norm's weight or a bias, float32: any codec."""

    values: Tensor

    @property
    def resident_bytes(self) -> int:
        return self.values.nbytes


def load_operands(delta: DeltaFile, layout: ModelLayout) -> dict[str, Operand]:
    """Bring a delta into memory. Nothing of it views the file afterwards, and the file's pages are given back.

    Raises:
        GymError: ``BASE_MISMATCH`` for a tensor that the base has not or has in another shape; ``MODEL_INVALID`` for
            one that the mixed step cannot add to; ``DELTA_INVALID`` where its codec does not do. All name the tensor.
    """
    found: dict[str, Operand] = {}
    for record in delta.manifest.tensors:
        slot = layout.slots.get(record.name)
        if slot is None or slot.shape != record.shape:
            there = list(slot.shape) if slot is not None else "absent"
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{delta.path}: tensor {record.name!r} {list(record.shape)} does not fit the base: {there}",
                "use the base the delta was made from",
            )
        if slot.refusal:
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{delta.path}: tensor {record.name!r} cannot be served as a variant: {slot.refusal}",
                "leave this tensor out of the delta, or merge the delta and serve the merged model",
            )
        try:
            found[record.name] = _operand(delta, record, slot, layout)
        except CodecError as error:
            raise GymError(
                ErrorCode.DELTA_INVALID, f"{delta.path}: tensor {record.name!r}: {error}"
            ) from error
        delta.release(record.name)
    return found


def loaded_variant(name: str, delta: DeltaFile, layout: ModelLayout, sha256: str) -> LoadedVariant:
    """A variant ready for a batch; raises as ``load_operands``."""
    operands = load_operands(delta, layout)
    return LoadedVariant(name, sha256, operands, sum(o.resident_bytes for o in operands.values()))


def _operand(delta: DeltaFile, record: TensorRecord, slot: Slot, layout: ModelLayout) -> Operand:
    device, dtype = torch.device(layout.device), getattr(torch, layout.dtype)
    if slot.kind in ("norm", "bias"):
        return VectorOperand(delta.decode(record.name).to(device))
    transposed = slot.kind == "transposed"
    held = get_codec(record.codec).resident(delta.payload(record.name), record.shape, record.params, device)
    if held is None:
        dense = delta.decode(record.name).reshape(as_matrix(record.shape))
        dense = (dense.T if transposed else dense).to(device, dtype).contiguous()
        _require_finite("the delta", dense)
        return DenseOperand(dense)
    if isinstance(held, ResidentFactors):
        a, b = held.factors(dtype)
        _require_finite("factor A", a)
        _require_finite(f"factor B times its scaling {held.scaling}", b)
        return FactorOperand(held.scaled_once(dtype), transposed)
    _require_finite("the delta", torch.tensor(held.largest()).to(dtype))
    if transposed:
        held = Transposed(held)
    held.check_kernel(layout.kernel)
    return PackedOperand(held)


def _require_finite(what: str, values: Tensor) -> None:
    """In the number format in which the step computes: factors of all variants are in one product there.

    Raises:
        CodecError: For infinities and NaN.
    """
    if not bool(torch.isfinite(values).all()):
        raise CodecError(f"{what} is not finite in the base's {str(values.dtype).removeprefix('torch.')}")
