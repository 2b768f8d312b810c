"""Read the rows of a run from its sources, split them, convert them for the algorithm, and encode them.

The rows and token ids of large sources are in Arrow files, which the first run writes and every process maps. Small
sources are in memory, in the same form.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gym_fed.config.train.training import DataConfig, TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.progress import spinner
from gym_fed.core.registries import ALGORITHMS
from gym_fed.core.text import counted
from gym_fed.data.arrow_cache import ArrowCache
from gym_fed.data.arrow_rows import ArrowRows, SelectedRows, collect_rows
from gym_fed.data.pipeline import DataPipeline
from gym_fed.data.row_counts import RowCounts
from gym_fed.data.row_stream import RowStream
from gym_fed.data.rows import Row, as_kind, iter_kind, memory_rows
from gym_fed.data.source_store import convertible, fill_source, is_large, source_digest, stored_rows
from gym_fed.data.sources import named_source
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.processes.group import in_steps, is_main, on_main
from gym_fed.training.rows.encode_part import LearnedRows, encode_part, prepared_rows, prints_the_date, shown
from gym_fed.training.rows.streamed import StreamedRows
from gym_fed.training.rows.tokenized import RunRows, TokenizedRows

_ROUND_KEYS = {"output_dir", "seed", "learning_rate", "max_steps", "save_steps"}
"""Keys that differ between rounds but do not affect the tokens."""

_SAMPLE_ROWS = 512
"""Number of rows of a stream that are used to choose defaults."""


def rows_of_run(
    config: TrainingConfig,
    dataset: Sequence[dict[str, Any]] | str | None,
    eval_dataset: Sequence[dict[str, Any]] | str | None,
    split_of: Callable[[int], float] | None = None,
) -> tuple[Sequence[Row], Sequence[Row] | None]:
    """Return training and held-out rows of the kind that the algorithm learns from.

    Args:
        config: The run's config.
        dataset: Rows, or their name or path, instead of ``config.data``.
        eval_dataset: Rows, or their name or path, instead of ``config.eval_data``.
        split_of: Maps the number of distinct rows to ``eval_split``; used if no held-out rows are specified.
    """
    encoded = config.tokenized_path
    if dataset is None and not config.data and encoded is not None and TokenizedRows(encoded).is_filled():
        return [], None
    if config.streaming:
        if dataset is not None:
            reason, remedy = "streaming: rows are passed to train()", "list the rows under data in the config"
            raise GymError(ErrorCode.USAGE, reason, f"remove streaming, or {remedy}")
        return _stream(config).sample(_SAMPLE_ROWS), _held_out(config, eval_dataset)
    rows = rows_of(config) if dataset is None else _given_rows(config, dataset)
    split = config.eval_split
    if eval_dataset is None and not split and split_of is not None:
        split = split_of(len(np.unique(_contents(rows))))
    if eval_dataset is None and split:
        rows, held_out = split_rows(rows, split, seed=config.seed)
        return rows_to_learn(config, rows), rows_to_learn(config, held_out)
    _require_rows("data", rows)
    return rows_to_learn(config, rows), _held_out(config, eval_dataset)


def encode_run(
    config: TrainingConfig,
    algorithm: Algorithm,
    tokenizer: Any,
    data: Sequence[Row],
    eval_data: Sequence[Row] | None,
) -> RunRows:
    """Encode the rows from ``rows_of_run``, or read encoded rows from ``tokenized_path`` if it contains any."""
    store = None if config.tokenized_path is None else TokenizedRows(config.tokenized_path)
    if store is not None and on_main(store.is_filled):
        return store.read(config, tokenizer, _digests_of(data, eval_data, tokenizer) if data else None)
    if config.streaming:
        encoded, counts, digest = _streamed(config, algorithm, tokenizer)
    else:
        encoded, counts = encode_part(config, algorithm, tokenizer, data)
        digest = _digest_of(data, tokenizer)
    eval_encoded, eval_counts, eval_digest = None, None, None
    if eval_data is not None:
        public = config.model_copy(update={"privacy": None})  # held-out rows are not protected
        eval_encoded, eval_counts = encode_part(public, algorithm, tokenizer, eval_data)
        eval_digest = _digest_of(eval_data, tokenizer)
    rows = RunRows(encoded, eval_encoded, (digest, eval_digest), counts, eval_counts)
    if store is not None:
        on_main(lambda: store.write(config, tokenizer, rows))
    return rows


class LastEncoded:
    """A cache of the last encoded rows, for successive runs on the same rows, such as the rounds of a federation."""

    def __init__(self) -> None:
        self._key: Any = None
        self._rows: RunRows | None = None

    def encode_run(
        self,
        config: TrainingConfig,
        algorithm: Algorithm,
        tokenizer: Any,
        data: Sequence[Row],
        eval_data: Sequence[Row] | None,
    ) -> RunRows:
        """Return ``run_rows.encode_run``, or its last result if rows, tokenizer and config are the same."""
        if not algorithm.keeps_encoded or prints_the_date(tokenizer):
            return encode_run(config, algorithm, tokenizer, data, eval_data)
        key = (_digests_of(data, eval_data, tokenizer), config.model_dump(mode="json", exclude=_ROUND_KEYS))
        if self._rows is None or key != self._key:
            self._key, self._rows = key, encode_run(config, algorithm, tokenizer, data, eval_data)
        return self._rows


def rows_of(config: TrainingConfig, key: Literal["data", "eval_data"] = "data") -> SelectedRows:
    """Return the rows of ``config.data`` (or ``eval_data``), repeated by weight, in the order of the sources.

    Rows of a source with ``role: forget`` get the key ``forget``.

    Raises:
        GymError: ``CONFIG_INVALID`` if no data is specified; see ``source_rows`` for other errors.
    """
    sources: list[DataConfig] = getattr(config, key)
    refuse_first((not sources, f"{key}: no rows to train on", "list at least one path or tasks entry"))
    parts = []
    for index, source in enumerate(sources):
        store = _stored(config, source)
        times, fraction = divmod(source.weight, 1.0)
        drawn = random.Random(config.seed + index).sample(range(len(store)), round(fraction * len(store)))
        chosen = [np.arange(len(store))] * int(times) + [np.array(drawn, np.int64)]
        parts += [(store, indices, source.role == "forget") for indices in chosen]
    return SelectedRows(parts)


def rows_to_learn(config: TrainingConfig, rows: Sequence[Row]) -> Sequence[Row]:
    """Convert rows to the kind of ``config.algorithm``.

    Raises:
        GymError: See ``as_kind``.
    """
    kind = ALGORITHMS.type_of(config.algorithm).row_kind
    if not isinstance(rows, SelectedRows):
        return as_kind(rows, kind)
    if kind == "unpaired":  # a pair becomes two rows
        return LearnedRows(SelectedRows.whole(collect_rows(iter_kind(rows, kind))), kind)
    return LearnedRows(rows, kind)


def has_held_out(config: TrainingConfig, eval_data: Sequence[Any] | None) -> bool:
    """Return True if the run has evaluation data: ``eval_data``, or held-out rows that were encoded earlier."""
    path = config.tokenized_path
    return bool(eval_data) or (path is not None and TokenizedRows(path).has_held_out())


def split_rows(rows: Sequence[Row], size: float, *, seed: int) -> tuple[Sequence[Row], Sequence[Row]]:
    """Split rows into training and held-out rows, keeping their order. Equal rows count as one and stay together.

    Args:
        rows: All rows, repeated by their weights.
        size: Number of distinct held-out rows, or a fraction if it is below 1.
        seed: Seed of the split.

    Raises:
        GymError: ``CONFIG_INVALID`` if one of the two sets would be empty.
    """
    _, first, groups = np.unique(_contents(rows), return_index=True, return_inverse=True)
    number = round(size * len(first)) if size < 1 else round(size)
    reason = f"eval_split: {size:g} of {counted(len(first), 'distinct row')} would hold out {number}"
    refuse_first(
        (not 0 < number < len(first), reason, "keep at least one row for training and one for evaluation")
    )
    held = np.sort(np.sort(first)[random.Random(seed).sample(range(len(first)), number)])
    learned = np.flatnonzero(~np.isin(first[groups], held))
    if isinstance(rows, SelectedRows):
        return rows.take(learned), rows.take(held)
    return [rows[i] for i in learned.tolist()], [rows[i] for i in held.tolist()]


def _stream(config: TrainingConfig) -> RowStream:
    """Return the stream of ``config.data``."""
    refuse_first((not config.data, "data: no rows to train on", "list at least one path or tasks entry"))
    return RowStream(
        config.data,
        ALGORITHMS.type_of(config.algorithm).row_kind,
        seed=config.seed,
        buffer_size=config.buffer_size,
        shuffle=config.shuffle,
    )


def _streamed(
    config: TrainingConfig, algorithm: Algorithm, tokenizer: Any
) -> tuple[StreamedRows, RowCounts, str]:
    """Return the rows for ``streaming``, their counts, which are still zero, and the digest of their files."""
    stream = _stream(config)

    def prepare(rows: list[Row], counts: RowCounts) -> Iterator[Row]:
        return prepared_rows(config, algorithm, tokenizer, rows, counts)

    rows = StreamedRows(config, algorithm, tokenizer, stream, prepare)
    return rows, rows.counts, _digest_of([{"stream": stream.digest()}], tokenizer)


def _held_out(config: TrainingConfig, eval_dataset: Any) -> Sequence[Row] | None:
    """Return the held-out rows that were passed or specified in the config; None if there are none."""
    if eval_dataset is None and not config.eval_data:
        return None
    rows = rows_of(config, "eval_data") if eval_dataset is None else _given_rows(config, eval_dataset)
    _require_rows("eval_data", rows)
    return rows_to_learn(config, rows)


def _require_rows(name: str, rows: Sequence[Row]) -> None:
    if not rows:
        raise GymError(ErrorCode.DATA_INVALID, f"{name} contains no rows", "add at least one")


def _stored(config: TrainingConfig, source: DataConfig) -> ArrowRows:
    """Return the rows of a source. The main process reads a large source, and all processes map it."""
    kind = ALGORITHMS.type_of(config.algorithm).row_kind
    if not is_large(source):
        return stored_rows(source, kind)
    with spinner(f"reading {source.path}" if is_main() else f"waiting for {source.path}") as activity:
        cache = ArrowCache(on_main(lambda: source_digest(source, kind)))
        if not on_main(cache.is_intact):
            counts = accumulate(fill_source(cache, source, kind))
            in_steps(lambda: shown(activity, ((count, 0) for count in counts)))
        return ArrowRows(cache.path)


def _given_rows(config: TrainingConfig, dataset: Any) -> Sequence[Row]:
    """Return the rows that were passed to ``Trainer.train``; they may also be a name or a pipeline."""
    if isinstance(dataset, str):
        return SelectedRows.whole(_stored(config, named_source(dataset)))
    if isinstance(dataset, SelectedRows):
        return dataset
    if isinstance(dataset, ArrowRows):
        return SelectedRows.whole(dataset)
    if isinstance(dataset, DataPipeline):
        kind = ALGORITHMS.type_of(config.algorithm).row_kind
        return SelectedRows.whole(collect_rows(convertible(dataset, kind)))
    return list(memory_rows(dataset))


def _contents(rows: Sequence[Row]) -> NDArray[Any]:
    """Return an array of texts or digests, ``[rows]``, that are equal for equal rows."""
    if isinstance(rows, SelectedRows):
        return rows.content_digests()
    return np.array([json.dumps(row, sort_keys=True, default=repr) for row in rows], object)


def _digests_of(
    data: Sequence[Any], eval_data: Sequence[Any] | None, tokenizer: Any
) -> tuple[str, str | None]:
    """Return the digests of training and held-out rows for the run folder."""
    return _digest_of(data, tokenizer), None if eval_data is None else _digest_of(eval_data, tokenizer)


def _digest_of(rows: Sequence[dict[str, Any]], tokenizer: Any) -> str:
    """Return the digest of rows, vocabulary and chat template, so that a resumed run cannot silently use others.

    The tokens are not included, since they may change from day to day: some templates print the date.
    """
    text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor contains its tokenizer
    digest = hashlib.sha256()
    encoder = [sorted(text_tokenizer.get_vocab().items()), getattr(tokenizer, "chat_template", None)]
    for value in (encoder, *([rows.digest] if isinstance(rows, LearnedRows) else rows)):
        digest.update(json.dumps(value, sort_keys=True, default=repr).encode())
        digest.update(b"\n")
    return digest.hexdigest()
