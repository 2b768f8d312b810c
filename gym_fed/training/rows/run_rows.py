"""The rows of a run: read from its sources, split, converted for the algorithm, and encoded with their digest."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gym_fed.config.train.training import DataConfig, TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.registries import ALGORITHMS
from gym_fed.core.text import counted
from gym_fed.data.row_counts import RowCounts, counts_of
from gym_fed.data.rows import PlacedDict, Row, as_kind, memory_rows, unread_keys
from gym_fed.data.sources import named_rows, source_rows
from gym_fed.data.string_rows import as_turns, count_forms, with_system
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.vision.conversations import require_no_media

_IRRELEVANT = {"output_dir", "seed", "learning_rate", "max_steps", "save_steps"}
"""Keys that differ between rounds and change no token."""

_PRINTS_THE_DATE = ("strftime_now", "datetime")
"""Functions by which a chat template prints the date, so that its tokens change from day to day."""


@dataclass(frozen=True)
class RunRows:
    """The rows of a run, encoded.

    Attributes:
        encoded: Encoded training rows.
        eval_encoded: Encoded rows of ``eval_data``; None without any.
        digests: Digests of both, as the run folder stores them.
        counts: Counts of learned, cut and dropped training rows.
        eval_counts: Counts of the rows of ``eval_data``.
    """

    encoded: Any
    eval_encoded: Any
    digests: tuple[str, str | None]
    counts: RowCounts
    eval_counts: RowCounts | None


def rows_of_run(
    config: TrainingConfig,
    dataset: Sequence[dict[str, Any]] | str | None,
    eval_dataset: Sequence[dict[str, Any]] | str | None,
    split_of: Callable[[int], float] | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return training and held-out rows of the kind that the algorithm learns from.

    Args:
        config: The run's config.
        dataset: Rows, or a name or path, instead of ``config.data``.
        eval_dataset: Rows, or a name or path, instead of ``config.eval_data``.
        split_of: Function from the number of distinct rows to ``eval_split``, used if no held-out rows are named.
    """
    if dataset is None and not config.data and _has_encoded(config):
        return [], None
    dataset, eval_dataset = (
        named_rows(rows) if isinstance(rows, str) else rows for rows in (dataset, eval_dataset)
    )
    rows = rows_of(config) if dataset is None else list(memory_rows(dataset))
    split = config.eval_split
    if eval_dataset is None and not split and split_of is not None:
        split = split_of(len(set(map(_content, rows))))
    if eval_dataset is None and split:
        rows, eval_dataset = split_rows(rows, split, seed=config.seed)
    if eval_dataset is None and config.eval_data:
        eval_dataset = rows_of(config, "eval_data")
    eval_dataset = None if eval_dataset is None else list(memory_rows(eval_dataset))
    for name, part in (("data", rows), ("eval_data", eval_dataset)):
        if part is not None and not part:
            raise GymError(ErrorCode.DATA_INVALID, f"{name}: there are no rows", "give at least one")
    held_out = None if eval_dataset is None else rows_to_learn(config, eval_dataset)
    return rows_to_learn(config, rows), held_out


def encode_run(
    config: TrainingConfig,
    algorithm: Algorithm,
    tokenizer: Any,
    data: list[dict[str, Any]],
    eval_data: list[dict[str, Any]] | None,
) -> RunRows:
    """Encode the rows of ``rows_of_run``, or read encoded rows from ``tokenized_path`` if it has any."""
    from gym_fed.training.processes.group import on_main
    from gym_fed.training.rows.tokenized import TokenizedRows

    forms = count_forms(tokenizer, data)
    data = rows_to_encode(config, tokenizer, data)
    eval_data = None if eval_data is None else rows_to_encode(config, tokenizer, eval_data)
    store = None if config.tokenized_path is None else TokenizedRows(config.tokenized_path)
    if store is None or not on_main(store.is_filled):
        rows = _encode(config, algorithm, tokenizer, data, eval_data)
        if store is not None:
            on_main(lambda: store.write(config, tokenizer, rows))
    else:
        digests = _digests_of(data, eval_data, tokenizer) if data else None
        encoded, eval_encoded, index = store.read(config, tokenizer, digests)
        counts, eval_counts = RowCounts(**index["counts"]), index["eval_counts"]
        held_out = None if eval_counts is None else RowCounts(**eval_counts)
        rows = RunRows(encoded, eval_encoded, tuple(index["digests"]), counts, held_out)
    rows.counts.forms = rows.counts.forms or forms
    return rows


class LastEncoded:
    """A cache of the last encoded rows, for successive runs on the same rows (the rounds of a
    federation)."""

    def __init__(self) -> None:
        self._key: Any = None
        self._rows: RunRows | None = None

    def encode_run(
        self,
        config: TrainingConfig,
        algorithm: Algorithm,
        tokenizer: Any,
        data: list[dict[str, Any]],
        eval_data: list[dict[str, Any]] | None,
    ) -> RunRows:
        """Return ``run_rows.encode_run``, or its last result if rows, tokenizer and config are the same."""
        template = str(getattr(tokenizer, "chat_template", None))
        if not algorithm.keeps_encoded or any(word in template for word in _PRINTS_THE_DATE):
            return encode_run(config, algorithm, tokenizer, data, eval_data)
        key = (_digests_of(data, eval_data, tokenizer), config.model_dump(mode="json", exclude=_IRRELEVANT))
        if self._rows is None or key != self._key:
            self._key, self._rows = key, encode_run(config, algorithm, tokenizer, data, eval_data)
        return self._rows


def rows_of(config: TrainingConfig, key: Literal["data", "eval_data"] = "data") -> list[dict[str, Any]]:
    """Return the rows of ``config.data`` (or ``eval_data``), weighted, in the order of the sources.

    Rows with ``role: forget`` get the key ``forget``.

    Raises:
        GymError: ``CONFIG_INVALID`` if no data is named; see ``source_rows`` for other errors.
    """
    sources: list[DataConfig] = getattr(config, key)
    refuse_first((not sources, f"{key}: no rows to train on", "list at least one path or tasks entry"))
    return [row for index, source in enumerate(sources) for row in _weighted(source, config.seed + index)]


def rows_to_learn(config: TrainingConfig, rows: Sequence[Row]) -> list[Row]:
    """Convert rows to the kind of ``config.algorithm``.

    Raises:
        GymError: See ``as_kind``.
    """
    return as_kind(rows, ALGORITHMS.type_of(config.algorithm).row_kind)


def rows_to_encode(config: TrainingConfig, tokenizer: Any, rows: Sequence[Row]) -> list[Row]:
    """Convert rows of ``rows_to_learn`` to the input of ``Algorithm.encode``.

    Plain prompts become chat turns if the tokenizer has a chat template, and conversations without a system
    message get ``default_system``.
    """
    turns = as_turns(tokenizer, rows)
    if config.default_system is None:
        return turns
    return [with_system(row, config.default_system) for row in turns]


def has_held_out(config: TrainingConfig, eval_data: Sequence[Any] | None) -> bool:
    """Return True if the run has evaluation data: ``eval_data``, or held-out rows that were encoded before."""
    from gym_fed.training.rows.tokenized import TokenizedRows

    path = config.tokenized_path
    return bool(eval_data) or (path is not None and TokenizedRows(path).has_held_out())


def _has_encoded(config: TrainingConfig) -> bool:
    """Return True if ``tokenized_path`` holds rows."""
    from gym_fed.training.rows.tokenized import TokenizedRows

    return config.tokenized_path is not None and TokenizedRows(config.tokenized_path).is_filled()


def _encode(
    config: TrainingConfig,
    algorithm: Algorithm,
    tokenizer: Any,
    data: list[dict[str, Any]],
    eval_data: list[dict[str, Any]] | None,
) -> RunRows:
    if not algorithm.reads_images:
        require_no_media([*data, *(eval_data or ())], algorithm=config.algorithm)
    encoded = algorithm.encode(config, tokenizer, data)
    public = config.model_copy(update={"privacy": None})  # held-out rows are not protected
    eval_encoded = eval_data and algorithm.encode(public, tokenizer, eval_data)
    digests = _digests_of(data, eval_data, tokenizer)
    eval_counts = None if eval_data is None else _count_rows(eval_encoded, eval_data)
    return RunRows(encoded, eval_encoded, digests, _count_rows(encoded, data), eval_counts)


def _count_rows(encoded: Any, given: Sequence[Any]) -> RowCounts:
    counts = counts_of(encoded, len(given))
    counts.unread = dict(unread_keys(given))
    return counts


def split_rows(
    rows: list[dict[str, Any]], size: float, *, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split rows into training and held-out rows, in order. Equal rows count as one and stay on one side.

    Args:
        rows: All rows, repeated by their weights.
        size: Number of distinct held-out rows, or their fraction if below 1.
        seed: Seed of the split.

    Raises:
        GymError: ``CONFIG_INVALID`` if one of the two would be empty.
    """
    keys = list(map(_content, rows))
    different = dict(zip(keys, rows, strict=True))
    number = round(size * len(different)) if size < 1 else round(size)
    reason = f"eval_split: {size:g} of {counted(len(different), 'different row')} would hold out {number}"
    refuse_first((not 0 < number < len(different), reason, "leave at least one row on both sides"))
    held = set(random.Random(seed).sample(list(different), number))
    return (
        [row for key, row in zip(keys, rows, strict=True) if key not in held],
        [row for key, row in different.items() if key in held],
    )


def _content(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, default=repr)


def _weighted(source: DataConfig, seed: int) -> list[dict[str, Any]]:
    rows = [row for _, row in source_rows(source)]
    times, fraction = divmod(source.weight, 1.0)
    extra = random.Random(seed).sample(rows, round(fraction * len(rows)))
    weighted = rows * int(times) + extra
    if source.role == "forget":
        return [PlacedDict.like({**row, "forget": True}, row) for row in weighted]
    return weighted


def _digests_of(
    data: Sequence[Any], eval_data: Sequence[Any] | None, tokenizer: Any
) -> tuple[str, str | None]:
    """Return the digests of training and held-out rows for the run folder."""
    return _digest_of(data, tokenizer), None if eval_data is None else _digest_of(eval_data, tokenizer)


def _digest_of(rows: Sequence[dict[str, Any]], tokenizer: Any) -> str:
    """Return the digest of rows and their encoding, so that a resumed run cannot silently use different ones.

    The tokens themselves may differ from day to day: templates print the date.
    """
    words = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    digest = hashlib.sha256()
    encoder = [sorted(words.get_vocab().items()), getattr(tokenizer, "chat_template", None)]
    for value in (encoder, *rows):
        digest.update(json.dumps(value, sort_keys=True, default=repr).encode())
        digest.update(b"\n")
    return digest.hexdigest()
