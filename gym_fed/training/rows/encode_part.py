"""Encode the rows of a run, in memory or into an Arrow file that every process maps."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core import console
from gym_fed.core.progress import Activity, spinner
from gym_fed.data.arrow_cache import ArrowCache, recipe_digest
from gym_fed.data.arrow_rows import SelectedRows
from gym_fed.data.encoded_table import EncodedTable, collect_encoded, write_encoded
from gym_fed.data.row_counts import RowCounts, counts_of
from gym_fed.data.rows import Row, RowKind, as_kind, iter_kind, unread_keys
from gym_fed.data.string_rows import as_turns, count_forms, with_system
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.processes.group import in_steps, is_main, on_main
from gym_fed.training.rows.tokenized import encoding_facts
from gym_fed.training.vision.conversations import without_media

_PRINTS_THE_DATE = ("strftime_now", "datetime")
"""Template functions that print the date, so that a chat template's tokens change from day to day."""

_CHUNK_ROWS = 1000


class LearnedRows(Sequence[Row]):
    """Stored rows, each of which is converted to a row of the algorithm's kind when it is read."""

    def __init__(self, rows: SelectedRows, kind: RowKind) -> None:
        self._rows, self._kind = rows, kind

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return as_kind(self._rows[index], self._kind)
        return as_kind([self._rows[index]], self._kind)[0]

    def __iter__(self) -> Iterator[Row]:
        return iter_kind(self._rows, self._kind)

    @property
    def is_mapped(self) -> bool:
        """True if the rows are in files that all processes can map."""
        return self._rows.is_mapped

    @property
    def digest(self) -> str:
        """The SHA-256 of the rows and their kind, in hex."""
        return hashlib.sha256(f"{self._kind} {self._rows.digest}".encode()).hexdigest()

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each row's JSON before conversion, ``[rows]``."""
        return self._rows.sizes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def encode_part(
    config: TrainingConfig, algorithm: Algorithm, tokenizer: Any, rows: Sequence[Row]
) -> tuple[Any, RowCounts]:
    """Encode rows from ``rows_to_learn``, or read those that an earlier run has encoded.

    Returns:
        The encoded rows (an ``EncodedTable`` if the algorithm encodes rows one by one) and their counts.
    """
    seen = RowCounts()
    prepared = prepared_rows(config, algorithm, tokenizer, rows, seen)
    each = algorithm.encode_each(config, tokenizer, prepared, seen)
    encoded: Any
    if each is None:
        given = list(prepared)
        encoded = algorithm.encode(config, tokenizer, given)
        counts = counts_of(encoded, len(given))
        counts.unread, counts.forms = seen.unread, seen.forms
    else:
        encoded = _store_each(config, algorithm, tokenizer, rows, each, seen)
        counts = encoded.counts
        if not encoded:
            raise counts.nothing_learned(config.max_length)
    if is_main():
        for note in counts.notes:
            console.err.print(note)
    return encoded, counts


def _store_each(
    config: TrainingConfig,
    algorithm: Algorithm,
    tokenizer: Any,
    rows: Sequence[Row],
    encoded: Iterable[dict[str, Any]],
    counts: RowCounts,
) -> EncodedTable:
    """Store the rows of ``Algorithm.encode_each`` in memory; for large sources, in the cache of all processes."""
    if not isinstance(rows, LearnedRows) or not rows.is_mapped or prints_the_date(tokenizer):
        return collect_encoded(encoded, counts)
    facts = encoding_facts(config, tokenizer, without=("eval_split", "seed"))
    section = algorithm.settings(config) if config.algorithm in config.chosen_sections() else None
    recipe = [facts, rows.digest, None if section is None else section.model_dump(mode="json")]
    cache, largest = ArrowCache(recipe_digest({"encoded": recipe})), dict[str, int]()
    with spinner("encoding the rows" if is_main() else "waiting for the encoded rows") as activity:
        if not on_main(cache.is_intact):
            work = cache.fill(
                lambda sink: write_encoded(encoded, sink, largest),
                lambda: {"counts": counts.facts(), "largest": largest},
            )
            in_steps(lambda: shown(activity, ((counts.rows, len(rows)) for _ in work)))
    stored = cache.facts()
    return EncodedTable(cache.path, RowCounts(**stored["counts"]), stored["largest"])


def prepared_rows(
    config: TrainingConfig, algorithm: Algorithm, tokenizer: Any, rows: Iterable[Row], counts: RowCounts
) -> Iterator[Row]:
    """Yield the rows in the form that ``Algorithm.encode`` expects; count their forms and unread keys."""
    source = iter(rows if algorithm.reads_images else without_media(rows, algorithm=config.algorithm))
    forms, unread = Counter(counts.forms), Counter(counts.unread)
    while chunk := list(islice(source, _CHUNK_ROWS)):
        forms.update(count_forms(tokenizer, chunk))
        unread.update(unread_keys(chunk))
        counts.forms, counts.unread = dict(forms), dict(unread)
        yield from rows_to_encode(config, tokenizer, chunk)


def rows_to_encode(config: TrainingConfig, tokenizer: Any, rows: Sequence[Row]) -> list[Row]:
    """Convert rows from ``rows_to_learn`` to the input of ``Algorithm.encode``.

    Plain prompts become chat turns if the tokenizer has a chat template, and conversations without a system
    message get ``default_system``.
    """
    turns = as_turns(tokenizer, rows)
    if config.default_system is None:
        return turns
    return [with_system(row, config.default_system) for row in turns]


def prints_the_date(tokenizer: Any) -> bool:
    """Return True if the chat template may print the date, so that its tokens change from day to day."""
    template = str(getattr(tokenizer, "chat_template", None))
    return any(word in template for word in _PRINTS_THE_DATE)


def shown(activity: Activity, progress: Iterable[tuple[int, int]]) -> Iterator[None]:
    """Report each pair of finished and total rows to ``activity``."""
    for done, total in progress:
        activity.report(done, total)
        yield
