"""Refuse a ``tokenizer.json`` with slow regular expressions, before it is loaded.

The tokenizers library searches them in compiled code, where neither Ctrl-C nor a time limit ends a search. So unknown
patterns are tried in a child process first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from gym_fed.base.modeling.known_splits import KNOWN
from gym_fed.core.bounded.errors import LimitExceededError
from gym_fed.core.bounded.pool import EvaluationError, evaluate
from gym_fed.core.bounded.splits import search_texts
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain

MAX_PATTERNS = 32
MAX_CHARS = 4000
_MAX_BYTES = 256 << 20
_KEY = re.compile(r'"(?:R|\\u0052)(?:e|\\u0065)(?:g|\\u0067)(?:e|\\u0065)(?:x|\\u0078)"\s*:\s*(?=")')
"""The key of a pattern, also with its letters escaped."""
_LINEAR = re.compile(
    r"(?:\\[pPsSdDwWrnt](?:\{\^?\w+\})?|\[(?:\\.|[^\[\]\\&])*\]|[^()\[\]|?*+{}^$\\])+(?:[+*]|\{\d*,?\d*\})?",
    re.S,
)
"""A pattern with at most one repetition, at its end, which takes linear time."""


def require_quick_tokenizer(folder: Path, name: str) -> None:
    """Refuse a model folder whose ``tokenizer.json`` has a slow pattern; a missing file is not an error.

    Args:
        folder: The model folder.
        name: The name of the model in errors.

    Raises:
        GymError: ``MODEL_INVALID`` with the pattern.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    if file.stat().st_size > _MAX_BYTES:
        raise _refused(name, f"has more than {_MAX_BYTES >> 20} MiB", "give another model")
    require_quick_splits(file.read_text("utf-8", errors="replace"), name)


def require_quick_splits(text: str, name: str) -> None:
    """As ``require_quick_tokenizer``, for the text of a ``tokenizer.json``."""
    unknown = sorted({one for one in _patterns(text) if one not in KNOWN and not _LINEAR.fullmatch(one)})
    if len(unknown) > MAX_PATTERNS or any(len(one) > MAX_CHARS for one in unknown):
        raise _refused(
            name, f"has more than {MAX_PATTERNS} patterns, or one of more than {MAX_CHARS:,} characters"
        )
    for pattern in unknown:
        try:
            evaluate(search_texts, pattern=pattern)
        except (LimitExceededError, EvaluationError) as error:
            need = error.need if isinstance(error, LimitExceededError) else f"fails: {plain(str(error), 200)}"
            raise _refused(name, f"has the pattern {plain(pattern, 80)!r}, which {need}") from error


def _patterns(text: str) -> Iterator[str]:
    decode = json.JSONDecoder().raw_decode
    for match in _KEY.finditer(text):
        try:
            yield str(decode(text, match.end())[0])
        except ValueError:  # reported by the library that reads the file
            return


def _refused(name: str, problem: str, hint: str = "") -> GymError:
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"{name}: its tokenizer.json {problem}",
        hint or "correct the pattern in tokenizer.json, or give another model",
    )
