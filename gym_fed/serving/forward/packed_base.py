"""Store the packed linear layers of a base in a file that later runs read.

The file name has the digest of the base's float32 weights, the dtype that they were packed from, the format, and the
version of the layout. The file contains the digest of every tensor, and the logits of the trial before it was written.
It is written atomically, and only the most recently used files are kept. A file that does not match its name, or that
others may write to, is logged and replaced.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from gym_quant.errors import CodecError
from gym_quant.linear import PackedLinear, get_linear
from gym_quant.packed_file import open_packed, write_packed
from torch import Tensor

from gym_fed.core.errors import GymError
from gym_fed.core.files import default_home, make_folder, remove_left_parts, whole_file_in_place
from gym_fed.core.portable import own_user
from gym_fed.core.text import counted

Pack = Callable[[str, str, Sequence[Tensor]], PackedLinear]
"""A function that packs a layer, given its name in the file, its format, and the stacked weights ``[out, in]``."""
Layers = dict[str, tuple[str, int, int]]
"""The format, ``out`` and ``in`` of each layer, by its name in the file."""

LAYOUT = 1
"""The version of the tile layout and of the grouping of matrices; increased with every change to either."""
KEPT_FILES = 4
KEPT_FORMATS = ("int8", "int4")
"""Formats that are stored in a file. bfloat16 is packed at every start, since its file would be as large as the
base's."""
BYTES_LIMIT = 20 * 10**9

_LOGITS = "trial"
_log = logging.getLogger(__name__)


class Packer:
    """Packs layers one after the other, without a file.

    Weights that are joined into one matrix share one buffer, since separate buffers would fragment memory.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def __call__(self, _name: str, format: str, weights: Sequence[Tensor]) -> PackedLinear:
        return get_linear(format).pack(weights[0] if len(weights) == 1 else self._joined(weights))

    def _joined(self, weights: Sequence[Tensor]) -> Tensor:
        count, dtype = sum(weight.numel() for weight in weights), weights[0].dtype
        if self._buffer.numel() < count or self._buffer.dtype != dtype:
            self._buffer = torch.empty(count, dtype=dtype, device=weights[0].device)
        return torch.cat(list(weights), out=self._buffer[:count].view(-1, weights[0].shape[1]))


def pack_in_memory(name: str, format: str, weights: Sequence[Tensor]) -> PackedLinear:
    """Pack one layer without a file."""
    return Packer()(name, format, weights)


def packed_home() -> Path:
    """Return ``$GYM_HOME/packed``, or ``~/.gym-fed/packed``."""
    return default_home() / "packed"


class PackedBase:
    """The file of one base in one format.

    Args:
        folder: The folder with all such files.
        digest: The digest of the base's float32 weights.
        dtype: The dtype of the weights that are packed.
        format: A format of ``gym_quant.linear``.
        bytes_limit: Maximum size in bytes of all such files together; the least recently used are removed.

    Attributes:
        path: The path of the file.
        logits: ``[3, vocabulary]`` float32, from the trial before the file was written; None if it was not read.
    """

    def __init__(
        self, folder: Path, digest: str, dtype: str, format: str, bytes_limit: int = BYTES_LIMIT
    ) -> None:
        self._labels = {"base": digest, "dtype": dtype, "format": format, "layout": str(LAYOUT)}
        name = f"{digest.removeprefix('sha256:')[:32]}-{dtype}-{format}-{LAYOUT}.safetensors"
        self.path, self._limit = folder / name, bytes_limit
        self.logits: Tensor | None = None
        self._layers: dict[str, PackedLinear] = {}
        self._packer = Packer()

    @property
    def is_read(self) -> bool:
        """True if every layer comes from the file."""
        return self.logits is not None

    def open(self, layers: Layers) -> bool:
        """Read the file if it is safe and has these layers; otherwise log why, for ``save`` to replace it."""
        try:
            _require_safe(os.stat(self.path.parent))
            file = open_packed(self.path, _require_safe)
            linears = {
                name: linear for name, linear in file.tensors.items() if isinstance(linear, PackedLinear)
            }
            logits = file.tensors.get(_LOGITS)
            if file.metadata != self._labels or len(linears) + 1 != len(file.tensors):
                raise CodecError("it is for a different base, dtype, format or layout")
            if not isinstance(logits, Tensor):
                raise CodecError("it does not have the logits of a trial")
            stored = {name: (linear.format, linear.rows, linear.cols) for name, linear in linears.items()}
            for name in sorted(stored.keys() | layers.keys()):
                if stored.get(name) != layers.get(name):
                    raise CodecError(f"layer {name} is {stored.get(name)}, not {layers.get(name)}")
        except FileNotFoundError:
            return False
        except (CodecError, OSError) as error:
            _log.warning("%s: packing again: %s", self.path, error)
            return False
        with suppress(OSError):  # the folder may be read-only
            os.utime(self.path)
        self._layers, self.logits = linears, logits
        return True

    def pack(self, name: str, format: str, weights: Sequence[Tensor]) -> PackedLinear:
        """Return a layer from the file, or pack it for ``save`` to write if the file was not read."""
        if name not in self._layers:
            self._layers[name] = self._packer(name, format, weights)
        return self._layers[name]

    def save(self, logits: Tensor) -> None:
        """Write the file unless it was read; a full disk is only logged, since the layers are in memory.

        Args:
            logits: The logits of the trial with these layers.
        """
        self._packer = Packer()  # free the buffer
        if self.is_read:
            return
        folder = self.path.parent
        num_bytes = sum(
            tensor.nbytes for layer in self._layers.values() for tensor in layer.tensors().values()
        )
        try:
            make_folder(folder, 0o700)
            _require_safe(os.stat(folder))
            remove_left_parts(folder)
            if why := self._reason_without_room(num_bytes):
                _log.warning("%s: the packed base was not saved: %s", self.path, why)
                return
            _log.warning("writing the packed base to %s: %s bytes", self.path, f"{num_bytes:,}")
            with whole_file_in_place(self.path) as part:
                write_packed(part, {**self._layers, _LOGITS: logits}, self._labels)
                part.chmod(0o600)
        except (CodecError, GymError, OSError) as error:
            _log.warning(
                "%s: the packed base was not saved, so the next run packs it again: %s", self.path, error
            )
            return
        _log.info("the packed base was saved in %s; later runs read it", self.path)
        self._remove_oldest()

    def _reason_without_room(self, num_bytes: int) -> str:
        if num_bytes > self._limit:
            return f"it has {counted(num_bytes, 'byte')}, more than packed_size ({self._limit:,})"
        free = shutil.disk_usage(self.path.parent).free
        return (
            ""
            if 2 * num_bytes <= free
            else f"twice its {counted(num_bytes, 'byte')} must be free, but only {free:,} are"
        )

    def _remove_oldest(self) -> None:
        """Remove the least recently used files beyond the limits, except this one."""
        used: list[tuple[float, int, Path]] = []
        for file in self.path.parent.glob("*.safetensors"):
            with suppress(FileNotFoundError):  # another server may have just removed it
                status = file.stat()
                used.append((status.st_mtime if file != self.path else float("inf"), status.st_size, file))
        room, count = self._limit, 0
        for _, size, file in sorted(used, reverse=True):
            room, count = room - size, count + 1
            if file != self.path and (room < 0 or count > KEPT_FILES):
                try:
                    file.unlink(missing_ok=True)
                except OSError as error:
                    _log.warning("%s: cannot be removed: %s", file, error)


def _require_safe(status: os.stat_result) -> None:
    """Refuse a file that another user could replace.

    Raises:
        CodecError: If another user can write the file or its folder.
    """
    kind = "the folder" if stat.S_ISDIR(status.st_mode) else "the file"
    if (user := own_user()) is None:  # Windows, where the home folder is the user's own
        return
    if status.st_uid != user:
        raise CodecError(f"{kind} belongs to user {status.st_uid}, not to {user}")
    if status.st_mode & 0o022:
        raise CodecError(f"{kind} may be written by others (mode {status.st_mode & 0o777:o}); run chmod go-w")
