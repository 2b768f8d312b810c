"""Read a user's rows: determine their kind and form (chat or text), and hold out a fraction."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.data.reading import Rename, converted, iter_rows, renaming
from gym_fed.data.rows import PlacedDict, Row, as_kind, kind_of, memory_rows
from gym_fed.data.string_rows import as_turns, is_string_row

PersonalKind = Literal["supervised", "preference"]
Form = Literal["chat", "plain"]
"""``chat``: the variant answers a conversation; ``plain``: it continues a text, as in ``/v1/completions``."""
FORM_KEY = "rows"
"""The key for the form of the rows in a delta's manifest (``extra``)."""
Source: TypeAlias = "str | Path | Sequence[Mapping[str, Any]]"
"""A path of a file or folder, a pattern, or rows in memory."""

MIN_HELD_OUT = 2
MIN_ROWS = 8
"""Minimum number of distinct rows for holding some out. Below it, one or two sentences would decide the loss."""

_KINDS = ("supervised", "preference")
_REMEDY = (
    "use rows with messages, prompt and completion, or text; or all of them with prompt, chosen and rejected"
)


@dataclass(frozen=True)
class PersonalRows:
    """A user's rows, all of the same kind.

    Attributes:
        kind: ``supervised`` or ``preference``.
        held_out: Rows that are never used for training; empty if there are too few rows.
        digest: Hex SHA-256 of all rows and of the held-out selection.
        learnt_as: Description of the form in which the rows are trained; see ``formed``.
    """

    kind: PersonalKind
    train: list[Row]
    held_out: list[Row]
    digest: str
    learnt_as: str = ""
    raw: bool = False
    """True if rows of plain strings stay plain text even if the base has a chat template (``--plain``)."""

    @property
    def form(self) -> Form:
        """The form of the rows: ``chat`` if any row is a conversation, otherwise ``plain``."""
        rows = (*self.train, *self.held_out)
        is_chat = any("messages" in row or isinstance(row.get("prompt"), list) for row in rows)
        return "chat" if is_chat else "plain"

    def formed(self, tokenizer: Any, as_chat: bool | None = None) -> PersonalRows:
        """Choose whether rows of plain strings are trained as chat turns or as plain text.

        The held-out rows stay the same. Conversations and texts are not changed.

        Args:
            as_chat: True for chat turns, False for plain text; None for chat turns if the base has a chat template.

        Raises:
            GymError: ``USAGE`` for chat turns if the base has no chat template, or for plain text mixed with
                conversations.
        """
        templated = bool(tokenizer.chat_template)
        if as_chat and not templated:
            reason = "rows are trained as chat turns, but the base has no chat template"
            raise GymError(ErrorCode.USAGE, reason, "train them as plain text with --plain (as_chat=False)")
        if not any(is_string_row(row) for row in (*self.train, *self.held_out)):
            return replace(self, learnt_as="conversations" if self.form == "chat" else "texts")
        if as_chat is False or not templated:
            if templated and self.form == "chat":
                reason = "some rows are conversations, but plain rows were requested"
                remedy = "omit --plain (as_chat=False), or use rows of one kind"
                raise GymError(ErrorCode.USAGE, reason, remedy)
            why = "as given" if templated else "the base has no chat template"
            return replace(self, learnt_as=f"prompts continued as bare text ({why})", raw=templated)
        train, held = as_turns(tokenizer, self.train), as_turns(tokenizer, self.held_out)
        words = "chat turns: prompts from the user, answers from the assistant"
        return PersonalRows(self.kind, train, held, _digest(train, held), words)

    @property
    def judged(self) -> list[Row]:
        """The rows for evaluation: the held-out rows, or the training rows if there are none."""
        return self.held_out or self.train

    @property
    def judged_on(self) -> str:
        """A description of the rows in ``judged``."""
        if self.held_out:
            return counted(len(self.held_out), "held-out row")
        return f"the {counted(len(self.train), 'row')} used for training"

    @property
    def supervised(self) -> list[Row]:
        """The training rows as supervised rows for calibration; for a pair, with the chosen answer."""
        return as_kind(self.train, "supervised")


def read_rows(
    source: Source,
    *,
    kind: PersonalKind | None = None,
    held_out: float = 0.2,
    columns: Mapping[str, str] | None = None,
) -> PersonalRows:
    """Read rows, infer their kind from the columns, and hold out a fraction.

    The selection depends only on the content of the rows, and not on their order. Duplicate rows count once, and are
    never in both parts.

    Args:
        source: Path of the rows, or the rows themselves.
        kind: Required kind; rows of another kind are rejected.
        held_out: Fraction of the distinct rows to hold out, in [0, 0.5].
        columns: Names of the columns in the rows, by the name that the format expects.

    Raises:
        GymError: ``DATA_INVALID`` with the first row of an unknown kind, or of a different kind from the first row;
            ``FILE_NOT_FOUND``; ``USAGE`` for a fraction outside [0, 0.5].
    """
    if not 0.0 <= held_out <= 0.5:
        raise GymError(
            ErrorCode.USAGE, f"held_out {held_out:g} is not between 0 and 0.5", "0.2 is the default"
        )
    rows: list[Row] = []
    expected: str | None = kind
    for place, row in _placed(source, renaming(columns or {})):
        actual = kind_of(row)
        if actual not in _KINDS or "input_ids" in row or "segments" in row:
            reason = f"{place} is {_called(actual)}, which cannot train a variant"
            raise GymError(ErrorCode.DATA_INVALID, reason, _REMEDY)
        expected = expected or actual
        if actual != expected:
            why = "is required" if not rows and kind is not None else "precedes it"
            reason = f"{place} is {_called(actual)}, but {_called(expected)} {why}"
            raise GymError(ErrorCode.DATA_INVALID, reason, _REMEDY)
        rows.append(PlacedDict.of(row, place, getattr(row, "unread", ())))
    if not rows:
        raise GymError(ErrorCode.DATA_INVALID, "there are no rows", "pass at least one")
    train, held = _split(rows, held_out)
    rows_kind: PersonalKind = "preference" if expected == "preference" else "supervised"
    return PersonalRows(rows_kind, train, held, _digest(train, held))


def _placed(source: Source, rename: Rename | None) -> Iterable[tuple[str, Row]]:
    if isinstance(source, str | Path):
        return iter_rows(source, rename=rename)
    placed = ((f"row {number}", dict(row)) for number, row in enumerate(memory_rows(source), 1))
    return converted(placed, "auto", rename)


def _called(kind: str | None) -> str:
    return {
        "supervised": "an example",
        "preference": "a preference",
        "unpaired": "an answer with a label",
        "stepwise": "a solution with one label per step",
        "prompt": "a prompt without an answer",
    }.get(str(kind), "not a row")


def _split(rows: list[Row], share: float) -> tuple[list[Row], list[Row]]:
    keys = [_key(row) for row in rows]
    distinct = dict(zip(keys, rows, strict=True))
    if share == 0.0 or len(distinct) < MIN_ROWS:
        return rows, []
    number = max(MIN_HELD_OUT, round(share * len(distinct)))
    held = set(sorted(distinct, key=lambda key: hashlib.sha256(key.encode()).digest())[:number])
    train = [row for key, row in zip(keys, rows, strict=True) if key not in held]
    return train, [row for key, row in distinct.items() if key in held]


def _digest(train: list[Row], held: list[Row]) -> str:
    return hashlib.sha256("\n".join([*map(_key, train), "", *map(_key, held)]).encode()).hexdigest()


def _key(row: Row) -> str:
    return json.dumps(row, sort_keys=True, default=repr)
