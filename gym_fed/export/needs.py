"""Estimates of the disk and memory that an export takes, from the headers of the weights."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.models import resolve
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.text import readable_bytes

if TYPE_CHECKING:
    from gym_fed.export.formats.base import ExportFormat, Options

LIBRARIES_BYTES = 500_000_000
"""Memory of a process with torch and transformers, before a model; measured on Linux."""
_FLOAT_BYTES = 4
_LOGITS = 500
"""Positions whose logits are kept, times the copies that comparing them takes."""


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
    """Upper bounds of the bytes that an export takes.

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
        scratch: Copies in float32 on disk next to the result; they are gone before the check writes its answers.
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


def require_room(
    chosen: ExportFormat, weights: Weights, path: Path, options: Options, *, check: bool, loaded: bool = False
) -> ExportNeeds:
    """Refuse an export for which disk or memory is too small.

    Args:
        chosen: The format.
        weights: The weights of the whole model.
        path: The path to write to.
        options: The options of the export.
        check: Whether it is read back.
        loaded: Whether the model is already in memory.

    Raises:
        GymError: ``DISK_FULL``; ``TOO_LARGE`` for too little memory.
    """
    from gym_fed.doctor.checks.devices import available_memory_bytes

    needs = chosen.needs(weights, options)
    folder = next(place for place in path.absolute().parents if place.is_dir())
    free = shutil.disk_usage(folder).free
    if needs.disk > free:
        raise GymError(
            ErrorCode.DISK_FULL,
            f"format {chosen.name} takes about {readable_bytes(needs.disk)} of disk, and {folder} has "
            f"{readable_bytes(free)}",
            "free some space there, write to another disk, or choose a smaller format or quantization",
        )
    there = available_memory_bytes()
    # The process that reads back has its libraries loaded while this one still writes.
    whole = max(needs.writing + LIBRARIES_BYTES, needs.reading) if check else needs.writing
    memory = whole - (weights.full_bytes if loaded else 0)
    if memory <= there:
        return needs
    remedy = "use a machine with more memory, or close other programs"
    if check and needs.writing <= there:
        remedy += f"; --skip-check takes {readable_bytes(needs.writing)}"
    raise GymError(
        ErrorCode.TOO_LARGE,
        f"format {chosen.name} takes about {readable_bytes(memory)} of memory, and {readable_bytes(there)} are free",
        remedy,
    )
