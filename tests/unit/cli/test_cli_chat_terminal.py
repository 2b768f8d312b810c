"""`gym chat` at a terminal: a person types, pastes, and presses Ctrl-C. The model is a rule, so nothing is loaded."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.wait import SECONDS


class Typist:
    """A pseudo-terminal with `gym chat` in it."""

    def __init__(self, home: Path) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "GYM_HOME": str(home), "TERM": "xterm", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.chat_writer", "gym-nano"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            cwd=Path(__file__).resolve().parents[3],
            preexec_fn=own_terminal,
        )
        os.close(slave)
        self.shown = ""
        self._read_to = 0

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ctrl_c_at_prompt(self) -> None:
        """Once it waits for a key: CPython's readline forgets a signal that comes between the prompt and that."""
        end = time.monotonic() + SECONDS
        while Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "S":
            assert time.monotonic() < end, "it does not wait for input"
            time.sleep(0.01)
        self.type("\x03")

    def until(self, text: str) -> str:
        """Wait for ``text`` after what was waited for last; what was shown until then."""
        end = time.monotonic() + SECONDS
        while text not in self.shown[self._read_to :]:
            assert time.monotonic() < end, f"no {text!r} in {self.shown!r}"
            if select.select([self._master], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self._master, 4096).decode(errors="replace")
                except OSError:  # Linux: the other end was closed
                    assert text in self.shown[self._read_to :], f"no {text!r} in {self.shown!r}"
        at = self.shown.index(text, self._read_to) + len(text)
        part, self._read_to = self.shown[self._read_to : at], at
        return part

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def own_terminal() -> None:
    """In the child: the terminal is the one that Ctrl-C comes from."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def typist(tmp_path: Path) -> Iterator[Typist]:
    typist = Typist(tmp_path / "home")
    yield typist
    typist.close()


def test_a_person_chats_pastes_stops_an_answer_and_leaves(typist: Typist, tmp_path: Path) -> None:
    typist.until("/help lists")
    typist.until("> ")
    typist.type("hey\r")
    typist.until("HEY")
    typist.until("> ")
    typist.type("\x1b[200~two\nlines\x1b[201~\r")  # as terminals send what is pasted
    typist.until("TWO\r\nLINES")
    typist.until("> ")
    typist.type("/variant ada\r")
    typist.until("rule:ada")
    typist.until("ada> ")
    typist.type("long\r")
    typist.until("....")
    typist.type("\x03")
    typist.until("the partial answer is kept")
    typist.until("ada> ")
    typist.type("/history\r")
    history = typist.until("assistant: .")
    assert "user: two\r\nlines" in history
    dots = typist.until("ada> ")
    assert 0 < dots.count(".") < 399
    typist.type("/nosuch\r")
    typist.until("is not a command")
    typist.until("ada> ")
    typist.type("\x1b[A\x1b[A\r")  # two lines up in the history of what was typed
    typist.until("assistant: HEY")
    typist.until("ada> ")
    typist.ctrl_c_at_prompt()
    typist.until("Ctrl-C again")
    typist.until("ada> ")
    typist.ctrl_c_at_prompt()
    assert typist.process.wait(timeout=SECONDS) == 0
    kept = tmp_path / "home" / "chat_history"
    assert kept.stat().st_mode & 0o077 == 0
    assert "/variant ada" in kept.read_text()


def test_an_answer_that_is_stopped_before_it_begins_leaves_the_conversation_as_it_was(
    typist: Typist,
) -> None:
    typist.until("> ")
    typist.type("slow\r")
    typist.until("reading the prompt")
    typist.type("\x03")
    typist.until("stopped; the conversation is unchanged")
    typist.until("> ")
    typist.type("/history\r")
    typist.until("there are no messages yet")


def test_the_end_of_input_leaves(typist: Typist) -> None:
    typist.until("> ")
    typist.type("\x04")
    assert typist.process.wait(timeout=SECONDS) == 0


def test_a_home_that_cannot_be_written_takes_only_the_history_of_the_keyboard(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file, where no folder can be")
    typist = Typist(tmp_path / "home")
    try:
        typist.until("the history of messages is not saved")
        typist.until("> ")
        typist.type("hey\r")
        typist.until("HEY")
        typist.type("/exit\r")
        assert typist.process.wait(timeout=SECONDS) == 0
    finally:
        typist.close()
