"""Token ids that calibrate a quantisation, from the user's rows or from this project's own texts.

Nothing is downloaded. The own texts are rows of the generated tasks and the packaged questions and texts of the
retention check; exports are not compared on them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TASKS
from gym_fed.core.text import counted
from gym_fed.data.generated import generate
from gym_fed.data.rows import as_kind
from gym_fed.data.string_rows import as_turns

SAMPLES = 32
LENGTH = 128
"""Tokens per sample; fewer if the model has fewer positions."""
OWN = "own texts of gym-fed"
_ROWS_OF_A_TASK = 8


@dataclass(frozen=True)
class CalibrationSamples:
    """The samples of a calibration.

    Attributes:
        source: The file, or ``OWN``.
        ids: Token ids of the samples, all of the same length.
    """

    source: str
    ids: list[list[int]]

    def record(self) -> dict[str, Any]:
        """Return the entry of ``export.json``; ``sha256`` is of the ids as JSON."""
        return {
            "source": self.source,
            "samples": len(self.ids),
            "tokens": len(self.ids[0]),
            "sha256": hashlib.sha256(json.dumps(self.ids).encode()).hexdigest(),
        }


def calibration_of(
    tokenizer: Any, positions: int, rows: Sequence[Mapping[str, Any]] = (), name: str = ""
) -> CalibrationSamples:
    """Cut rows, concatenated, into samples; an incomplete last one is dropped.

    Args:
        tokenizer: The tokenizer of the model, with its chat template.
        positions: The number of positions of the model.
        rows: Rows of text or conversations; none for this project's own texts.
        name: The name of the rows, for the record.

    Raises:
        GymError: ``DATA_INVALID`` for rows without text, and for fewer tokens than one sample has.
    """
    source = (name or "rows") if rows else OWN
    texts = _texts_of(rows, tokenizer) if rows else own_texts(tokenizer)
    length = min(LENGTH, positions)
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    stream: list[int] = []
    for text in texts:
        stream += [*tokenizer(text, add_special_tokens=False)["input_ids"], *end]
        if len(stream) >= SAMPLES * length:
            break
    samples = [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)][
        :SAMPLES
    ]
    if not samples:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{source}: {counted(len(stream), 'token')} to calibrate with, {length} are needed",
            "give more rows, or leave --data out for texts of this project",
        )
    return CalibrationSamples(source, samples)


def own_texts(tokenizer: Any) -> Iterator[str]:
    """Yield conversations of the generated tasks and ordinary texts, alternating, always in the same order."""
    rows = [generate(name, _ROWS_OF_A_TASK) for name in sorted(TASKS.names())]
    drawn = [row for same in zip(*rows, strict=True) for row in same]
    for row, prose in zip_longest(drawn, _ordinary_rows()):
        for present in (row, prose):
            if present is not None:
                yield present["text"] if "text" in present else _text(present, tokenizer)


def _ordinary_rows() -> Iterator[dict[str, Any]]:
    """Yield the packaged texts and conversations about ordinary things."""
    folder = resources.files("gym_fed") / "assets" / "retention"
    for name in ("texts.jsonl", "questions.jsonl"):
        yield from map(json.loads, (folder / name).read_text(encoding="utf-8").splitlines())


def _texts_of(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> Iterator[str]:
    for row in rows:
        for supervised in as_turns(tokenizer, as_kind([dict(row)], "supervised")):
            yield _text(supervised, tokenizer)


def _text(row: dict[str, Any], tokenizer: Any) -> str:
    """Render a row in the form in which the model reads it."""
    if "text" in row:
        return str(row["text"])
    if "messages" in row:
        messages = row["messages"]
        if tokenizer.chat_template is None:
            return "\n".join(str(message["content"]) for message in messages)
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    if "prompt" in row and isinstance(row["prompt"], str):
        return f"{row['prompt']}{row['completion']}"
    raise GymError(
        ErrorCode.DATA_INVALID,
        f"a row has the keys {', '.join(sorted(row))}, and text calibrates",
        "give rows with text, messages, or prompt and completion",
    )
