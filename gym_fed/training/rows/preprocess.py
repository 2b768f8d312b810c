"""Encode the rows of a config into its ``tokenized_path``, for later runs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.bounded.chat_operations import present_time_set
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data.row_counts import RowCounts
from gym_fed.training.model.template_tokens import template_tokenizer, tokenizer_name
from gym_fed.training.rows.run_rows import encode_run, rows_of_run
from gym_fed.training.rows.tokenized import TokenizedRows
from gym_fed.training.run.checks import check_config


def preprocess(config: TrainingConfig) -> tuple[RowCounts, RowCounts | None, dict[str, Any]]:
    """Encode the rows of ``config`` into its ``tokenized_path``, without loading a model.

    If the folder already contains encoded rows, they are checked against the config and left unchanged.

    Returns:
        The counts of training and held-out rows, and the index.

    Raises:
        GymError: ``USAGE`` without ``tokenized_path``; errors from ``TokenizedRows.read`` and ``write``.
    """
    if config.tokenized_path is None:
        remedy = "set it to the folder for the encoded rows"
        raise GymError(ErrorCode.USAGE, "tokenized_path: not set", remedy)
    check_config(config)
    algorithm, store = ALGORITHMS.new(config.algorithm), TokenizedRows(config.tokenized_path)
    if not store.is_filled():
        store.require_free()
    name = tokenizer_name(config)
    if name is None:
        remedy = "set it to the model whose tokenizer is used"
        raise GymError(ErrorCode.CONFIG_INVALID, "model: not set", remedy)
    tokenizer = template_tokenizer(load_tokenizer(name), config)
    with present_time_set(datetime.now().isoformat(timespec="seconds")):
        rows = encode_run(config, algorithm, tokenizer, *rows_of_run(config, None, None))
    return rows.counts, rows.eval_counts, store.index()
