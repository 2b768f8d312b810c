"""Report words that this project has retired, and the standard word for each.

A word is searched for in names and prose: ``purse`` is found in ``purse_of``, ``PurseRow`` and "a purse", but not in
"pursed". Only misleading words are listed: private names for things that have a standard name. Words with a second,
ordinary meaning (a mixture of datasets) are searched for only as names of classes, or only in some folders. "reading"
and "writing" of requests (prefill, decode), "turn" of a loop (step) and "rest" (idle) are not checked, since no pattern
separates them from their ordinary meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

from tools.checks.files import Finding


@dataclass(frozen=True)
class Word:
    """A retired word, how it is recognised, and where it is searched for."""

    today: str
    """The word in lower case; lines that do not contain it are skipped."""
    instead: str
    pattern: str = ""
    """A regular expression; by default, the word itself in a name or in prose."""
    unless: str = r"(?!)"
    """A regular expression for lines in which the word has a different meaning."""
    where: tuple[str, ...] = ("*",)
    """Patterns of the paths in which the word is searched for."""


def part(word: str) -> str:
    """Return a pattern for ``word`` alone, in snake_case, in CamelCase and in capitals."""
    title = word[0].upper() + word[1:]
    inside = rf"(?<=[a-z]){title}(?![a-z])"
    return rf"(?<![A-Za-z])(?:(?:{word}|{title})(?![a-z])|{word.upper()}(?![A-Za-z]))|{inside}"


def klass(names: str) -> str:
    """Return a pattern for the definition of a class whose name matches the regular expression ``names``."""
    return rf"^\s*class (?:{names})\b"


SERVING = ("gym_fed/serving/*", "gym_fed/cli/api/*", "gym_fed/personalization/*", "tests/unit/serving/*")
DELTAS = (
    "gym_fed/delta/*",
    "gym_fed/soup/*",
    "quant/*",
    "tests/unit/delta/*",
    "tests/unit/soup/*",
    "tests/unit/quant/*",
)

RETIRED = (
    Word("liar", "malicious client, Byzantine client", part("liars?"), unless="constant_liar"),
    Word("roster", "ActiveVariants (serving), participants", part("rosters?")),
    Word("rowmap", "segments", part("row_?map") + "|RowMap"),
    Word("row_map", "segments"),
    Word("class piece", "Chunk", klass(r"Pieces?(?:[A-Z]\w*)?")),
    Word("class mixed", "MultiVariantModel, VariantLayers", klass(r"Mixed(?!Precision)[A-Z]\w*")),
    Word("operand", "VariantWeight", klass(r"\w*Operands?"), where=("gym_fed/*", "tests/*")),
    Word("operand", "weight of a variant", part("operands?"), where=SERVING),
    Word("class site", "target module", klass("Site")),
    Word("class slot", "target module", klass("Slot")),
    Word("residency", "VariantCache"),
    Word("shelf", "writer", unless=r"(?i)off.the.shelf"),
    Word("class order", "job", klass("Order")),
    Word("class made", "result", klass("Made")),
    Word("class choice", "SampledToken (serving); name what is chosen", klass("Choice")),
    Word("class guard", "AuthInterceptor", klass("Guard")),
    Word("geometry", "GramMatrix", unless=r"subsets: \["),
    Word("class mixture", "CombinationWeights", klass("Mixture")),
    Word("likeness", "similarity"),
    Word("purse", "balance", part("purses?")),
    Word("standing", "reputation", unless=r"(?i)long.standing"),
    Word(
        "journal",
        "RoundStore",
        unless=r"(?i)sqlite|journal_?(mode|ctl|d\b)|-journal|\bWAL\b|optuna|study\.journal|storages\.journal|JournalStorage",
    ),
    Word("sides", "factors", where=DELTAS),
    Word("untranslated", "--ignore-unsupported", r"(?i)allow[-_]untranslated"),
)


@dataclass(frozen=True)
class Allowed:
    """A place where retired words are allowed, and the reason."""

    path: str
    """A pattern of paths."""
    line: str
    """A regular expression for the lines that are allowed."""
    reason: str


ALLOWED = (
    Allowed("tools/checks/words.py", "", "this list"),
    Allowed("gym_fed/privacy/secure_aggregation/messages.py", '"roster": ', "bytes that contributors sign"),
    Allowed("tests/unit/repository/test_checks.py", "", "plants each word to see that it is found"),
)

_RULES = [(word, re.compile(word.pattern or part(word.today)), re.compile(word.unless)) for word in RETIRED]


def retired_words(files: dict[str, str]) -> Iterator[Finding]:
    """Yield every retired word in the lines and the path of each file."""
    for file, text in files.items():
        small = f"{file}\n{text}".lower()
        rules = [
            rule
            for rule in _RULES
            if rule[0].today in small and any(fnmatch(file, place) for place in rule[0].where)
        ]
        allowed = [re.compile(a.line) for a in ALLOWED if fnmatch(file, a.path)]
        for number, line in enumerate([file, *text.splitlines()]) if rules else ():
            lowered = line.lower()
            for word, pattern, unless in rules:
                if word.today in lowered and not unless.search(line):
                    if any(place.search(line) for place in allowed):
                        continue
                    for match in pattern.finditer(line):
                        message = f"retired word {match[0].strip()!r}: use {word.instead}"
                        yield Finding(file, number, message)
