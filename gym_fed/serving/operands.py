"""What a variant adds to one parameter of the base, in the form in which the mixed step computes with it.

A delta's codec decides: sign bits stay bits, LoRA stays factors, every other matrix is decoded once to the base's
dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from gym_quant import CodecError, get_codec
from gym_quant.codec import as_matrix
from gym_quant.codecs.lora import Lora
from gym_quant.kernels.resident import ResidentSigns
from gym_quant.kernels.sign_matrix import SignMatrix
from torch import Tensor

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.loaded import LoadedVariant, Operand
from gym_fed.serving.model_layout import ModelLayout, Slot

if TYPE_CHECKING:
    from gym_fed.delta.file import DeltaFile
    from gym_fed.delta.manifest import TensorRecord

__all__ = [
    "DenseOperand",
    "LoraOperand",
    "ModelLayout",
    "SignOperand",
    "VectorOperand",
    "load_operands",
    "loaded_variant",
]


@dataclass(frozen=True, eq=False)
class SignOperand(Operand):
    """One bit a weight, and scales: codec ``bitdelta``."""

    signs: ResidentSigns

    @property
    def resident_bytes(self) -> int:
        return self.signs.nbytes

    def rows(self, rows: Tensor) -> Tensor:
        return self.signs.decode_rows(rows)


@dataclass(frozen=True, eq=False)
class LoraOperand(Operand):
    """``scaling * b @ a``: ``a`` ``[r, in]``, ``b`` ``[out, r]`` in the number format of the file: codec ``lora``."""

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def resident_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def scaled_b(self, dtype: torch.dtype) -> Tensor:
        """``scaling * b`` in the number format of the step."""
        if self.scaling == 1.0:
            return self.b.to(dtype)
        return (self.b.to(torch.float32) * self.scaling).to(dtype)

    def rows(self, rows: Tensor) -> Tensor:
        return (self.b[rows].to(torch.float32) * self.scaling) @ self.a.to(torch.float32)


@dataclass(frozen=True, eq=False)
class DenseOperand(Operand):
    """The whole matrix ``[out, in]`` in the base's dtype: every other codec."""

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
    device = torch.device(layout.device)
    if slot.kind in ("norm", "bias"):
        return VectorOperand(delta.decode(record.name).to(device))
    transposed = slot.kind == "transposed"
    if record.codec == "bitdelta" and not transposed:
        payload = delta.payload(record.name)
        group = record.params.get("group_size")
        matrix = SignMatrix(
            payload["bits"],
            payload["scales"].to(torch.float32),
            as_matrix(record.shape)[1],
            None if group is None else int(group),
        )
        if layout.kernel == "lookup" and not matrix.whole_bytes:
            raise CodecError(
                f"group_size {matrix.group_size} is no multiple of 8, as kernel lookup needs: serve with exact"
            )
        return SignOperand(ResidentSigns.of(matrix, device))
    codec = get_codec(record.codec)
    if isinstance(codec, Lora):
        a, b = codec.factors(delta.payload(record.name), record.shape, record.params)
        if transposed:
            a, b = b.T, a.T
        a, b = (f.to(device, copy=True).contiguous() for f in (a, b))
        scaling = float(record.params.get("scaling", 1.0))
        dtype = getattr(torch, layout.dtype)
        _require_finite("factor A", a.to(dtype))
        operand = LoraOperand(a, b, scaling)
        scaled = operand.scaled_b(dtype)
        _require_finite(f"factor B times its scaling {scaling}", scaled)
        # Scaled once where that takes no more memory, so that a new roster has only to put factors side by side.
        return LoraOperand(a, scaled, 1.0) if scaled.dtype == b.dtype else operand
    dense = delta.decode(record.name).reshape(as_matrix(record.shape))
    dtype = getattr(torch, layout.dtype)
    dense = (dense.T if transposed else dense).to(device, dtype).contiguous()
    _require_finite("the delta", dense)
    return DenseOperand(dense)


def _require_finite(what: str, values: Tensor) -> None:
    """In the number format in which the step computes: factors of all variants are in one product there.

    Raises:
        CodecError: For infinities and NaN.
    """
    if not bool(torch.isfinite(values).all()):
        raise CodecError(f"{what} is not finite in the base's {str(values.dtype).removeprefix('torch.')}")
