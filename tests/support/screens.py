"""The screens of both faces, as their ``main.js`` lists them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FACES = {
    "hub": ROOT / "server/gym_server/web/screens",
    "webui": ROOT / "gym_fed/webui/screens",
    "client": ROOT / "client/gym_client/web/screens",
}


@dataclass(frozen=True)
class Screen:
    """One line of the list.

    Attributes:
        face: ``hub``, ``webui`` or ``client``.
        pattern: Its URL, with ``:name`` or ``*name`` for what differs.
        module: Its file's name without ``.js``.
    """

    face: str
    pattern: str
    module: str

    def url(self, parameters: dict[str, str]) -> str:
        """Its URL for these values."""
        return re.sub(r"[:*](\w+)", lambda found: parameters[found[1]], self.pattern)

    def __str__(self) -> str:
        return f"{self.face}-{self.pattern}"


def screens() -> list[Screen]:
    """All of them, in the order of the lists."""
    return [
        Screen(face, pattern, module)
        for face, folder in FACES.items()
        for pattern, module in re.findall(
            r'\["(/[^"]*)", screen\("(\w+)"\)\]', (folder / "main.js").read_text(encoding="utf-8")
        )
    ]
