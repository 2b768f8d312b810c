"""The training and held-out rows of a run, encoded, with the digest that identifies them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.arrow_values import memory_rows
from gym_fed.data.row_counts import RowCounts, counts_of
from gym_fed.data.rows import unread_keys
from gym_fed.data.string_rows import count_forms
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.processes.group import on_main
from gym_fed.training.rows.run_kind import rows_to_encode, rows_to_learn
from gym_fed.training.vision.conversations import require_no_images


@dataclass(frozen=True)
class RunRows:
    """The rows of a run, encoded.

    Attributes:
        encoded: Encoded training rows.
        eval_encoded: The same for ``eval_data``; None when there is none.
        digests: Digests of both, as the run folder stores them.
        counts: Counts of learned, cut and dropped training rows.
        eval_counts: The same for ``eval_data``.
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
    """Return training and held-out rows of the kind that the algorithm learns from; a text is a name or path.

    ``split_of`` chooses ``eval_split`` by the number of different rows, where no held-out rows are named.
    """
    from gym_fed.training.rows.sources import count_different, rows_of, split_rows

    if dataset is None and not config.data and has_encoded(config):
        return [], None
    dataset, eval_dataset = _named(dataset), _named(eval_dataset)
    rows = rows_of(config) if dataset is None else list(memory_rows(dataset))
    split = config.eval_split
    if eval_dataset is None and not split and split_of is not None:
        split = split_of(count_different(rows))
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


def _named(dataset: Sequence[dict[str, Any]] | str | None) -> Sequence[dict[str, Any]] | None:
    if not isinstance(dataset, str):
        return dataset
    from gym_fed.data.sources import named_rows

    return named_rows(dataset)


def encode_run(
    config: TrainingConfig,
    algorithm: Algorithm,
    tokenizer: Any,
    data: list[dict[str, Any]],
    eval_data: list[dict[str, Any]] | None,
) -> RunRows:
    """Encode the rows of ``rows_of_run``, or read those of ``tokenized_path`` if it holds some."""
    forms = count_forms(tokenizer, data)
    data = rows_to_encode(config, tokenizer, data)
    eval_data = None if eval_data is None else rows_to_encode(config, tokenizer, eval_data)
    rows = _encoded_or_stored(config, algorithm, tokenizer, data, eval_data)
    rows.counts.forms = rows.counts.forms or forms
    return rows


def _encoded_or_stored(
    config: TrainingConfig,
    algorithm: Algorithm,
    tokenizer: Any,
    data: list[dict[str, Any]],
    eval_data: list[dict[str, Any]] | None,
) -> RunRows:
    if config.tokenized_path is None:
        return _encode(config, algorithm, tokenizer, data, eval_data)
    from gym_fed.training.rows.tokenized import TokenizedRows

    store = TokenizedRows(config.tokenized_path)
    if not on_main(store.is_filled):
        rows = _encode(config, algorithm, tokenizer, data, eval_data)
        on_main(lambda: store.write(config, tokenizer, rows))
        return rows
    digests = digests_of(data, eval_data, tokenizer) if data else None
    encoded, eval_encoded, index = store.read(config, tokenizer, digests)
    counts, eval_counts = index["counts"], index["eval_counts"]
    held_out = None if eval_counts is None else RowCounts(**eval_counts)
    return RunRows(encoded, eval_encoded, tuple(index["digests"]), RowCounts(**counts), held_out)


def has_encoded(config: TrainingConfig) -> bool:
    """Return True if ``tokenized_path`` holds rows."""
    from gym_fed.training.rows.tokenized import TokenizedRows

    return config.tokenized_path is not None and TokenizedRows(config.tokenized_path).is_filled()


def has_held_out(config: TrainingConfig, eval_data: Sequence[Any] | None) -> bool:
    """Return True if the run has evaluation data: ``eval_data``, or held-out rows that were encoded before."""
    from gym_fed.training.rows.tokenized import TokenizedRows

    path = config.tokenized_path
    return bool(eval_data) or (path is not None and TokenizedRows(path).has_held_out())


def _encode(
    config: TrainingConfig,
    algorithm: Algorithm,
    tokenizer: Any,
    data: list[dict[str, Any]],
    eval_data: list[dict[str, Any]] | None,
) -> RunRows:
    if not algorithm.reads_images:
        require_no_images([*data, *(eval_data or ())], config.algorithm)
    encoded = algorithm.encode(config, tokenizer, data)
    judging = config.model_copy(update={"privacy": None})  # rows that only judge are not protected
    eval_encoded = eval_data and algorithm.encode(judging, tokenizer, eval_data)
    digests = digests_of(data, eval_data, tokenizer)
    eval_counts = None if eval_data is None else _counted(eval_encoded, eval_data)
    return RunRows(encoded, eval_encoded, digests, _counted(encoded, data), eval_counts)


def digests_of(
    data: Sequence[Any], eval_data: Sequence[Any] | None, tokenizer: Any
) -> tuple[str, str | None]:
    """Return the digests of training and held-out rows, as the run folder holds them."""
    return digest_of(data, tokenizer), None if eval_data is None else digest_of(eval_data, tokenizer)


def _counted(encoded: Any, given: Sequence[Any]) -> RowCounts:
    counts = counts_of(encoded, len(given))
    counts.unread = dict(unread_keys(given))
    return counts


def digest_of(rows: Sequence[dict[str, Any]], tokenizer: Any) -> str:
    """Return the digest of rows and of what encodes them, so that a resumed run cannot silently learn others.

    The tokens themselves may differ from day to day: templates print the date.
    """
    words = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    digest = hashlib.sha256()
    made_by = [sorted(words.get_vocab().items()), getattr(tokenizer, "chat_template", None)]
    for value in (made_by, *rows):
        digest.update(json.dumps(value, sort_keys=True, default=repr).encode())
        digest.update(b"\n")
    return digest.hexdigest()
