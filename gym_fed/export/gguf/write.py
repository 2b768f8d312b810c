"""Writing of a model as a GGUF file: saved as a folder, converted by another process, and its metadata read back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from gym_fed.base.models import quiet_loading
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.gguf.metadata import metadata_of, require_metadata
from gym_fed.export.process import Processes, Report, no_report
from gym_fed.export.source import Source

CONVERTER = "gym_fed.export.gguf.convert"
"""The module whose process converts."""


def write_gguf(
    source: Source,
    target: Path,
    quantization: str,
    report: Report = no_report,
    processes: Processes | None = None,
) -> None:
    """Write the new file ``target``; ``source`` is merged.

    Args:
        source: A model that the converter knows.
        target: The new file; its folder is used for temporary files.
        quantization: One of ``convert.FILE_TYPES``.
        report: Gets the number of tensors that are converted.
        processes: Has the converter's process, if that was started before.

    Raises:
        GymError: ``USAGE`` if the converter cannot write the model, ``EXPORT_DIFFERS`` for any other failure.
    """
    import gguf

    from gym_fed.export.gguf.convert import FILE_TYPES

    metadata = metadata_of(source, int(getattr(gguf.LlamaFileType, FILE_TYPES[quantization])))
    with tempfile.TemporaryDirectory(prefix="gym-export-", dir=target.parent) as scratch:
        folder = Path(scratch) / "model"
        report("saving", 0, 0)
        with quiet_loading():
            source.whole().save_pretrained(str(folder))
        source.write_beside(folder)
        job = {
            "folder": str(folder),
            "file": str(target),
            "quantization": quantization,
            "metadata": metadata,
        }
        _convert(job, source, report, processes or Processes())
    require_metadata(target, metadata)


def bytes_in_8_bits(file: Path) -> int:
    """Return the size that a file of unquantised weights would have as q8_0.

    That is 34 bytes for 32 weights of a matrix, and float16 if its rows are not a multiple of 32.
    """
    import gguf

    size = file.stat().st_size
    for tensor in gguf.GGUFReader(file).tensors:
        if len(tensor.shape) > 1:
            bytes_each = 2 if int(tensor.shape[0]) % 32 else 34 / 32
            size += int(int(tensor.n_elements) * bytes_each) - int(tensor.n_bytes)
    return size


def refused(source: Source, why: str) -> GymError:
    """Return the error that a model cannot be a GGUF file."""
    return GymError(
        ErrorCode.USAGE, f"format gguf: {source.name}: {why}", "export it as huggingface or adapter"
    )


def _convert(job: dict[str, Any], source: Source, report: Report, processes: Processes) -> None:
    """Run the converter.

    Raises:
        GymError: As ``write_gguf``.
    """
    from gym_fed.export.gguf.convert import UNSUPPORTED

    status, last = processes.run(CONVERTER, job, report)
    if not status:
        return
    why = (last or ["no message"])[-1][:500]
    if status == UNSUPPORTED:
        raise refused(source, why)
    raise GymError(
        ErrorCode.EXPORT_DIFFERS, f"llama.cpp's converter failed: {why}; nothing was kept", "report this"
    )
