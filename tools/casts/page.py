"""Update the casts and their times in docs/quickstart.md."""

from __future__ import annotations

from tools.casts.environment import ROOT, Environment
from tools.casts.people import Person, Played

PAGE = ROOT / "docs" / "quickstart.md"
FOLDER = ROOT / "docs" / "casts"
END = "<!-- until here, by tools/casts -->\n"


def begin(person: Person) -> str:
    """Return the marker line before a person's cast."""
    return f"<!-- cast of {person.script}, by tools/casts -->\n"


def section(played: Played, environment: Environment) -> str:
    """Return the picture of a person's cast, and the time that it took."""
    file = f"casts/{played.person.script}.svg"
    return (
        f'<picture><source media="(prefers-reduced-motion: reduce)" srcset="{file}#still">'
        f'<img src="{file}" alt="{played.person.picture}"></picture>\n\n'
        f"Recorded in a new environment and an empty home: {len(played.typed)} commands in {played.seconds:.0f} s, "
        f"after {environment.install_seconds:.0f} s of installation. Waits are cut short.\n"
    )


def written(text: str, played: Played, environment: Environment) -> str:
    """Return the text of the page with a person's section replaced."""
    before, rest = text.split(begin(played.person))
    _, after = rest.split(END, 1)
    return f"{before}{begin(played.person)}{section(played, environment)}{END}{after}"
