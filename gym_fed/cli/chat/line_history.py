"""Line editing in `gym chat`, with a history of messages in a private file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from gym_fed.core.console import err
from gym_fed.core.files import make_folder

HISTORY_LINES = 1000


@contextmanager
def line_editing(folder: Path) -> Iterator[None]:
    """Enable line editing and a history in ``folder`` (mode 0600), if Python has readline and the input is a terminal.

    If the folder cannot be written, a note is printed and there is no history.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty() and find_spec("readline")):
        yield
        return
    import readline

    history = folder / "chat_history"
    readline.clear_history()
    readline.set_history_length(HISTORY_LINES)
    readline.set_auto_history(True)
    # Pasted text of several lines is one message.
    readline.parse_and_bind("set enable-bracketed-paste on")
    saved = _read_history(history)
    try:
        yield
    finally:
        if saved:
            _write_history(history)


def _read_history(history: Path) -> bool:
    """Create and read the history file; return True if it can be used."""
    import readline

    try:
        make_folder(history.parent)
        os.close(os.open(history, os.O_RDWR | os.O_CREAT, 0o600))
        history.chmod(0o600)
        readline.read_history_file(history)
    except OSError as error:
        _note_lost(history, error)
        return False
    return True


def _write_history(history: Path) -> None:
    import readline

    try:
        readline.write_history_file(history)
        history.chmod(0o600)  # readline replaces the file
    except OSError as error:
        _note_lost(history, error)


def _note_lost(history: Path, error: OSError) -> None:
    err.print(f"note: the history of messages is not saved: {history}: {error.strerror}", style="dim")
