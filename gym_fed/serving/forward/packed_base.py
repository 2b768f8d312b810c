"""A base's packed linear layers, packed once and kept in a file that later starts map.

A file is named by the digest of the base's float32 weights, the type that they were packed from, the format, and the
version of the layout. It is written whole or not at all, and only the few files that were used last are kept. A file
that is not what its name says is logged and written anew.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from gym_quant.errors import CodecError
from gym_quant.linear import PackedLinear, get_linear
from gym_quant.packed_file import open_packed, write_packed
from torch import Tensor

from gym_fed.files import make_folder

Weight = Callable[[], Tensor]
Pack = Callable[[str, str, Weight], PackedLinear]
"""A layer's name in the file, its format, and its weight ``[out, in]``, called where it has to be packed."""

LAYOUT = 1
"""Of the tiles and of what is packed together; goes up with every change of either."""
KEPT_FILES = 4
KEPT_FORMATS = ("int8", "int4")
"""bfloat16 is packed at every start: its file would be as large as the base's own."""

_log = logging.getLogger(__name__)


def packed_anew(_name: str, format: str, weight: Weight) -> PackedLinear:
    """Pack without a file."""
    return get_linear(format).pack(weight())


def pack_base(decoder_pack: Callable[[str, Pack], int], format: str, kept: PackedBase | None) -> None:
    """Pack a decoder's layers, or take them from the base's file, which is written where it was not there."""
    decoder_pack(format, packed_anew if kept is None else kept.pack)
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
        self._open()

    @property
    def is_mapped(self) -> bool:
        """Whether the file was there, and every layer that was taken so far came from it."""
        return bool(self._given) and not self._new

    def pack(self, name: str, format: str, weight: Weight) -> PackedLinear:
        """The layer of the file; where there is none, it is packed, and ``save`` writes it."""
        found = self._given.get(name)
        if found is None or found.format != format:
            found = self._new[name] = packed_anew(name, format, weight)
        return found

    def save(self) -> None:
        """Write the file where layers were packed. A disk that cannot take it is logged: this start has its layers."""
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
