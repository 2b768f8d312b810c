"""Programs of token ids to logits, with the tokenizer's files beside them; transformers is not imported."""

from __future__ import annotations

import sys
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from gym_fed.export.readers.reading import LoadedExport
from gym_fed.export.readers.tokens import Tokens

PADDING = 3


def alone(reading: OfProgram) -> OfProgram:
    """The reading, once its runtime has loaded the program without transformers."""
    assert "transformers" not in sys.modules
    return reading


class OfProgram(LoadedExport):
    """Every second reading is padded, in a batch of ``rows``, so that a program of one shape alone is found.

    Args:
        folder: With the tokenizer's files.
    """

    rows: ClassVar[int] = 2

    def __init__(self, folder: Path) -> None:
        self._tokens = Tokens(folder)
        self._readings = 0

    @abstractmethod
    def run(self, ids: Any, mask: Any) -> Any:
        """``[batch, length] int64`` arrays of numpy to ``[batch, length, vocabulary] float32``."""

    def ids(self, prompt: str) -> list[int]:
        return self._tokens.ids(prompt)

    def text_ids(self, text: str) -> list[int]:
        return self._tokens.text_ids(text)

    def special_ids(self) -> dict[str, int]:
        return self._tokens.special_ids()

    def chat_template(self) -> str | None:
        return self._tokens.chat_template()

    def logits(self, ids: list[int]) -> Any:
        import numpy as np
        import torch

        self._readings += 1
        length = len(ids)
        padded = self._readings % 2 == 0
        shape = (self.rows, length + PADDING) if padded else (1, length)
        rows, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        rows[:-1, :length], mask[:-1, :length] = ids, 1
        rows[-1, shape[1] - length :], mask[-1, shape[1] - length :] = ids, 1
        found = self.run(rows, mask)[-1, shape[1] - length :]
        return torch.tensor(found, dtype=torch.float32)
