"""Delta = tuned - base: file format, diff, apply, digest. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.delta.apply import apply_delta
    from gym_fed.delta.base import BaseSpec, model_tensors, tensors_digest
    from gym_fed.delta.encode import (
        EncodeReport,
        Refine,
        TensorReport,
        encode_delta,
        encode_source,
        lora_delta,
    )
    from gym_fed.delta.factors import lora_factors
    from gym_fed.delta.feedback import ErrorFeedback
    from gym_fed.delta.file import DeltaFile, DeltaLimits
    from gym_fed.delta.writer import DeltaEntry, DeltaInfo, write_delta

__all__ = [
    "BaseSpec",
    "DeltaEntry",
    "DeltaFile",
    "DeltaInfo",
    "DeltaLimits",
    "EncodeReport",
    "ErrorFeedback",
    "Refine",
    "TensorReport",
    "apply_delta",
    "encode_delta",
    "encode_source",
    "lora_delta",
    "lora_factors",
    "model_tensors",
    "tensors_digest",
    "write_delta",
]

__getattr__ = lazy(
    __name__,
    BaseSpec="gym_fed.delta.base",
    DeltaEntry="gym_fed.delta.writer",
    DeltaFile="gym_fed.delta.file",
    DeltaInfo="gym_fed.delta.writer",
    DeltaLimits="gym_fed.delta.file",
    EncodeReport="gym_fed.delta.encode",
    ErrorFeedback="gym_fed.delta.feedback",
    Refine="gym_fed.delta.encode",
    TensorReport="gym_fed.delta.encode",
    apply_delta="gym_fed.delta.apply",
    encode_delta="gym_fed.delta.encode",
    encode_source="gym_fed.delta.encode",
    lora_delta="gym_fed.delta.encode",
    lora_factors="gym_fed.delta.factors",
    model_tensors="gym_fed.delta.base",
    tensors_digest="gym_fed.delta.base",
    write_delta="gym_fed.delta.writer",
)
