"""Detect home folders that were copied, and those that several machines share.

A copy has the same ``instance`` as its original, so a hub treats both as one installation, and each opens a work stream
that ends the other's. A copy therefore gets a new instance. A home on a network file system that was last used on
another machine is not a copy; its tasks exist only once and are resumed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from gym_client.identity.home import Home
from gym_fed.core.files import write_atomically
from gym_fed.core.text import counted

MACHINE_ID = Path("/etc/machine-id")
MOUNTS = Path("/proc/self/mountinfo")
_NO_CARD = (1 << 40) | (1 << 41)
"""The multicast and the locally administered bit. One of them is set if ``uuid.getnode`` found no network card or only
a virtual one, whose address may change at each start."""
_SHARED_TYPES = re.compile(
    r"nfs4?|cifs|smb3?|lustre|gpfs|beegfs|ceph|afs|orangefs|glusterfs|9p|virtiofs|fuse\..+"
)
"""File systems that several machines can mount at the same time."""
_MAX_RECORD_CHARS = 10_000


@dataclass(frozen=True)
class _LastUse:
    """The last use of a home, stored in the file ``machine`` with one field per line."""

    machine: str
    """A digest that identifies the machine; empty if it has no identifier."""
    files: str = ""
    """The inode numbers, which are different in a copy."""
    folder: str = ""

    @classmethod
    def here(cls, home: Home) -> _LastUse:
        return cls(_machine(), _inodes(home.tasks.parent), str(home.folder))

    @classmethod
    def recorded(cls, home: Home) -> _LastUse | None:
        path = home.folder / "machine"
        if not path.exists():
            return None
        lines = path.read_text(encoding="utf-8", errors="replace")[:_MAX_RECORD_CHARS].splitlines()
        return cls(*(line.strip() for line in lines[:3])) if lines else None

    def exists_elsewhere(self, here: _LastUse) -> bool:
        """Return True if the recorded folder still exists and is not the current one."""
        return bool(self.folder) and self.folder != here.folder and _inodes(Path(self.folder)) == self.files


def adopt_copy(home: Home) -> str:
    """Turn a copied home into a separate installation. The caller must hold the home's lock.

    Returns:
        A message for the user; empty if the home is still where it was last used.
    """
    here, before = _LastUse.here(home), _LastUse.recorded(home)
    if before == here:
        return ""
    note = ""
    if before is not None and before.machine != here.machine and before.machine and here.machine:
        if before.files == here.files and _is_shared(home.folder):
            note = (
                f"{home.folder} is shared with another machine, which used it last. Its tasks continue here. Use it on "
                "one machine at a time; to work on both at once, join with --home FOLDER on one of them"
            )
        else:
            note = _separate(home, "another machine")
    elif before is not None and before.files != here.files and before.exists_elsewhere(here):
        note = _separate(home, before.folder)
    write_atomically(home.folder / "machine", f"{here.machine}\n{here.files}\n{here.folder}\n".encode())
    return note


def _separate(home: Home, original: str) -> str:
    """Delete a copy's instance and tasks; the original keeps its own."""
    tasks = [task for task in home.tasks.iterdir() if task.is_dir()]
    for task in tasks:
        shutil.rmtree(task)
    (home.folder / "instance").unlink(missing_ok=True)
    left = f" {counted(len(tasks), 'unfinished task')} stayed with the original." if tasks else ""
    return (
        f"{home.folder} was copied from {original} and is now a separate installation.{left} Both use the same "
        "account, which gets one task per round. To use another account, join with --home FOLDER"
    )


def _inodes(folder: Path) -> str:
    """Return the inode numbers of a home and its tasks. All machines that mount the home see the same numbers."""
    try:
        return " ".join(str(path.stat().st_ino) for path in (folder, folder / "tasks"))
    except OSError:
        return ""


def _is_shared(folder: Path) -> bool:
    """Return True if a folder is on a file system that several machines can mount at the same time (Linux only)."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    kind, longest = "", -1
    for line in lines:  # ID PARENT DEVICE ROOT MOUNT-POINT OPTIONS ... - TYPE SOURCE OPTIONS
        left, _, right = line.partition(" - ")
        fields, types = left.split(" "), right.split(" ")
        if len(fields) < 5:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
        if folder.resolve().is_relative_to(point) and len(point.parts) >= longest:
            kind, longest = types[0], len(point.parts)
    return _SHARED_TYPES.fullmatch(kind) is not None


def _machine() -> str:
    """Return a digest that identifies this machine; empty if it has no identifier."""
    try:
        text = MACHINE_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        text = ""
    if not text and not (node := uuid.getnode()) & _NO_CARD:
        text = f"{node:012x}"
    return hashlib.sha256(f"gym-fed home {text}".encode()).hexdigest()[:32] if text else ""
