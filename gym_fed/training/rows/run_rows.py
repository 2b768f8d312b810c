"""The rows of a run: what it learns from and is judged by, and the digest that tells them from others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.errors import ErrorCode, GymError
from gym_fed.training.algorithms.base import Algorithm


def rows_of_run(
    config: TrainingConfig,
    dataset: Sequence[dict[str, Any]] | None,
    eval_dataset: Sequence[dict[str, Any]] | None,
    algorithm: Algorithm,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Training and held-out rows of the kind that the algorithm learns from."""
    from gym_fed.data.rows import as_kind
    from gym_fed.training.rows.sources import rows_of, split_rows

    rows = rows_of(config) if dataset is None else list(dataset)
    if eval_dataset is None and config.eval_split:
        rows, eval_dataset = split_rows(rows, config.eval_split, seed=config.seed)
    if eval_dataset is None and config.eval_data:
        eval_dataset = rows_of(config, "eval_data")
    for name, part in (("data", rows), ("eval_data", eval_dataset)):
        if part is not None and not part:
            raise GymError(ErrorCode.DATA_INVALID, f"{name}: there are no rows", "give at least one")
    held_out = None if eval_dataset is None else as_kind(eval_dataset, algorithm.row_kind)
    return as_kind(rows, algorithm.row_kind), held_out


def digest_of(rows: Sequence[dict[str, Any]], tokenizer: Any) -> str:
    """Digest of rows and of what makes tokens of them, so that a resumed run cannot silently learn from others.

    The tokens themselves may differ from day to day: templates print the date.
    """
    words = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    digest = hashlib.sha256()
    made_by = [sorted(words.get_vocab().items()), getattr(tokenizer, "chat_template", None)]
    for value in (made_by, *rows):
        digest.update(json.dumps(value, sort_keys=True, default=repr).encode())
        digest.update(b"\n")
    return digest.hexdigest()
