"""The user's rows for an evaluation: validated before a model is loaded, and rendered as in training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.data.chat_templates.conversation import Reasoning
from gym_fed.data.encoding import IGNORED, encode_rows
from gym_fed.data.reading import iter_rows, renaming
from gym_fed.data.row_counts import EncodedRows
from gym_fed.data.rows import MEDIA, PlacedDict, Row, as_kind, kind_of
from gym_fed.data.string_rows import as_turns, with_system

MAX_WORDS, MAX_TOKENS = 10, 64
"""Maximum number of words and tokens of a short answer, which is compared with the model's as a whole."""

DEFAULT_LENGTH = 2048
"""Maximum number of tokens of a row, unless the model is a run with its own ``max_length``."""

_WHOLE = 1 << 30
_PLACEHOLDER = "."
_SHOWN, _SHOWN_CHARACTERS = 20, 40
_TURNS = ("prompt", "completion", "messages", "conversations", "chosen", "rejected")
"""Keys of a row with the conversation; graders read the others."""


@dataclass(frozen=True)
class OwnRow:
    """A row of the user's file.

    Attributes:
        place: File and line of the row, for messages.
        row: A training row: ``messages``, ``text``, or ``prompt`` and ``completion``. A row with only a prompt gets a
            placeholder answer.
        has_answer: False for the placeholder.
        reference: The last answer as text; None if there is none or it calls tools.
        graded: The columns that graders read: ``prompt``, ``answer``, and the other columns of the file.
    """

    place: str
    row: Row
    has_answer: bool
    reference: str | None
    graded: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_short(self) -> bool:
        """True if the reference has at most ``MAX_WORDS`` words."""
        return self.reference is not None and 0 < len(self.reference.split()) <= MAX_WORDS


@dataclass(frozen=True)
class Rendering:
    """The options with which a run renders rows; the defaults are those of `gym train`.

    Attributes:
        max_length: Maximum number of tokens of a row; None for ``DEFAULT_LENGTH``.
        mask_history: True to label only the last answer of a conversation.
        reasoning: Treatment of reasoning; see ``encode_rows``.
        default_system: System message of conversations that have none.
    """

    max_length: int | None = None
    mask_history: bool = False
    reasoning: Reasoning = "learn"
    default_system: str | None = None


def read_own_rows(
    path: str,
    columns: Mapping[str, str] | None = None,
    *,
    limit: int | None = None,
    graders: Sequence[GraderConfig] = (),
) -> list[OwnRow]:
    """Read rows and validate them without a model.

    Args:
        path: A data file, a pattern, or a URL.
        columns: Column names in the file, by the names that formats expect.
        limit: Maximum number of rows to read.
        graders: Graders of the answers; with graders, rows do not need a reference answer.

    Raises:
        GymError: ``DATA_INVALID`` naming the file and the row that cannot be used; errors of ``iter_rows``.
    """
    rename = renaming(columns or {})
    raw_rows: list[Any] = []

    def remembered(raw: Any) -> Any:
        renamed = raw if rename is None else rename(raw)
        raw_rows.append(renamed)
        return renamed

    rows = []
    for place, row in islice(iter_rows(path, rename=remembered), limit):
        raw = raw_rows[-1]
        raw_rows.clear()
        rows.append(_own_row(place, row, raw if isinstance(raw, dict) else {}, graders))
    return rows


def render(
    tokenizer: Any, rows: Sequence[OwnRow], rendering: Rendering, max_length: int
) -> tuple[EncodedRows, list[list[int]]]:
    """Encode rows as in training.

    Args:
        rows: Rows of ``read_own_rows``.
        rendering: The run's rendering options.
        max_length: Maximum number of tokens of a row.

    Returns:
        The rows with a label for each token that counts, and for each row the token ids up to its last answer; these
        are empty if there is no answer, for example in a plain text.

    Raises:
        GymError: See ``encode_rows``.
    """
    given = as_turns(tokenizer, [own_row.row for own_row in rows])
    if (system := rendering.default_system) is not None:
        given = [with_system(row, system) for row in given]
    encoded = encode_rows(
        tokenizer,
        given,
        max_length=max_length,
        keep_all=True,
        mask_history=rendering.mask_history,
        reasoning=rendering.reasoning,
    )
    last = encode_rows(
        tokenizer, given, max_length=_WHOLE, keep_all=True, mask_history=True, reasoning=rendering.reasoning
    )
    prompts = [
        [] if "text" in own_row.row else _before_label(row) for own_row, row in zip(rows, last, strict=True)
    ]
    return encoded, prompts


def rendering_of(config: Mapping[str, Any] | None) -> Rendering:
    """Return the rendering options in a run's config; the defaults for a model that is not a run."""
    if config is None:
        return Rendering()
    return Rendering(
        max_length=config.get("max_length"),
        mask_history=bool(config.get("mask_history")),
        reasoning="learn" if config.get("reasoning") is None else config["reasoning"],
        default_system=config.get("default_system"),
    )


def turn_settings(config: Mapping[str, Any] | None) -> list[str]:
    """Return the settings about learned turns in a run's config, which scoring ignores."""
    sources = [source for source in (config or {}).get("data") or [] if isinstance(source, dict)]
    defaults = {"roles_to_train": None, "train_on_eos": "turn"}
    return [
        key
        for key, default in defaults.items()
        if any(source.get(key, default) not in (None, default) for source in sources)
    ]


def num_learned(config: Mapping[str, Any] | None, rows: Sequence[OwnRow]) -> int:
    """Count the ``rows`` that are also in the training files of a run's config, if these exist on this machine."""
    sources = (config or {}).get("data") or []
    learned = set()
    for source in sources:
        path = source.get("path") if isinstance(source, dict) else None
        if not isinstance(path, str) or not Path(path).is_file():
            continue
        try:
            for _, row in iter_rows(path, rename=renaming(source.get("columns") or {})):
                if kind_of(row) == "supervised":
                    learned.add(_content(*as_kind([row], "supervised")))
        except GymError:  # the training file has changed since the run
            continue
    return sum(_content(own_row.row) in learned for own_row in rows if own_row.has_answer)


def _content(row: Row) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()


def _own_row(place: str, row: Row, raw: Mapping[str, Any], graders: Sequence[GraderConfig]) -> OwnRow:
    if column := next((column for column in MEDIA if row.get(column)), None):
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{place} has {column}",
            "remove these rows; only rows of text can be evaluated",
        )
    has_answer = kind_of(row) != "prompt"
    if has_answer:
        (row,) = as_kind([row], "supervised")
    elif not graders:
        names = [plain(name, _SHOWN_CHARACTERS) for name in raw]
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{place} has no answer; its columns are {', '.join(names[:_SHOWN])}",
            "set the answer column: --columns completion=COLUMN; or grade the model's answers with --grader NAME",
        )
    reference = _reference(row) if has_answer else None
    if has_answer and reference is not None and not reference.strip():
        raise GymError(
            ErrorCode.DATA_INVALID, f"{place}: its answer is empty", "fill it in, or remove the row"
        )
    graded: Mapping[str, Any] = {}
    if graders:
        (asked,) = as_kind([PlacedDict.of(row, place)], "prompt")
        graded = {**{name: raw[name] for name in raw if name not in _TURNS}, **asked}
        _require_columns(place, graded, graders)
    if not has_answer:
        row = PlacedDict.of(_with_placeholder(row), place)
    return OwnRow(place, row, has_answer, None if reference is None else reference.strip(), graded)


def _reference(row: Row) -> str | None:
    """Return the last answer as text; None for plain texts and tool calls.

    Raises:
        GymError: ``DATA_INVALID`` for a conversation that does not end with the assistant.
    """
    if "messages" not in row:
        answer = row.get("completion")
        return answer if isinstance(answer, str) else None
    last = row["messages"][-1]
    if last.get("role") != "assistant":
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{getattr(row, 'place', None) or 'a row'} does not end with an answer",
            "end it with the assistant's message, or remove the row",
        )
    if last.get("tool_calls"):
        return None
    content = last.get("content")
    return content if isinstance(content, str) else None


def _require_columns(place: str, graded: Mapping[str, Any], graders: Sequence[GraderConfig]) -> None:
    """Refuse a row without a column that a grader reads, before answers are generated."""
    for grader in graders:
        column = getattr(grader, "column", None)
        if isinstance(column, str) and graded.get(column) is None:
            had = ", ".join(plain(name, _SHOWN_CHARACTERS) for name in list(graded)[:_SHOWN])
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{place}: grader {grader.name or grader.grader} reads the column {column!r}, but the row has {had}",
                f"set the column: --grader '{grader.grader}:{{column: NAME}}', or --columns {column}=NAME",
            )


def _with_placeholder(row: Row) -> Row:
    rest = {key: row[key] for key in ("tools",) if key in row}
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return {"prompt": prompt, "completion": _PLACEHOLDER, **rest}
    return {"messages": [*prompt, {"role": "assistant", "content": _PLACEHOLDER}], **rest}


def _before_label(encoded: Mapping[str, Any]) -> list[int]:
    labels = encoded["labels"]
    first = next((i for i, label in enumerate(labels) if label != IGNORED), None)
    return [] if first is None else list(encoded["input_ids"][:first])
