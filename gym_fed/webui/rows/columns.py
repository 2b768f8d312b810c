"""The columns that a page offers as question and answer, for a file whose layout no format recognises."""

from __future__ import annotations

from itertools import islice
from typing import Any

from gym_fed.core.errors import GymError
from gym_fed.data.column_guess import guess_columns
from gym_fed.data.formats.base import BadRow, as_object
from gym_fed.data.paging import PagedFile
from gym_fed.data.reading import format_of

_SAMPLE_ROWS = 20
_MAX_NAMES = 200
_MAX_CHARACTERS = 200


def column_choices(file: PagedFile) -> dict[str, Any] | None:
    """Return the names of text columns, and the guess of which are ``prompt`` and ``completion``.

    None for a file whose layout is known, whose rows cannot be read, or that has no column of texts.
    """
    sample = []
    try:
        for raw in islice(file.rows(), _SAMPLE_ROWS):
            sample.append(as_object(raw.load()))
        if not sample or format_of(sample[0]).kind != "prompt":
            return None
    except BadRow:
        if len(sample) < 1:
            return None
    except GymError:
        return None
    names = dict.fromkeys(name for row in sample for name, value in row.items() if isinstance(value, str))
    shown = [name for name in names if len(name) <= _MAX_CHARACTERS][:_MAX_NAMES]
    guess = guess_columns(sample, "supervised")
    columns = {} if guess is None else guess.columns
    is_prompt = "prompt" in names and "completion" not in columns  # a prompt alone is a layout of its own
    return {"names": shown, "guess": columns} if shown and not is_prompt else None
