"""Run commands in a terminal of 80 columns, and record its lines with their times."""

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
"""Number of terminal lines to keep. pyte's screen has all of them; the terminal's size for programs is ``ROWS``."""
QUESTION = b"[y/N]"
ENOUGH_SECONDS = 600.0
"""Time limit of a command; a longer one stops the recording."""


@dataclass(frozen=True)
class Line:
    """The final state of a line of the terminal.

    Attributes:
        second: Time of its last change, in seconds since the terminal was opened.
        parts: Its text as parts of one style, each with True if it is bold.
    """

    second: float
    parts: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        """The text without style."""
        return "".join(text for text, _ in self.parts)


@dataclass
class Typed:
    """A command that was typed into a terminal.

    Attributes:
        command: The command line, as in the script.
        seconds: Time from Enter to the end of the command.
        silence: Longest time without new output, in seconds.
        status: Exit status; None while the command runs.
        shown: The output, with control sequences.
    """

    command: str
    seconds: float = 0.0
    silence: float = 0.0
    status: int | None = None
    shown: str = ""


class Terminal:
    """A terminal with a working folder, an environment and a screen.

    Args:
        folder: Working folder of the commands.
        variables: All environment variables of the commands.
        began: Start of the recording on the clock of ``time.monotonic``; terminals of one recording share it.
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
        """Type a command and press Enter; each of its questions is answered with ``y``."""
        self._feed(f"\x1b[0;1m$ {command}\x1b[0m\r\n".encode())
        typed = Typed(command)
        self.typed.append(typed)
        return Running(self, typed)

    def run(self, command: str) -> Typed:
        """Type a command and wait until it ends.

        Raises:
            RuntimeError: If it fails.
        """
        return self.type(command).wait()

    def lines(self) -> list[Line]:
        """Return all lines of the screen, in order."""
        last = max((row for row, cells in self._screen.buffer.items() if _parts(cells)), default=-1)
        return [
            Line(self._changed.get(row, 0.0), _parts(self._screen.buffer[row])) for row in range(last + 1)
        ]

    def text(self) -> str:
        """Return the text of all lines, without style."""
        return "\n".join(line.text for line in self.lines())

    def _feed(self, data: bytes) -> None:
        self._stream.feed(data)
        now = time.monotonic() - self.began
        self._changed.update(dict.fromkeys(self._screen.dirty, now))
        self._screen.dirty.clear()


class Running:
    """A command that is running in a terminal; leaving the context interrupts it like Ctrl-C."""

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
        """Wait until the command has printed a text.

        Raises:
            RuntimeError: If the command ends without it, or ten minutes have passed.
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
        """True until the command has ended and all its output is on the screen."""
        return self._reader.is_alive()

    def wait(self) -> Typed:
        """Wait until the command ends.

        Raises:
            RuntimeError: If the command fails, or ten minutes have passed.
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
        """Press Ctrl-C if the command is still running, and wait until it ends."""
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
        """Show the command's output until the last writer has closed the terminal."""
        while True:
            select.select([self._master], [], [])
            try:
                data = os.read(self._master, 65536)
            except OSError:  # on Linux, no process has the other end open
                data = b""
            now = time.monotonic()
            self.typed.silence = max(self.typed.silence, now - self._heard)
            self._heard = now
            if not data:
                return
            self._bytes += data
            self.typed.shown = self._bytes.decode(errors="replace")
            self._terminal._feed(data)
            while self._bytes.count(QUESTION) > self._answered:  # answer a question only after it is asked
                os.write(self._master, b"y\n")
                self._answered += 1


def _parts(cells: dict[int, pyte.screens.Char]) -> tuple[tuple[str, bool], ...]:
    """Return a line of the screen as parts of one style, without trailing blanks."""
    width = max((column + 1 for column, cell in cells.items() if cell.data.strip()), default=0)
    found: list[tuple[str, bool]] = []
    for column in range(width):
        cell = cells[column]
        if found and found[-1][1] == cell.bold:
            found[-1] = (found[-1][0] + cell.data, cell.bold)
        else:
            found.append((cell.data, cell.bold))
    return tuple(found)
