"""Read a user's rows: their kind, chat or text form, and the held-out fraction."""

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
"""The key in a delta's manifest (``extra``) for the form of its rows."""
Source: TypeAlias = "str | Path | Sequence[Mapping[str, Any]]"
"""A file (or folder, or pattern), or rows in memory."""

MIN_HELD_OUT = 2
MIN_ROWS = 8
"""With fewer distinct rows none is held out, since one or two sentences would decide the measured loss."""

_KINDS = ("supervised", "preference")
_REMEDY = (
    "use rows with messages, prompt and completion, or text; or all of them with prompt, chosen and rejected"
)


@dataclass(frozen=True)
class PersonalRows:
    """A user's rows, all of one kind.

    Attributes:
        kind: ``supervised`` or ``preference``.
        train: Rows for training.
        held_out: Rows that are never trained on; empty if there are too few rows.
        digest: Hex sha256 of all rows and of the held-out selection.
        learnt_as: Description of the form in which they are trained; see ``formed``.
    """

    kind: PersonalKind
    train: list[Row]
    held_out: list[Row]
    digest: str
    learnt_as: str = ""
    raw: bool = False
    """True if rows of plain strings stay bare text although the base has a chat template (``--plain``)."""

    @property
    def form(self) -> Form:
        """``chat`` if any row is a conversation."""
        return (
            "chat"
            if any(
                "messages" in row or isinstance(row.get("prompt"), list)
                for row in (*self.train, *self.held_out)
            )
            else "plain"
        )

    def formed(self, tokenizer: Any, as_chat: bool | None = None) -> PersonalRows:
        """Select whether rows of plain strings are trained as chat turns or as plain text.

        The same rows are held out. Conversations and texts are unchanged.

        Args:
            tokenizer: Tokenizer of the base.
            as_chat: True for chat turns, False for plain text; None for chat turns if the base has a chat template.

        Raises:
            GymError: ``USAGE`` for chat turns if the base has no chat template, and for plain text mixed with
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
        words = "turns of a chat: prompts the user's, answers the assistant's"
        return PersonalRows(self.kind, train, held, _digest(train, held), words)

    @property
    def judged(self) -> list[Row]:
        """Rows for evaluation: the held-out rows, or the training rows if there are none."""
        return self.held_out or self.train

    @property
    def judged_on(self) -> str:
        """Description of the rows in ``judged``."""
        number = len(self.judged)
        return (
            counted(number, "held-out row")
            if self.held_out
            else f"the {counted(number, 'row')} used for training"
        )

    @property
    def supervised(self) -> list[Row]:
        """The training rows as text for calibration; for a pair, the chosen answer."""
        return as_kind(self.train, "supervised")


def read_rows(
    source: Source,
    *,
    wanted: PersonalKind | None = None,
    held_out: float = 0.2,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
) -> PersonalRows:
    """Read rows, infer their kind from the columns, and hold out a share.

    The selection depends only on the content of the rows, not on their order. Duplicate rows count once, and are
    never in both parts.

    Args:
        source: Path of the rows, or the rows.
        wanted: Required kind; rows of the other kind are rejected.
        held_out: Fraction of the distinct rows to hold out, in [0, 0.5].
        format: A name in ``gym_fed.core.registries.FORMATS``, or ``auto``.
        columns: Names of columns in the rows, by the name that the format expects.

    Raises:
        GymError: ``DATA_INVALID`` with the first row of an unknown kind, or of a different kind from the first row;
            ``FILE_NOT_FOUND``; ``USAGE`` for a fraction outside [0, 0.5].
    """
    if not 0.0 <= held_out <= 0.5:
        raise GymError(
            ErrorCode.USAGE, f"held_out {held_out:g} is not between 0 and 0.5", "0.2 is the default"
        )
    rows: list[Row] = []
    kind: str | None = wanted
    for place, row in _placed(source, format, renaming(columns or {})):
        actual = kind_of(row)
        if actual not in _KINDS or "input_ids" in row or "segments" in row:
            reason = f"{place}: is {_called(actual)}, which cannot train a variant"
            raise GymError(ErrorCode.DATA_INVALID, reason, _REMEDY)
        if kind is None:
            kind = actual
        if actual != kind:
            asked = "asked for" if not rows and wanted is not None else "before it"
            reason = f"{place}: is {_called(actual)}, and {_called(kind)} is {asked}"
            raise GymError(ErrorCode.DATA_INVALID, reason, _REMEDY)
        rows.append(PlacedDict.of(row, place, getattr(row, "unread", ())))
    if not rows:
        raise GymError(ErrorCode.DATA_INVALID, "there are no rows", "pass at least one")
    train, held = _split(rows, held_out)
    return PersonalRows(
        "preference" if kind == "preference" else "supervised", train, held, _digest(train, held)
    )


def _placed(source: Source, format: str, rename: Rename | None) -> Iterable[tuple[str, Row]]:
    if isinstance(source, str | Path):
        return iter_rows(source, format, rename=rename)
    return converted(
        ((f"row {number}", dict(row)) for number, row in enumerate(memory_rows(source), 1)), format, rename
    )


def _called(kind: str | None) -> str:
    return {
        "supervised": "an example",
        "preference": "a preference",
        "unpaired": "an answer with a label",
        "stepwise": "a solution with one label per step",
        "prompt": "a prompt without an answer",
    }.get(str(kind), "no row")


def _split(rows: list[Row], share: float) -> tuple[list[Row], list[Row]]:
    keys = [_key(row) for row in rows]
    different = dict(zip(keys, rows, strict=True))
    if share == 0.0 or len(different) < MIN_ROWS:
        return rows, []
    number = max(MIN_HELD_OUT, round(share * len(different)))
    held = set(sorted(different, key=lambda key: hashlib.sha256(key.encode()).digest())[:number])
    return (
        [row for key, row in zip(keys, rows, strict=True) if key not in held],
        [row for key, row in different.items() if key in held],
    )


def _digest(train: list[Row], held: list[Row]) -> str:
    return hashlib.sha256("\n".join([*map(_key, train), "", *map(_key, held)]).encode()).hexdigest()


def _key(row: Row) -> str:
    return json.dumps(row, sort_keys=True, default=repr)
