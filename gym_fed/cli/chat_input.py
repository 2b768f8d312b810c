"""What the user types or pipes in, a message at a time: lines, lines that go on, blocks, and readline's comforts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

BLOCK = '"""'
HISTORY_LINES = 1000


def read_message(prompt: str) -> str | None:
    """One message, or None at the end of input.

    A line that ends with a backslash goes on in the next one; between two lines of three quotes everything is text.

    Args:
        prompt: Shown where a person types.

    Raises:
        KeyboardInterrupt: On Ctrl-C.
    """
    line = _line(prompt)
    if line is None:
        return None
    if line.lstrip().startswith(BLOCK):
        return _block(line.lstrip().removeprefix(BLOCK))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        following = _line("... ")
        if following is None:
            break
        lines.append(following)
    return "\n".join(lines).strip()


def _block(first: str) -> str:
    lines, line = [], first
    while not line.rstrip().endswith(BLOCK):
        lines.append(line)
        following = _line("... ")
        if following is None:  # the end of input ends the block, too
            return "\n".join(lines).strip("\n")
        line = following
    lines.append(line.rstrip().removesuffix(BLOCK))
    return "\n".join(lines).strip("\n")


def _line(prompt: str) -> str | None:
    if sys.stdin.isatty():
        try:
            return input(prompt if sys.stdout.isatty() else "")
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


@contextmanager
def line_editing(folder: Path) -> Iterator[None]:
    """Arrow keys, searching, and a history in ``folder`` (mode 0600), where Python has readline and a person types."""
    if not (sys.stdin.isatty() and sys.stdout.isatty() and find_spec("readline")):
        yield
        return
    import readline

    history = folder / "chat_history"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(history, os.O_RDWR | os.O_CREAT, 0o600))
    history.chmod(0o600)
    readline.clear_history()
    readline.read_history_file(history)
    readline.set_history_length(HISTORY_LINES)
    readline.set_auto_history(True)
    # A pasted text of several lines is one message, not one for each line.
    readline.parse_and_bind("set enable-bracketed-paste on")
    try:
        yield
    finally:
        readline.write_history_file(history)
        history.chmod(0o600)  # readline replaces the file
