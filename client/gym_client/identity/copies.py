"""A home that was copied to another machine: it gets an installation of its own there.

Two machines with one ``instance`` are one node to a hub, and each work stream ends the other's.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from pathlib import Path

from gym_client.identity.home import Home
from gym_fed.files import write_atomically

MACHINE_ID = Path("/etc/machine-id")
_NO_CARD = (1 << 40) | (1 << 41)
"""Multicast and locally administered bits. One is set if ``uuid.getnode`` found no network card or a virtual one, whose
address may change at each start."""


def adopt_copy(home: Home) -> str:
    """Make a home that was copied from another machine an installation of this one. The caller holds its lock.

    Returns:
        What was done, for the person; empty for a home that is no copy.
    """
    here, path = _machine(), home.folder / "machine"
    if not here:
        return ""
    before = path.read_text(encoding="ascii", errors="replace").strip() if path.exists() else ""
    if before == here:
        return ""
    note = ""
    if before:
        tasks = [task for task in home.tasks.iterdir() if task.is_dir()]
        for task in tasks:
            shutil.rmtree(task)  # the other machine has these tasks, and answers them
        (home.folder / "instance").unlink(missing_ok=True)
        left = f"; {len(tasks)} begun there stay there" if tasks else ""
        note = (
            f"{home.folder} was copied from another machine, and is an installation of its own from now on{left}. "
            "Both have the same account, which has one task a round: for an account of its own, join with --home FOLDER"
        )
    write_atomically(path, here.encode())
    return note


def _machine() -> str:
    """A digest that names this machine and stays in the home; empty where nothing names it."""
    try:
        text = MACHINE_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        text = ""
    if not text and not (node := uuid.getnode()) & _NO_CARD:
        text = f"{node:012x}"
    return hashlib.sha256(f"gym-fed home {text}".encode()).hexdigest()[:32] if text else ""
