"""Disjoint sets of Shakespeare's speakers: one to choose settings on, three to report; nobody is in two of them.

Speakers come most prolific first. Of the first 48, ordered by the sha256 of their names, the first 16 are the set on
which settings are chosen, and the next two sixteens are reported. The third reported set is the first 16 by the same
order of all others, who have less text: 2 to 7 thousand characters each. Of each set the first eight train, and the
other eight measure the loss, each by its first four thousand characters.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

PROLIFIC = 48
TRAINED, HELDOUT = 8, 8
HELDOUT_CHARACTERS = 4000
"""Of a held-out speaker, so that each counts about as much as the others."""


@dataclass(frozen=True)
class SpeakerSet:
    """Speeches by speaker: those who train, and those who measure."""

    name: str
    contributors: dict[str, list[str]]
    heldout: dict[str, list[str]]

    def write(self, folder: Path) -> None:
        """``speaker0.jsonl`` and on, and ``heldout.jsonl``."""
        folder.mkdir(parents=True, exist_ok=True)
        for index, speeches in enumerate(self.contributors.values()):
            (folder / f"speaker{index}.jsonl").write_text(_rows(speeches))
        (folder / "heldout.jsonl").write_text("".join(_rows(speeches) for speeches in self.heldout.values()))


def speaker_sets(file: Path) -> dict[str, SpeakerSet]:
    """``choice``, and ``first``, ``second`` and ``less text`` to report."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    speeches = {str(line["speaker"]): list(line["speeches"]) for line in lines}
    names = list(speeches)
    prolific, others = sorted(names[:PROLIFIC], key=_order), sorted(names[PROLIFIC:], key=_order)
    size = TRAINED + HELDOUT
    members = {
        "choice": prolific[:size],
        "first": prolific[size : 2 * size],
        "second": prolific[2 * size : 3 * size],
        "less text": others[:size],
    }
    assert len({name for chosen in members.values() for name in chosen}) == size * len(members)
    return {
        name: SpeakerSet(
            name,
            {who: speeches[who] for who in chosen[:TRAINED]},
            {who: _first(speeches[who]) for who in chosen[TRAINED:]},
        )
        for name, chosen in members.items()
    }


def _first(speeches: list[str]) -> list[str]:
    """Whole speeches, until there are enough characters."""
    ends = accumulate(len(text) for text in speeches)
    return [text for text, end in zip(speeches, ends, strict=True) if end - len(text) < HELDOUT_CHARACTERS]


def _order(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8")).hexdigest()


def _rows(speeches: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in speeches)
