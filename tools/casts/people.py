"""Play the scripts of four people in terminals, alone or as coordinator and contributor."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tools.casts.environment import ROOT, Environment
from tools.casts.terminal import Line, Terminal, Typed

SCRIPTS = ROOT / "tests" / "newcomer"
STAYS = "# stays"
"""Marks a command that keeps running in its terminal; the commands after it are typed into another one."""
LISTENS = "TLS key"
SERVES = "Ctrl-C exits"


@dataclass(frozen=True)
class Person:
    """A person who uses the project for the first time.

    Attributes:
        script: Name of the person's script, without suffix.
        headings: The person's headings in docs/quickstart.md.
        picture: Description of the cast, for readers who cannot see it.
        files: Files that the page tells the reader to save; they are in the folder of the scripts.
    """

    script: str
    headings: tuple[str, ...]
    picture: str
    files: tuple[str, ...] = ()

    def commands(self) -> list[str]:
        """Return the lines that the person types."""
        lines = (SCRIPTS / f"{self.script}.sh").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line and not line.startswith("#")]


ALONE = Person(
    "alone",
    ("You train alone",),
    "A terminal: gym train teaches gym-nano a task, gym chat answers, gym eval scores, gym export writes a folder.",
)
VARIANT_OWNER = Person(
    "variant_owner",
    ("You want a variant of your own",),
    "A terminal: gym variant create makes a variant, gym api serves it, and openai's client gets its answer.",
    ("ask.py",),
)
COORDINATOR = Person(
    "coordinator",
    ("You coordinate a community", "The coordinator again"),
    "A terminal: gym-server init makes a hub, gym-server run merges a round with one friend, and the model answers.",
)
CONTRIBUTOR = Person(
    "contributor",
    ("You contribute",),
    "A terminal: gym-client join shows the hub's key and its terms, trains after two yeses, and shows the balance.",
)
PEOPLE = (ALONE, VARIANT_OWNER, COORDINATOR, CONTRIBUTOR)


@dataclass
class Played:
    """The result of playing a person's script.

    Attributes:
        person: The person.
        home: The person's home folder.
        folder: Working folder of the commands.
        seconds: Time from the first command to the end of the last.
        terminals: The terminals, in the order in which they were opened.
    """

    person: Person
    home: Path
    folder: Path
    seconds: float = 0.0
    terminals: list[Terminal] = field(default_factory=list)

    @property
    def typed(self) -> list[Typed]:
        """The commands of all terminals, in order."""
        return [typed for terminal in self.terminals for typed in terminal.typed]

    def shown(self) -> str:
        """Return the text of all terminals."""
        return "\n".join(terminal.text() for terminal in self.terminals)

    def lines(self) -> list[Line]:
        """Return the lines of all terminals, one terminal after the other."""
        found: list[Line] = []
        for terminal in self.terminals:
            lines = terminal.lines()
            if found and lines:
                found += [
                    Line(lines[0].second, ()),
                    Line(lines[0].second, (("# in another terminal", False),)),
                ]
            found += lines
        return found


@contextmanager
def moved_in(
    person: Person, environment: Environment, place: Path
) -> Iterator[tuple[Played, Callable[[], Terminal]]]:
    """Create a home for a person, with terminals in an empty folder of it, and time the block."""
    home = place / person.script
    folder = home / "gym"
    folder.mkdir(parents=True)
    for name in person.files:
        shutil.copy(SCRIPTS / name, folder)
    played, began = Played(person, home, folder), time.monotonic()

    def terminal() -> Terminal:
        played.terminals.append(Terminal(folder, environment.variables(home), began))
        return played.terminals[-1]

    yield played, terminal
    played.seconds = time.monotonic() - began


def play(person: Person, environment: Environment, place: Path) -> Played:
    """Type a person's script.

    Raises:
        RuntimeError: If a command fails or takes longer than ten minutes.
    """
    with moved_in(person, environment, place) as (played, terminal):
        _type(person.commands(), terminal)
    return played


def play_round(environment: Environment, place: Path) -> tuple[Played, Played]:
    """Play a coordinator who runs a hub, and a contributor who joins as soon as it listens.

    Returns:
        The results of the coordinator's and the contributor's script.
    """
    with moved_in(COORDINATOR, environment, place) as (played, terminal):
        here = terminal()
        for command in COORDINATOR.commands():
            running = here.type(command)
            if command.startswith("gym-server run"):
                running.wait_for(LISTENS)
                friend = play(CONTRIBUTOR, environment, place)
            running.wait()
    return played, friend


def _type(commands: list[str], terminal: Callable[[], Terminal]) -> None:
    here = terminal()
    for number, line in enumerate(commands):
        if STAYS not in line:
            here.run(line)
            continue
        with here.type(line.partition(STAYS)[0].rstrip()) as running:
            running.wait_for(SERVES)
            _type(commands[number + 1 :], terminal)
        return
