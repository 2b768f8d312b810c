"""Read tensors of a model folder one by one from its safetensors files, and write them in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import lies_in
from gym_fed.core.json_files import read_object

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
_SHARD_BYTES = 1 << 30


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: those in the index, or ``model.safetensors``.

    Raises:
        GymError: ``MODEL_INVALID`` if there are none, or one is missing.
    """
    index = folder / INDEX
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    else:
        names = [ONE_FILE]
    for name in names or [INDEX]:
        if name == INDEX or Path(name).name != name or not lies_in(folder / name, folder):
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{folder}: has no weights in {name[:200]}",
                "fetch the model again; only safetensors weights are supported",
            )
    return [folder / name for name in names]


class StoredTensors(Mapping[str, Any]):
    """Mapping of names to tensors in file order, read on access. Must be closed.

    Args:
        folder: The model folder.

    Raises:
        GymError: ``MODEL_INVALID`` for an unreadable file, or a tensor in two files.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self._files: dict[str, Path] = {}
        self._opened: dict[Path, Any] = {}
        with ExitStack() as stack:
            for file in weight_files(folder):
                try:
                    self._opened[file] = stack.enter_context(safe_open(file, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise _unreadable(file, error) from error
                for name in self._opened[file].keys():  # noqa: SIM118 - a handle, no mapping
                    if name in self._files:
                        raise GymError(
                            ErrorCode.MODEL_INVALID,
                            f"{file}: tensor {name[:200]} is also in {self._files[name].name}",
                            "fetch the model again",
                        )
                    self._files[name] = file
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Any:
        from safetensors import SafetensorError

        file = self._files[name]
        try:
            return self._opened[file].get_tensor(name)
        except (SafetensorError, TypeError, RuntimeError) as error:  # torch refuses sizes beyond 64 bits
            raise _unreadable(file, error) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor from the header."""
        return list(self._opened[self._files[name]].get_slice(name).get_shape())

    def file_of(self, name: str) -> Path:
        """Return the file of a tensor; the folder for a missing one."""
        return self._files.get(name, self.folder)


def _unreadable(file: Path, error: Exception) -> GymError:
    reason = str(error).partition("\n")[0]  # torch adds frames
    return GymError(ErrorCode.MODEL_INVALID, f"{file}: cannot be read: {reason}", "fetch the model again")


class TensorWriter:
    """Writes tensors one by one into files of about 1 GiB, and their index.

    Args:
        folder: Folder for the files ``model-NNNNN.safetensors``.
        shard_bytes: Size at which a file is complete.
    """

    def __init__(self, folder: Path, shard_bytes: int = _SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Any] = {}
        self._pending_bytes = 0
        self._weight_map: dict[str, str] = {}
        self.written = 0
        """Number of bytes of the tensors added so far."""

    def add(self, name: str, tensor: Any) -> None:
        """Add the next tensor."""
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += tensor.nbytes
        self.written += tensor.nbytes
        if self._pending_bytes >= self._shard_bytes:
            self._write()

    def finish(self) -> None:
        """Write the remaining tensors and the index."""
        if self._pending:
            self._write()
        index = {"metadata": {"total_size": self.written}, "weight_map": self._weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        from safetensors.torch import save_file

        file = f"model-{len(set(self._weight_map.values())) + 1:05}.safetensors"
        save_file(self._pending, self._folder / file, metadata={"format": "pt"})
        self._weight_map.update(dict.fromkeys(self._pending, file))
        self._pending, self._pending_bytes = {}, 0
