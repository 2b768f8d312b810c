"""Move a model's tensors to disk while a process waits, to free their memory."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger("gym_fed")

_ROOM = 4
"""Tensors move only if the disk has at least this multiple of their size free."""


class ParkedTensors:
    """Tensors in a temporary file, which the system deletes when this process ends. See ``park``.

    Args:
        tensors: Tensors on the CPU.
        folder: Folder for the file.

    Raises:
        OSError: If the file cannot be written.
    """

    def __init__(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        self._like = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open until it is read)
        digest = hashlib.sha256()
        for tensor in tensors.values():
            left = _bytes_of(tensor.contiguous())
            digest.update(left)
            while left:
                left = left[self._file.write(left) :]
        self._digest = digest.digest()

    @classmethod
    def park(cls, tensors: Mapping[str, Tensor], folder: Path) -> ParkedTensors | None:
        """Write tensors to a file; None if the disk has little free space or fails, which is logged."""
        try:
            if shutil.disk_usage(folder).free >= _ROOM * sum(tensor.nbytes for tensor in tensors.values()):
                return cls(tensors, folder)
            log.info("a model is not stored on disk while it is idle: %s has little free space", folder)
        except OSError as error:  # the file only saves memory and time
            log.warning("a model is not stored on disk while it is idle: %s", error)
        return None

    def restore(self, into: Mapping[str, Tensor]) -> bool:
        """Read all tensors, once.

        Args:
            into: Contiguous tensors of the same names, shapes and dtypes.

        Returns:
            False if the file cannot be read, is cut short or was changed, which is logged. The values are then
            undefined.
        """
        try:
            with self._file as file:
                file.seek(0)
                digest = hashlib.sha256()
                for name in self._like:
                    whole = left = _bytes_of(into[name])
                    while left:
                        if not (count := file.readinto(left)):
                            raise OSError(f"the stored tensor {name} is cut short")
                        left = left[count:]
                    digest.update(whole)
            if digest.digest() != self._digest:
                raise OSError("the stored tensors were changed")
        except OSError as error:
            log.warning("the stored model cannot be read, so it is rebuilt from the base: %s", error)
            return False
        return True

    def tensors(self) -> dict[str, Tensor] | None:
        """Return all tensors in new memory, once; None as ``restore``."""
        tensors = {name: torch.empty(like.shape, dtype=like.dtype) for name, like in self._like.items()}
        return tensors if self.restore(tensors) else None


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data
