"""Encodes the rows of a config into its ``tokenized_path``, for later runs; no model is loaded."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.bounded.chat_operations import present_time_set
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data.row_counts import RowCounts
from gym_fed.training.model.template_tokens import template_tokenizer
from gym_fed.training.rows.run_rows import encode_run, rows_of_run
from gym_fed.training.rows.tokenized import TokenizedRows
from gym_fed.training.run.checks import check_config


def preprocess(config: TrainingConfig) -> tuple[RowCounts, RowCounts | None, dict[str, Any]]:
    """Encode the rows of ``config`` into its ``tokenized_path``; no model is loaded and nothing is trained.

    A folder that holds them already is compared, and left as it is.

    Returns:
        The counts of training and held-out rows, and the index.

    Raises:
        GymError: ``USAGE`` without ``tokenized_path``; as ``TokenizedRows.read`` and ``write``.
    """
    if config.tokenized_path is None:
        raise GymError(ErrorCode.USAGE, "tokenized_path: not given", "name the folder for the encoded rows")
    check_config(config)
    algorithm, store = ALGORITHMS.new(config.algorithm), TokenizedRows(config.tokenized_path)
    if not store.is_filled():
        store.require_free()
    tokenizer = template_tokenizer(_tokenizer_of(config), config)
    with present_time_set(datetime.now().isoformat(timespec="seconds")):
        rows = encode_run(config, algorithm, tokenizer, *rows_of_run(config, None, None))
    return rows.counts, rows.eval_counts, store.index()


def _tokenizer_of(config: TrainingConfig) -> Any:
    if config.model_init is not None:
        return load_tokenizer(config.model_init.tokenizer)
    if config.model is None:
        raise GymError(
            ErrorCode.CONFIG_INVALID, "model: not given", "name the model whose tokenizer encodes the rows"
        )
    return load_tokenizer(config.model)
