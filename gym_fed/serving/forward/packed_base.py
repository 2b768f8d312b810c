"""A base's packed linear layers, packed once and kept in a file that later starts map.

A file is named by the digest of the base's float32 weights, the type that they were packed from, the format, and the
version of the layout. It is written whole or not at all, and only the few files that were used last are kept. A file
that is not what its name says is logged and written anew.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from gym_quant.errors import CodecError
from gym_quant.linear import PackedLinear, get_linear
from gym_quant.packed_file import open_packed, write_packed
from torch import Tensor

from gym_fed.files import make_folder

Pack = Callable[[str, str, Sequence[Tensor]], PackedLinear]
"""A layer's name in the file, its format, and the weights ``[out, in]`` that are one below the other in it."""

LAYOUT = 1
"""Of the tiles and of what is packed together; goes up with every change of either."""
KEPT_FILES = 4
KEPT_FORMATS = ("int8", "int4")
"""bfloat16 is packed at every start: its file would be as large as the base's own."""

_log = logging.getLogger(__name__)


class Packer:
    """Packs layer after layer without a file.

    Weights that become one matrix are joined in one buffer: one for each would leave holes between the packed ones.
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


def packed_anew(name: str, format: str, weights: Sequence[Tensor]) -> PackedLinear:
    """Pack one layer without a file."""
    return Packer()(name, format, weights)


def pack_base(decoder_pack: Callable[[str, Pack], int], format: str, kept: PackedBase | None) -> None:
    """Pack a decoder's layers, or take them from the base's file, which is written where it was not there."""
    decoder_pack(format, Packer() if kept is None else kept.pack)
    if kept is not None:
        kept.save()


def packed_home() -> Path:
    """``$GYM_HOME/packed``, or ``~/.gym-fed/packed``."""
    return Path(os.environ.get("GYM_HOME") or "~/.gym-fed").expanduser() / "packed"


class PackedBase:
    """The file of one base in one format.

    Args:
        folder: Of all such files.
        digest: Of the base's float32 weights.
        dtype: Type of the weights that are packed.
        format: Of ``gym_quant.linear``.

    Attributes:
        path: The file.
    """

    def __init__(self, folder: Path, digest: str, dtype: str, format: str) -> None:
        self._labels = {"base": digest, "dtype": dtype, "format": format, "layout": str(LAYOUT)}
        name = f"{digest.removeprefix('sha256:')[:32]}-{dtype}-{format}-{LAYOUT}.safetensors"
        self.path = folder / name
        self._given: dict[str, PackedLinear] = {}
        self._new: dict[str, PackedLinear] = {}
        self._packer = Packer()
        self._open()

    @property
    def is_mapped(self) -> bool:
        """Whether the file was there, and every layer that was taken so far came from it."""
        return bool(self._given) and not self._new

    def pack(self, name: str, format: str, weights: Sequence[Tensor]) -> PackedLinear:
        """The layer of the file; where there is none, it is packed, and ``save`` writes it."""
        found = self._given.get(name)
        if found is None or found.format != format:
            found = self._new[name] = self._packer(name, format, weights)
        return found

    def save(self) -> None:
        """Write the file where layers were packed. A disk that cannot take it is logged: this start has its layers."""
        self._packer = Packer()  # without the buffer
        if not self._new:
            return
        try:
            make_folder(self.path.parent, 0o700)
            write_packed(self.path, {**self._given, **self._new}, self._labels)
            self._remove_oldest()
        except OSError as error:
            _log.warning(
                "%s: the packed base is not kept, so the next start packs it again: %s", self.path, error
            )
        else:
            _log.warning("the packed base is kept in %s; later starts map it", self.path)

    def _open(self) -> None:
        try:
            file = open_packed(self.path)
            os.utime(self.path)
        except FileNotFoundError:
            return
        except (CodecError, OSError) as error:
            _log.warning("%s: is packed anew: %s", self.path, error)
            return
        linears = {name: one for name, one in file.tensors.items() if isinstance(one, PackedLinear)}
        if file.metadata != self._labels or len(linears) != len(file.tensors):
            _log.warning("%s: is packed anew: it is of another base, type, format or layout", self.path)
            return
        self._given = linears

    def _remove_oldest(self) -> None:
        files = sorted(self.path.parent.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
        for file in files[:-KEPT_FILES]:
            file.unlink(missing_ok=True)
