"""Guess which columns of a file contain questions and answers, first by name, then by content."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Raw = dict[str, Any]

_QUESTIONS = (
    ("prompt", "question", "instruction", "query", "problem", "input", "task", "request", "inquiry", "q"),
    (
        *("human", "user", "customer", "client", "ticket", "message", "q", "sentence", "source"),
        *("text", "content"),
    ),
)
_ANSWERS = (
    ("completion", "answer", "response", "output", "reply", "solution", "a"),
    (
        *("assistant", "bot", "gpt", "chatbot", "agent", "model", "resolution", "target"),
        *("label", "category", "a"),
    ),
)
"""Names of answer columns, and names that count only if there is no column with one of those."""
_CHOSEN = ("chosen", "preferred", "better", "accepted", "winner", "win", "good")
_REJECTED = ("rejected", "dispreferred", "worse", "refused", "loser", "lose", "bad")
_FILLERS = {
    *("customer", "client", "user", "human", "our", "your", "my", "the", "a", "an", "agent"),
    *("support", "expected", "correct", "gold", "reference", "ideal", "best", "final"),
    *("full", "model", "bot", "assistant", "generated", "original", "text", "column"),
    *("field", "value"),
}
_CONTEXTS = {"context", "background", "passage"}
"""Names of columns with the text that a question refers to, which is often longer than the answer."""
_KNOWN = {*_FILLERS, *_CONTEXTS}.union(*_QUESTIONS, *_ANSWERS, _CHOSEN, _REJECTED)
_PLURALS = (("ies", "y"), ("s", ""))
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+")
_TURN_KEYS = {"role": "messages", "from": "conversations"}
_SPACED_TEXT = 0.5
"""Minimum share of sampled values with several words in a column of texts, as opposed to codes or dates."""


@dataclass(frozen=True)
class ColumnGuess:
    """Guessed columns, by the names that formats expect.

    Attributes:
        columns: Column names in the file, by the names that formats expect.
        unread: All other columns of the file.
        by_length: True if a column was chosen by the length of its texts instead of its name.
    """

    columns: dict[str, str]
    unread: tuple[str, ...]
    by_length: bool = False

    @property
    def option(self) -> str:
        """The ``--columns`` option for these columns, quoted for a shell."""
        return columns_option(self.columns)


def guess_columns(sample: Sequence[Raw], kind: str = "any") -> ColumnGuess | None:
    """Guess the columns of rows that no format recognises.

    Args:
        sample: The first raw rows of a file.
        kind: The kind of rows that is needed; see ``gym_fed.data.rows``.

    Returns:
        The guess; None if no column can be the answer.
    """
    names = list(dict.fromkeys(str(name) for row in sample for name in row))
    for name in names:
        if (ours := _turns(row.get(name) for row in sample)) is not None:
            return _guess({ours: name}, names)
    texts = [name for name in names if _is_text(row.get(name) for row in sample)]
    prompt = _best(texts, _QUESTIONS)
    chosen, rejected = _best(texts, (_CHOSEN,), any_word=True), _best(texts, (_REJECTED,), any_word=True)
    if chosen and rejected and chosen != rejected:
        prompt = prompt if prompt not in (chosen, rejected) else None
        prompt = prompt or _longest([name for name in texts if name not in (chosen, rejected)], sample)
        first = {} if prompt is None else {"prompt": prompt}
        return _guess({**first, "chosen": chosen, "rejected": rejected}, names)
    if kind in ("preference", "unpaired") or not texts:
        return None
    answer = _best([name for name in texts if name != prompt], _ANSWERS)
    if prompt is not None and answer is not None:
        return _guess({"prompt": prompt, "completion": answer}, names)
    return _by_length(prompt, answer, texts, names, sample)


def _by_length(
    prompt: str | None, answer: str | None, texts: list[str], names: list[str], sample: Sequence[Raw]
) -> ColumnGuess | None:
    """Complete a guess by text length: the longest texts are the answer.

    A column with the name of a question or context is never the answer, and one with the name of an answer never the
    prompt.
    """
    if answer is None and _best(names, _ANSWERS[:1]):
        return None  # the answers are present, but not as texts
    spaced = [name for name in texts if _has_words(row.get(name) for row in sample)]
    unsaid = [
        name
        for name in spaced
        if name != prompt and not _best([name], _QUESTIONS[:1]) and "".join(_words(name)) not in _CONTEXTS
    ]
    answer = answer or _longest(unsaid, sample)
    others = [name for name in spaced if name != answer and not _best([name], _ANSWERS[:1])]
    prompt = prompt or _longest(others, sample)
    if answer is None:
        return None
    if prompt is None:
        return _guess({"text": answer}, names, by_length=True)
    return _guess({"prompt": prompt, "completion": answer}, names, by_length=True)


def _guess(columns: dict[str, str], names: Iterable[str], *, by_length: bool = False) -> ColumnGuess:
    unread = tuple(name for name in names if name not in columns.values())
    return ColumnGuess(columns, unread, by_length)


def _best(names: Sequence[str], tables: Sequence[tuple[str, ...]], *, any_word: bool = False) -> str | None:
    """Return the best match of a name: exact, then without filler words, then by any of its words."""
    ranked = []
    for position, name in enumerate(names):
        words = _words(name)
        spellings = ["".join(words), "".join(word for word in words if word not in _FILLERS)]
        spellings += words if any_word else ()
        ranked += [
            (tier, rank, table.index(word), position)
            for tier, table in enumerate(tables)
            for rank, word in enumerate(spellings)
            if word in table
        ]
    return names[min(ranked)[3]] if ranked else None


def _words(name: str) -> list[str]:
    return [_singular(word.lower()) for word in _WORDS.findall(name)]


def _singular(word: str) -> str:
    """Return the singular of a word."""
    if word in _KNOWN:
        return word
    singulars = (word.removesuffix(end) + last for end, last in _PLURALS if word.endswith(end))
    # a single letter remains, as in "as", which is not a plural
    return next((form for form in singulars if len(form) > 1 and form in _KNOWN), word)


def _turns(values: Iterable[Any]) -> str | None:
    """Return ``messages`` or ``conversations`` if a column contains lists of turns."""
    for value in values:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return next((ours for key, ours in _TURN_KEYS.items() if key in value[0]), None)
    return None


def _is_text(values: Iterable[Any]) -> bool:
    present = [value for value in values if value is not None]
    return bool(present) and all(isinstance(value, str) for value in present)


def _has_words(values: Iterable[Any]) -> bool:
    texts = [value for value in values if isinstance(value, str)]
    return sum(len(value.split()) > 1 for value in texts) >= _SPACED_TEXT * len(texts)


def _longest(names: Sequence[str], sample: Sequence[Raw]) -> str | None:
    lengths = {name: sum(len(row.get(name) or "") for row in sample) for name in names}
    return max(names, key=lambda name: lengths[name]) if names else None


def columns_option(columns: Mapping[str, str]) -> str:
    """Return ``--columns ...``, quoted for a shell."""
    return f"--columns {shlex.quote(columns_text(columns))}"


def columns_text(columns: Mapping[str, str]) -> str:
    """Format columns for ``parse_columns``."""
    text = ",".join(f"{ours}={theirs}" for ours, theirs in columns.items())
    if any("," in theirs or theirs != theirs.strip() for theirs in columns.values()):
        return json.dumps(dict(columns), ensure_ascii=False)
    return text


def guess_rest(sample: Sequence[Mapping[str, Any]], kind: str = "any") -> ColumnGuess | None:
    """Guess the columns that ``--columns`` did not name, by the names in the file, so the suggestion can be copied.

    Args:
        sample: The first rows of a file; either all or none of them are renamed.
        kind: The required kind of rows.
    """
    guess = guess_columns([dict(row) for row in sample], kind)
    given: Mapping[str, str] = getattr(sample[0], "columns", {}) if sample else {}
    if guess is None or not given:
        return guess
    guessed = {ours: given.get(theirs, theirs) for ours, theirs in guess.columns.items()}
    named = {
        ours: theirs
        for ours, theirs in given.items()
        if ours not in guessed and theirs not in guessed.values()
    }
    unread = tuple(name for name in guess.unread if name not in named)
    return replace(guess, columns={**named, **guessed}, unread=unread)
