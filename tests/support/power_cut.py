"""A power cut: of the files of a process, what was fsynced stays, and all else is gone.

The process runs with the library of ``power_cut.c`` preloaded, which keeps every file's content as of its last fsync,
and every folder's names as of its own. ``restore`` makes the folder anew from that: a name that was created, renamed or
removed without a sync of its folder is as it was before, and content that was not synced is not there. A real disk may
keep more than that; what was acknowledged must not depend on it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def why_not() -> str | None:
    """Why this machine cannot play a power cut."""
    if sys.platform != "linux":
        return f"the shim preloads a library and reads /proc: Linux only, not {sys.platform}"
    if _compiler() is None:
        return "no C compiler (cc) to build the shim with"
    return None


class Disk:
    """What is durable of the files under ``root``; all that is there when it is made is.

    Args:
        root: The folder that the process works in; it exists.
        folder: Where the record is kept, on the same file system.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root.resolve(), folder.resolve()
        for name in ("files", "folders", "held"):
            (self.folder / name).mkdir(parents=True)
        self._keep(self.root)

    def environment(self) -> dict[str, str]:
        """For the process; its children are recorded too."""
        library = self.folder / "power_cut.so"
        command = [str(_compiler()), "-O1", "-shared", "-fPIC", "-Wall", "-o", str(library), str(SOURCE)]
        subprocess.run([*command, "-ldl", "-lpthread"], check=True)
        return {
            **os.environ,
            "LD_PRELOAD": str(library),
            "POWER_CUT_ROOT": str(self.root),
            "POWER_CUT_DISK": str(self.folder),
        }

    def cut(self, target: Path) -> None:
        """Note what the disk has at this moment; ``restore`` takes it from there."""
        for name in ("files", "folders"):
            shutil.copytree(self.folder / name, target / name)

    def restore(self, target: Path, cut: Path | None = None) -> Path:
        """Make a folder of what the disk had at a cut, now if there is none; returns it."""
        _restore(cut or self.folder, os.stat(self.root).st_ino, target)
        return target

    def _keep(self, folder: Path) -> None:
        names = []
        for path in sorted(folder.iterdir()):
            inode = path.stat().st_ino
            names.append(f"{'d' if path.is_dir() else 'f'} {inode} {path.name}\n")
            if path.is_dir():
                self._keep(path)
            elif path.is_file():
                shutil.copyfile(path, self.folder / "files" / str(inode))
                os.link(path, self.folder / "held" / str(inode))
        (self.folder / "folders" / str(folder.stat().st_ino)).write_text("".join(names))


def _restore(disk: Path, inode: int, target: Path) -> None:
    target.mkdir()
    names = disk / "folders" / str(inode)
    for line in names.read_text().splitlines() if names.exists() else ():
        kind, child, name = line.split(" ", 2)
        if kind == "d":
            _restore(disk, int(child), target / name)
        elif (disk / "files" / child).exists():
            shutil.copyfile(disk / "files" / child, target / name)
        else:
            (target / name).touch()  # a name that was synced, of content that never was


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
