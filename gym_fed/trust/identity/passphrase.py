"""Read a passphrase from a file, an environment variable or the terminal, but never from an argument.

The passphrase is requested once per process and key folder, and kept only in memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError

MIN_CHARACTERS = 8

Ask = Callable[[str], str]
"""Displays a question and returns the user's input without echoing it."""


def ask_on_terminal(question: str) -> str:
    """Read a line from the terminal without echo."""
    import getpass

    return getpass.getpass(question + ": ")


@dataclass
class PassphraseSource:
    """The source of the passphrase for the keys in a folder.

    Args:
        variable: Environment variable that may contain the passphrase.
        file: File with the passphrase in its first line; takes precedence over the variable.
        ask: Function that prompts the user; None for ``ask_on_terminal`` if there is a terminal.
    """

    variable: str
    file: Path | None = None
    ask: Ask | None = None
    _known: bytes | None = field(default=None, repr=False)

    def get(self, what: str) -> bytes:
        """Return the passphrase of the existing keys.

        Raises:
            GymError: ``KEY_LOCKED``, with the variable's name, if the user cannot be prompted.
        """
        if self._known is None:
            self._known = self._given() or self._asked(what, f"passphrase of {what}")
        return self._known

    def create(self, what: str) -> bytes:
        """Return a new passphrase, which the user types twice.

        Raises:
            GymError: ``USAGE`` if it is too short or the two entries differ; ``KEY_LOCKED`` as in ``get``.
        """
        chosen = self._given()
        if chosen is None:
            chosen = self._asked(what, f"new passphrase for {what}")
            if self._asked(what, "repeat the passphrase") != chosen:
                raise GymError(
                    ErrorCode.USAGE, "the two passphrases differ", "nothing was changed; try again"
                )
        if len(chosen.decode("utf-8")) < MIN_CHARACTERS:
            raise GymError(
                ErrorCode.USAGE,
                f"the passphrase has fewer than {MIN_CHARACTERS} characters",
                "choose a longer one, such as several words",
            )
        self._known = chosen
        return chosen

    def forget(self) -> None:
        """Discard the passphrase, so that the next use prompts again."""
        self._known = None

    def _given(self) -> bytes | None:
        if self.file is not None:
            try:
                lines = self.file.expanduser().read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise GymError(ErrorCode.FILE_NOT_FOUND, f"--passphrase-file {self.file}: {error}") from error
            if not lines or not lines[0]:
                raise GymError(ErrorCode.USAGE, f"--passphrase-file {self.file}: the first line is empty")
            return lines[0].encode()
        return os.environ.get(self.variable, "").encode() or None

    def _asked(self, what: str, question: str) -> bytes:
        ask = self.ask
        if ask is None:
            if not (sys.stdin.isatty() and sys.stderr.isatty()):
                raise GymError(
                    ErrorCode.KEY_LOCKED,
                    f"{what} is encrypted, and there is no terminal to prompt on",
                    f"set {self.variable}, or pass a file that contains the passphrase",
                )
            ask = ask_on_terminal
        return ask(question).encode()
