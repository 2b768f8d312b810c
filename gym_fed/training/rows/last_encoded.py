"""Encodes rows once for runs that learn the same rows one after another, such as the rounds of a federation."""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.rows.run_rows import RunRows, digests_of, encode_run

_IRRELEVANT = {"output_dir", "seed", "learning_rate", "max_steps", "save_steps"}
"""Keys that differ from round to round and change no token."""

_PRINTS_THE_DATE = ("strftime_now", "datetime")
"""The function by which a chat template prints the date, so that its tokens change with every run."""


class LastEncoded:
    """A cache of the last encoded rows and of everything that decides them."""

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
        key = (digests_of(data, eval_data, tokenizer), config.model_dump(mode="json", exclude=_IRRELEVANT))
        if self._rows is None or key != self._key:
            self._key, self._rows = key, encode_run(config, algorithm, tokenizer, data, eval_data)
        return self._rows
