"""Estimates of the disk space and memory that an export needs, from the headers of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.base.models import resolve
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object

LIBRARIES_BYTES = 500_000_000
"""Memory of a process with torch and transformers, before a model is loaded; measured on Linux."""
_FLOAT_BYTES = 4
_LOGITS = 500
"""Positions whose logits are stored, times the copies needed to compare them."""


@dataclass(frozen=True)
class Weights:
    """The size of a model.

    Attributes:
        parameters: The number of parameters.
        vocabulary: The width of the logits; 0 if the config does not give it.
    """

    parameters: int
    vocabulary: int = 0

    @property
    def full_bytes(self) -> int:
        """Bytes in float32."""
        return _FLOAT_BYTES * self.parameters


@dataclass(frozen=True)
class ExportNeeds:
    """Upper bounds of the bytes that an export needs.

    Attributes:
        disk: Bytes on disk for the result and its temporary files.
        writing: Bytes of memory while it is written.
        reading: Bytes of memory while another process reads it back.
    """

    disk: int
    writing: int
    reading: int


def weights_of(name: str) -> Weights:
    """Read the size of a model folder, or of the base of an adapter; no tensor is read.

    Raises:
        GymError: ``MODEL_NOT_FOUND``, ``MODEL_INVALID``.
    """
    from gym_fed.base.modeling.adapters import CONFIG, base_of, read_adapter

    folder = Path(resolve(name))
    if (folder / CONFIG).is_file():
        folder = Path(resolve(base_of(read_adapter(name, folder))))
    config: dict[str, Any] = read_object(folder / "config.json")
    text = config.get("text_config")
    vocabulary = (text if isinstance(text, dict) else config).get("vocab_size")
    return Weights(_parameters(folder), vocabulary if isinstance(vocabulary, int) else 0)


def default_needs(
    weights: Weights, *, bits: float, writing: float, reading: float, scratch: float = 0.0
) -> ExportNeeds:
    """Estimate the needs of an ordinary export.

    Args:
        weights: The weights of the model.
        bits: Bits per weight of the result.
        writing: Copies in float32 in memory until it is written, over all processes.
        reading: Copies in float32 in memory while it is read back.
        scratch: Copies in float32 on disk next to the result; they are deleted before the check writes its answers.
    """
    full, logits = weights.full_bytes, _FLOAT_BYTES * _LOGITS * weights.vocabulary
    return ExportNeeds(
        disk=int(weights.parameters * bits / 8 + max(scratch * full, logits)),
        writing=int(writing * full) + LIBRARIES_BYTES + logits,
        reading=int(reading * full) + 2 * LIBRARIES_BYTES + 2 * logits,
    )


def _parameters(folder: Path) -> int:
    from math import prod

    from safetensors import SafetensorError, safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, "np") as tensors:
                total += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise GymError(ErrorCode.MODEL_INVALID, f"{file}: {error}", "copy the model again") from error
    return total
