"""A terminal of 80 columns in which a person types commands, and all that it showed, with the second of each line."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pyte

COLUMNS, ROWS = 80, 24
SCROLL_BACK = 2000
"""Lines of a terminal that are kept; pyte draws on all of them, programs know of ``ROWS``."""
QUESTION = b"[y/N]"
ENOUGH_SECONDS = 600.0
"""A newcomer has ten minutes; a command that takes longer than that ends the scene."""


@dataclass(frozen=True)
class Line:
    """A line as the terminal showed it in the end.

    Attributes:
        second: When it last changed, since the terminal was opened.
        parts: Its text, in stretches, and whether each is bold.
    """

    second: float
    parts: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        """Without its style."""
        return "".join(text for text, _ in self.parts)


@dataclass
class Typed:
    """A command that was typed.

    Attributes:
        command: As the script has it.
        seconds: From Enter to its end.
        silence: The longest stretch of it in which the terminal showed nothing new, in seconds.
        status: Its exit status; None while it runs.
        shown: All its output, with control sequences.
    """

    command: str
    seconds: float = 0.0
    silence: float = 0.0
    status: int | None = None
    shown: str = ""


class Terminal:
    """One terminal: a working folder, an environment, and a screen.

    Args:
        folder: Where commands run.
        variables: All environment variables that they see.
        began: The clock of ``time.monotonic`` from which lines are timed; several terminals of a scene share one.
    """

    def __init__(self, folder: Path, variables: dict[str, str], began: float | None = None) -> None:
        self.folder = folder
        self.variables = variables
        self.began = time.monotonic() if began is None else began
        self.typed: list[Typed] = []
        self._screen = pyte.Screen(COLUMNS, SCROLL_BACK)
        self._stream = pyte.ByteStream(self._screen)
        self._changed: dict[int, float] = {}

    def type(self, command: str) -> Running:
        """Type a command and press Enter; every question of it is answered with ``y``."""
        self._feed(f"\x1b[0;1m$ {command}\x1b[0m\r\n".encode())
        found = Typed(command)
        self.typed.append(found)
        return Running(self, found)

    def run(self, command: str) -> Typed:
        """Type a command and wait for its end.

        Raises:
            RuntimeError: It failed.
        """
        return self.type(command).wait()

    def lines(self) -> list[Line]:
        """All that was shown, in the order of the screen."""
        last = max((row for row, cells in self._screen.buffer.items() if _parts(cells)), default=-1)
        return [
            Line(self._changed.get(row, 0.0), _parts(self._screen.buffer[row])) for row in range(last + 1)
        ]

    def text(self) -> str:
        """All that was shown, without style."""
        return "\n".join(line.text for line in self.lines())

    def _feed(self, data: bytes) -> None:
        self._stream.feed(data)
        now = time.monotonic() - self.began
        self._changed.update(dict.fromkeys(self._screen.dirty, now))
        self._screen.dirty.clear()


class Running:
    """A command under way in a terminal; leaving the context ends it as Ctrl-C does."""

    def __init__(self, terminal: Terminal, typed: Typed) -> None:
        self.typed = typed
        self._terminal = terminal
        self._begin = self._heard = time.monotonic()
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            ["bash", "-c", typed.command],
            cwd=terminal.folder,
            env=terminal.variables,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._answered = 0
        self._bytes = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.interrupt()

    def wait_for(self, text: str) -> None:
        """Wait until the command has shown a text.

        Raises:
            RuntimeError: It ended without, or ten minutes passed.
        """
        while text not in self.typed.shown:
            if not self._reader.is_alive() and text not in self.typed.shown:
                raise RuntimeError(
                    f"$ {self.typed.command} ended without {text!r}:\n{self.typed.shown[-3000:]}"
                )
            self._refuse_if_late()
            time.sleep(0.05)

    @property
    def is_alive(self) -> bool:
        """True until the command has ended and all that it printed is shown."""
        return self._reader.is_alive()

    def wait(self) -> Typed:
        """Wait for the end.

        Raises:
            RuntimeError: It failed, or ten minutes passed.
        """
        while self._reader.is_alive():
            self._refuse_if_late()
            self._reader.join(0.05)
        self._end()
        if self.typed.status:
            raise RuntimeError(
                f"$ {self.typed.command} ended with {self.typed.status}:\n{self.typed.shown[-3000:]}"
            )
        return self.typed

    def interrupt(self) -> None:
        """Press Ctrl-C, where it still runs, and wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reader.join()
        self._end()

    def _end(self) -> None:
        if self.typed.status is None:
            self.typed.status = self._process.wait()
            self.typed.seconds = time.monotonic() - self._begin
            os.close(self._master)

    def _refuse_if_late(self) -> None:
        if time.monotonic() - self._begin > ENOUGH_SECONDS:
            self.interrupt()
            raise RuntimeError(
                f"$ {self.typed.command} takes longer than ten minutes:\n{self.typed.shown[-3000:]}"
            )

    def _read(self) -> None:
        """Show what the command prints, until the last writer has closed the terminal."""
        while True:
            select.select([self._master], [], [])
            try:
                data = os.read(self._master, 65536)
            except OSError:  # Linux: nobody holds the other end any more
                data = b""
            now = time.monotonic()
            self.typed.silence = max(self.typed.silence, now - self._heard)
            self._heard = now
            if not data:
                return
            self._bytes += data
            self.typed.shown = self._bytes.decode(errors="replace")
            self._terminal._feed(data)
            while (
                self._bytes.count(QUESTION) > self._answered
            ):  # what was typed before a question is not an answer
                os.write(self._master, b"y\n")
                self._answered += 1


def _parts(cells: dict[int, pyte.screens.Char]) -> tuple[tuple[str, bool], ...]:
    """A line of the screen as stretches of one style, without the blanks at its end."""
    width = max((column + 1 for column, cell in cells.items() if cell.data.strip()), default=0)
    found: list[tuple[str, bool]] = []
    for column in range(width):
        cell = cells[column]
        if found and found[-1][1] == cell.bold:
            found[-1] = (found[-1][0] + cell.data, cell.bold)
        else:
            found.append((cell.data, cell.bold))
    return tuple(found)
