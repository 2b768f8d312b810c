"""The terminal of `gym chat`: read messages, stream answers, and run commands that begin with a slash."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.core.console import err
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, harmless
from gym_fed.serving.chat.session import ThoughtText, text_shown

if TYPE_CHECKING:
    from gym_fed.cli.chat.settings import ChatSettings
    from gym_fed.serving.chat.session import ChatSession


SHOWN_VARIANTS = 50
BLOCK = '"""'


class Terminal:
    """A chat session in the terminal.

    Args:
        conversation: The conversation, which generates the answers.
        settings: The sampling settings, which `/set` changes.
        as_json: True to print each complete answer as a line of JSON.
    """

    def __init__(self, conversation: ChatSession, settings: ChatSettings, *, as_json: bool = False) -> None:
        self.conversation = conversation
        self.settings = settings
        self._as_json = as_json
        self._typed = sys.stdin.isatty()
        self._forgotten = 0

    def run(self) -> None:
        """Run the session until the end of input, `/exit`, or Ctrl-C twice at the prompt.

        Raises:
            GymError: If an answer fails and the input is not a terminal.
        """
        if self._typed:
            self._note(f"{self.conversation.model}: /help lists the commands, /exit exits")
        warned = False
        while True:
            try:
                message = _read_message(f"{self.conversation.variant or ''}> ")
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                if warned or not self._typed:
                    return
                warned = True
                self._note("press Ctrl-C again, or type /exit, to exit")
                continue
            warned, before = False, list(self.conversation.messages)
            if message is None:
                if self._typed:
                    sys.stdout.write("\n")
                return
            try:
                if not self._take(message):
                    return
            except KeyboardInterrupt:
                if not self._typed:
                    raise
                same = self.conversation.messages == before
                self._note(
                    f"stopped; {'the conversation is unchanged' if same else 'the partial answer is kept'}"
                )
            except GymError as error:
                if not self._typed:
                    raise
                self._note(f"{error.message}\n  {error.hint}" if error.hint else error.message)

    def answer(self, text: str) -> None:
        """Send a message, and print the answer while it is generated. On Ctrl-C the session keeps the text so far.

        Raises:
            GymError: If the message or its answer is refused.
        """
        chunks: list[str] = []
        thoughts: list[str] = []
        try:
            with closing(self.conversation.say(text)) as texts:
                for part in texts:
                    is_thought = isinstance(part, ThoughtText)
                    if is_thought:
                        thoughts.append(part)
                    elif thoughts and not chunks and not self._as_json:
                        self._write_thought("\n")
                    if not is_thought:
                        chunks.append(part)
                    if not self._as_json:
                        (self._write_thought if is_thought else self._write)(part)
        finally:
            if chunks and not self._as_json:
                self._write("\n")
        if self._as_json:
            report = self.report(text, "".join(chunks), "".join(thoughts))
            self._write(json.dumps(report, ensure_ascii=False) + "\n")
        elif not chunks:
            self._write("\n")
        self._print_end()

    def report(self, prompt: str, answer: str, thought: str = "") -> dict[str, object]:
        """Return an answer as JSON values."""
        return {
            "model": self.conversation.model,
            "prompt": prompt,
            "answer": answer,
            **({"reasoning": thought} if thought else {}),
            "finish_reason": self.conversation.finish_reason,
            "forgotten": self.conversation.forgotten,
        }

    def _take(self, message: str) -> bool:
        """Run a command; return False to exit."""
        if not message:
            return True
        if not message.startswith("/") or message.startswith("//") or "\n" in message:
            self.answer(message.removeprefix("/") if message.startswith("//") else message)
            return True
        name, _, argument = message.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        command = _COMMANDS.get(name)
        if command is None:
            raise GymError(
                ErrorCode.USAGE,
                f"{name} is not a command; commands: {', '.join(_COMMANDS)} and /exit",
                "to send a message that begins with a slash, type two slashes",
            )
        command(self, argument.strip())
        return True

    def _print_end(self) -> None:
        if self.conversation.forgotten > self._forgotten:
            gone = self.conversation.forgotten
            self._note(f"the context is full: the model no longer sees the first {counted(gone, 'message')}")
        self._forgotten = self.conversation.forgotten
        if self.conversation.finish_reason == "length":
            self._note(f"cut off: max_tokens is {self.settings.max_tokens}, or the context is full")

    @property
    def _always_the_same(self) -> bool:
        return self.settings.temperature == 0 or self.settings.seed is not None

    def _write(self, text: str) -> None:
        sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def _write_thought(self, text: str) -> None:
        """Write a part of a thought to standard error, so that piped output has only the answer."""
        err.print(harmless(text), style="dim", end="", markup=False, highlight=False, soft_wrap=True)

    def _note(self, text: str) -> None:
        err.print(text, style="dim")

    # Slash commands: the first line of each docstring is its help.

    def _help(self, argument: str) -> None:
        """list the commands"""
        for name, command in _COMMANDS.items():
            self._note(f"{name:9} {command.__doc__}")
        self._note("/exit     exit")
        self._note('a line ending in \\ continues in the next; lines between """ and """ are one message')

    def _variant(self, argument: str) -> None:
        """[NAME|none]: list the variants, or answer with another one; the conversation stays"""
        if argument:
            self.conversation.switch(None if argument == "none" else argument)
            self._note(self.conversation.model)
            return
        names = self.conversation.writer.variants()
        if names:
            self._note(f"{'*' if self.conversation.variant is None else ' '} none (only the base)")
        for name in names[:SHOWN_VARIANTS]:
            self._note(f"{'*' if name == self.conversation.variant else ' '} {name}")
        if len(names) > SHOWN_VARIANTS:
            self._note(f"... and {len(names) - SHOWN_VARIANTS} more")
        if not names:
            self._note(f"no variants of {self.conversation.writer.base}")

    def _system(self, argument: str) -> None:
        """[TEXT|none]: show or change the system message"""
        if argument:
            self.conversation.require_memory("a system message")
            self.conversation.system = None if argument == "none" else argument
        self._note(
            self.conversation.system if self.conversation.system is not None else "no system message is set"
        )

    def _history(self, argument: str) -> None:
        """show the messages"""
        if not self.conversation.messages and self.conversation.system is None:
            self._note("there are no messages yet")
        if self.conversation.system is not None:
            self._write(f"system: {self.conversation.system}\n")
        for number, message in enumerate(self.conversation.messages):
            seen = "" if number >= self.conversation.forgotten else " (no longer seen)"
            self._write(f"{message['role']}{seen}: {text_shown(message['content'])}\n")

    def _reset(self, argument: str) -> None:
        """remove all messages"""
        self.conversation.reset()
        self._forgotten = 0
        self._note("all messages removed")

    def _retry(self, argument: str) -> None:
        """answer the last question again"""
        before = list(self.conversation.messages), self.conversation.forgotten
        last = self.conversation.undo()
        if last is None:
            raise GymError(ErrorCode.USAGE, "there is no question yet")
        question, parts = last
        pending, self.conversation.attached = self.conversation.attached, parts
        num_messages = len(self.conversation.messages)
        try:
            self.answer(question)
        finally:
            if len(self.conversation.messages) == num_messages:  # no new answer: restore the old one
                self.conversation.messages, self.conversation.forgotten = before
            self.conversation.attached = pending
        if self.conversation.messages == before[0] and self._always_the_same:
            self._note("same answer; for different answers: /set temperature=0.7 seed=none")

    def _undo(self, argument: str) -> None:
        """remove the last question and its answer"""
        last = self.conversation.undo()
        self._note("there is no question yet" if last is None else f"removed: {last[0]}")

    def _attach(self, argument: str) -> None:
        """FILE or none: attach a picture, sound or video to the next message"""
        if argument.strip() == "none":
            self.conversation.attached = []
            self._note("nothing is attached")
            return
        path = _path(argument, "/attach cat.png")
        self.conversation.attach(path)
        self._note(f"{path.name} is attached to the next message")

    def _save(self, argument: str) -> None:
        """FILE: write the conversation as JSON messages"""
        path = _path(argument)
        self.conversation.save(path)
        self._note(f"{counted(len(self.conversation.messages), 'message')} in {path}")

    def _load(self, argument: str) -> None:
        """FILE: continue a saved conversation"""
        self.conversation.load(_path(argument))
        self._forgotten = 0
        self._note(f"{counted(len(self.conversation.messages), 'message')}")

    def _set(self, argument: str) -> None:
        """[NAME=VALUE ...]: show or change the sampling, such as temperature=0.7"""
        changed = self.settings
        for word in _words(argument):
            changed = changed.changed(word)
        self.settings = changed
        self.conversation.sampling = changed.fields()
        self._note(str(changed))


_COMMANDS: dict[str, Callable[[Terminal, str], None]] = {
    f"/{name}": getattr(Terminal, f"_{name}")
    for name in [
        "help",
        "variant",
        "system",
        "history",
        "reset",
        "retry",
        "undo",
        "attach",
        "save",
        "load",
        "set",
    ]
}


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise GymError(ErrorCode.USAGE, f"{text!r}: {error}") from error


def _path(argument: str, example: str = "/save talk.json") -> Path:
    if not argument:
        raise GymError(ErrorCode.USAGE, "FILE is missing", f"such as {example}")
    return Path(argument).expanduser()


def _read_message(prompt: str) -> str | None:
    """Read one message; None at the end of input.

    A line that ends with a backslash continues in the next one; text between two lines of three quotes is one message.

    Args:
        prompt: The prompt, shown on a terminal.

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
        if following is None:  # the end of input also ends the block
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
