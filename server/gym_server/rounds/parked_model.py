"""Store the tensors of the hub's model on disk between rounds, to free their memory."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from gym_fed.delta.base import model_tensors, tensors_digest

log = logging.getLogger("gym_server")

_ROOM = 4
"""The file is written only if the disk has at least this multiple of its size free."""


def parked_path(folder: Path) -> Path:
    """Return the path of a hub's file; the file is deleted when the hub stops."""
    return folder / "staging" / "hub-model.safetensors"


class ParkedTensors:
    """A file with a model's tensors. Without it, the model is rebuilt from the base and soups, which takes longer.

    Args:
        path: The file. A file from an earlier process is not read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = ""
        """Digest of the tensors in the file; empty if there is no file."""

    def park(self, model: Any) -> None:
        """Write the model's tensors, unless the disk has little free space."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self._digest = ""
        tensors = {name: tensor.contiguous().cpu() for name, tensor in model_tensors(model).items()}
        size = sum(tensor.nbytes for tensor in tensors.values())
        part = self._path.with_suffix(".part")
        try:
            self._path.unlink(missing_ok=True)
            if shutil.disk_usage(self._path.parent).free < _ROOM * size:
                return
            save_file(tensors, part)
            os.replace(part, self._path)
            self._digest = tensors_digest(model)
        except (OSError, RuntimeError, SafetensorError) as error:  # the file only saves time
            part.unlink(missing_ok=True)
            log.warning(
                "the next merge rebuilds the model, because its tensors could not be stored: %s", error
            )

    def forget(self) -> None:
        """Stop restoring the file: it has the tensors of a different version."""
        self._digest = ""

    def restore(self, model: Any) -> bool:
        """Copy the tensors into a model of the same base.

        Returns:
            False if there is no file, or its content has changed; the model's values are then undefined.
        """
        from safetensors import SafetensorError, safe_open

        if not self._digest:
            return False
        try:
            with safe_open(self._path, "pt") as file:
                for name, tensor in model_tensors(model).items():
                    tensor.copy_(file.get_tensor(name))
        except (OSError, RuntimeError, SafetensorError) as error:
            log.warning("%s cannot be read, so the model is rebuilt: %s", self._path, error)
            return False
        return tensors_digest(model) == self._digest
