"""The data pipeline: filter, deduplicate, mix, encode, pack and cache rows of several sources.

Rows are read lazily while iterating::

    pipeline = (
        DataPipeline(sources=[("stories.jsonl", 0.7), ("chats.jsonl", 0.3)], tokenizer=tokenizer, sequence_length=512)
        .filter(min_tokens=8)
        .dedup(exact=True, near=0.8)
        .pack()
        .cache("cache")
    )
    Trainer(config).train(dataset=pipeline)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.aliases import ExpectedElsewhere
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.data.arrow_cache import ArrowCache, recipe_digest
from gym_fed.data.encoded_table import read_batches, write_encoded
from gym_fed.data.encoding import iter_encoded, tokenizer_digest
from gym_fed.data.inputs import STOPPING, Input, Stopping, as_input, interleave
from gym_fed.data.reading import PlacedRow
from gym_fed.data.row_counts import RowCounts
from gym_fed.data.steps import DedupStep, FilterStep, Judge, Report, Row, Step

Source = str | Path | DataConfig | Sequence[Row]


class DataPipeline(ExpectedElsewhere):
    """An immutable pipeline of rows; methods return a new one, and iteration restarts from the first row.

    Iteration yields rows of ``gym_fed.data.rows`` or, with ``sequence_length``, ``{"input_ids", "labels"}``, which
    ``sft`` and ``pretrain`` use unchanged. After a pass, ``report`` contains the numbers of rows that were read, kept
    and dropped by steps. If rows are encoded, ``counts`` contains the numbers of rows that were learned, truncated and
    dropped.

    Args:
        sources: Paths (files, folders, patterns, URLs, as ``load_rows`` takes them), ``DataConfig`` objects or lists of
            rows; each optionally in a pair with its weight, which is proportional to its probability of providing the
            next row.
        tokenizer: Needed by ``sequence_length`` and by filters that count tokens; a tokenizer, or the name or folder of
            its model.
        sequence_length: Maximum number of tokens per encoded row; None yields rows that are not encoded.
        seed: Seed of the mixture.
        assistant_only: True to train only on the assistant's text in conversations. Default: True unless rows are
            packed.

    Raises:
        GymError: ``USAGE`` for sources, weights or settings that cannot be combined.
    """

    def __init__(
        self,
        sources: Sequence[Source | tuple[Source, float]],
        *,
        tokenizer: Any = None,
        sequence_length: int | None = None,
        seed: int = 0,
        assistant_only: bool | None = None,
    ) -> None:
        if not sources:
            raise GymError(ErrorCode.USAGE, "sources: none given", "pass at least one path")
        if sequence_length is not None and tokenizer is None:
            raise GymError(ErrorCode.USAGE, "sequence_length needs a tokenizer", "pass the model's tokenizer")
        if sequence_length is not None and sequence_length < 2:
            raise GymError(ErrorCode.USAGE, f"sequence_length {sequence_length} is below 2")
        if assistant_only is not None and sequence_length is None:
            raise GymError(ErrorCode.USAGE, "assistant_only needs sequence_length", "rows are not encoded")
        if isinstance(tokenizer, str):
            from gym_fed.base.models import load_tokenizer

            tokenizer = load_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.report = Report()
        self.counts = RowCounts()
        self._inputs: list[Input] = [as_input(source) for source in sources]
        for entry in self._inputs:
            if not entry.weight > 0:
                raise GymError(ErrorCode.USAGE, f"{entry.name}: weight {entry.weight} is not above 0")
        self._seed = seed
        self._stopping: Stopping = "first_exhausted"
        self._assistant_only = assistant_only
        self._before: tuple[Step, ...] = ()
        self._after: tuple[Step, ...] = ()
        self._mixed = False
        self._limit: int | None = None
        self._packing = False
        self._cache: Path | None = None

    def filter(
        self,
        function: Callable[[Row], bool] | None = None,
        *,
        key: str | None = None,
        min_tokens: int | None = None,
        max_tokens: int | None = None,
        min_characters: int | None = None,
        max_characters: int | None = None,
        max_repetition: float | None = None,
    ) -> DataPipeline:
        """Keep rows for which ``function`` is true and whose size is within bounds.

        Args:
            function: Called with each row.
            key: Identifies ``function``, so that ``cache`` can distinguish it from others.
            min_tokens: Minimum tokens of the row.
            max_tokens: Maximum number of tokens per row; longer rows are dropped instead of truncated.
            min_characters: Minimum characters of the row's text.
            max_characters: Maximum number of characters of a row's text.
            max_repetition: Maximum share of characters in runs of ten that occur more than once, 0 to 1.
        """
        limits = (min_tokens, max_tokens, min_characters, max_characters, max_repetition)
        if function is None and all(limit is None for limit in limits):
            raise GymError(ErrorCode.USAGE, "filter: nothing to filter by", "pass a function or a limit")
        if (min_tokens is not None or max_tokens is not None) and self.tokenizer is None:
            raise GymError(ErrorCode.USAGE, "min_tokens and max_tokens need a tokenizer")
        return self._with_step(FilterStep(function, key, *limits))

    def dedup(self, *, exact: bool = True, near: float | None = None) -> DataPipeline:
        """Keep the first of equal rows across all sources.

        Args:
            exact: True to drop rows equal to an earlier one.
            near: Minimum estimated similarity (MinHash) to an earlier row's text at which a row is dropped.
        """
        if near is not None and not 0.3 <= near < 1:
            raise GymError(
                ErrorCode.USAGE, f"near {near} is out of range", "from 0.3 to below 1, such as 0.8"
            )
        if not exact and near is None:
            raise GymError(ErrorCode.USAGE, "dedup: neither exact nor near", "use at least one")
        return self._with_step(DedupStep(exact, near))

    def mix(
        self,
        weights: Sequence[float] | None = None,
        *,
        seed: int | None = None,
        stopping: Stopping = "first_exhausted",
    ) -> DataPipeline:
        """Mix the sources at this step: earlier steps process each source separately and do not change the proportions.

        Without this call, the sources are mixed first. See ``interleave`` for ``stopping``.
        """
        if self._mixed:
            raise GymError(ErrorCode.USAGE, "mix: the sources are mixed already")
        if self._limit is not None:
            raise GymError(ErrorCode.USAGE, "mix: must come before take", "call mix first")
        if stopping not in STOPPING:
            raise GymError(
                ErrorCode.USAGE, f"stopping {stopping!r} is unknown", f"one of {', '.join(STOPPING)}"
            )
        if weights is not None and (len(weights) != len(self._inputs) or not all(w > 0 for w in weights)):
            raise GymError(
                ErrorCode.USAGE,
                f"mix: {counted(len(self._inputs), 'source', 'need')} as many positive weights",
            )
        new = self._copy()
        if weights is not None:
            pairs = zip(self._inputs, weights, strict=True)
            new._inputs = [replace(entry, weight=float(weight)) for entry, weight in pairs]
        new._seed = self._seed if seed is None else seed
        new._stopping, new._mixed = stopping, True
        new._before, new._after = self._after, ()
        return new

    def take(self, count: int) -> DataPipeline:
        """Keep the first ``count`` rows, before encoding."""
        if count < 1:
            raise GymError(ErrorCode.USAGE, f"take: {count} is below 1")
        new = self._copy()
        new._limit = count if self._limit is None else min(count, self._limit)
        return new

    def pack(self) -> DataPipeline:
        """Concatenate encoded rows and cut them every ``sequence_length`` tokens."""
        if self.sequence_length is None:
            raise GymError(ErrorCode.USAGE, "pack needs sequence_length")
        new = self._copy()
        new._packing = True
        return new

    def cache(self, folder: str | Path) -> DataPipeline:
        """Cache encoded rows in ``folder``, and reuse them until something that they depend on changes."""
        if self.sequence_length is None:
            raise GymError(ErrorCode.USAGE, "cache stores encoded rows; set sequence_length")
        new = self._copy()
        new._cache = Path(folder)
        return new

    def __iter__(self) -> Iterator[Row]:
        return self.encoded() if self.sequence_length is not None else self.stream()

    def stream(self) -> Iterator[Row]:
        """Yield rows, using no more memory than the readers' buffers."""
        return (row for _, row in self.placed())

    def placed(self) -> Iterator[PlacedRow]:
        """Yield rows with their places. ``report`` describes the latest pass."""
        return (placed for _, placed in self._pass())

    def numbered(self) -> Iterator[tuple[int, Row]]:
        """Yield rows, each with the index of its source."""
        return ((index, row) for index, (_, row) in self._pass())

    def _pass(self) -> Iterator[tuple[int, PlacedRow]]:
        self.report = report = Report()
        before = [step.start(self.tokenizer, report) for step in self._before]
        after = [step.start(self.tokenizer, report) for step in self._after]

        def source(index: int, entry: Input) -> Callable[[], Iterator[tuple[int, PlacedRow]]]:
            return lambda: _apply_steps(
                ((index, placed) for placed in entry.rows()), before, report, first=True
            )

        weights = [entry.weight for entry in self._inputs]
        sources = [source(index, entry) for index, entry in enumerate(self._inputs)]

        def stopped(index: int) -> None:
            report.ended = self._inputs[index].name

        mixed = interleave(sources, weights, self._seed, self._stopping, stopped)
        for row in islice(_apply_steps(mixed, after, report), self._limit):
            report.kept += 1
            yield row

    def encoded(self) -> Iterator[Row]:
        """Yield token ids and labels, from the cache if it is set and filled.

        Raises:
            GymError: ``USAGE`` if rows are cached and a step or source has no key that identifies it.
        """
        if self.sequence_length is None:
            raise GymError(ErrorCode.USAGE, "encoded rows need sequence_length and a tokenizer")
        if self._cache is None:
            return self._encode()
        cache = self._cached(self._cache)
        if not cache.is_intact():
            return self._encode_into(cache)
        self.counts = RowCounts(**cache.facts())
        return (row for batch in read_batches(cache.path) for row in batch.to_pylist())

    def is_cached(self) -> bool:
        """Return True if ``encoded`` reads from the cache."""
        return self._cache is not None and self._cached(self._cache).is_filled()

    def _cached(self, folder: Path) -> ArrowCache:
        return ArrowCache(recipe_digest(self._recipe()), folder)

    def _encode_into(self, cache: ArrowCache) -> Iterator[Row]:
        """Yield the encoded rows while they are written."""
        chunk: list[Row] = []

        def remembered() -> Iterator[Row]:
            for row in self._encode():
                chunk.append(row)
                yield row

        work = cache.fill(
            lambda sink: write_encoded(remembered(), sink, {}),
            lambda: self.counts.facts(),
            lambda: recipe_digest(self._recipe()),
        )
        with closing(work):
            for _ in work:
                yield from chunk
                chunk.clear()

    def _encode(self) -> Iterator[Row]:
        assert self.sequence_length is not None
        assistant_only = not self._packing if self._assistant_only is None else self._assistant_only
        self.counts = RowCounts(max_length=self.sequence_length)
        return iter_encoded(
            self.tokenizer,
            self.stream(),
            max_length=self.sequence_length,
            assistant_only=assistant_only,
            packing=self._packing,
            counts=self.counts,
        )

    def _recipe(self) -> Any:
        """Return everything that the encoded rows depend on."""
        steps = [[step.key() for step in steps] for steps in (self._before, self._after)]
        if any(key is None for part in steps for key in part):
            raise GymError(
                ErrorCode.USAGE,
                "cache: filter functions cannot be distinguished",
                'pass a key that identifies the function: filter(function, key="short answers, version 1")',
            )
        return {
            "sources": [[entry.key(), entry.weight] for entry in self._inputs],
            "steps": steps,
            "mixture": [self._seed, self._stopping, self._limit],
            "tokenizer": tokenizer_digest(self.tokenizer),
            "encoding": [self.sequence_length, self._packing, self._assistant_only],
        }

    def _with_step(self, step: Step) -> DataPipeline:
        if self._limit is not None:
            raise GymError(ErrorCode.USAGE, "take must come after all filters", "filter first, then take")
        new = self._copy()
        new._after = (*self._after, step)
        return new

    def _copy(self) -> DataPipeline:
        new = object.__new__(DataPipeline)
        new.__dict__.update(self.__dict__)
        new.report, new.counts = Report(), RowCounts()
        return new


def _apply_steps(
    rows: Iterator[tuple[int, PlacedRow]], judges: list[Judge], report: Report, *, first: bool = False
) -> Iterator[tuple[int, PlacedRow]]:
    for index, (place, row) in rows:
        report.read += first
        for judge in judges:
            reason = judge(place, row)
            if reason is not None:
                report.dropped[reason] += 1
                break
        else:
            yield index, (place, row)
