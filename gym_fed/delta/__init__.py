"""Delta = tuned - base: file format, diff, apply, digest."""

from gym_fed.delta.apply import apply_delta
from gym_fed.delta.base import BaseSpec, model_tensors, tensors_digest
from gym_fed.delta.encode import EncodeReport, TensorReport, encode_delta, encode_source, lora_delta
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
