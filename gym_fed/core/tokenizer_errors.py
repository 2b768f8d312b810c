"""Panics of the tokenizers library as errors: they are not an ``Exception``, and would end the thread that meets one.

A pattern of tokenizer.json may need more steps than its library takes, for some texts and not for others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.system_errors import is_panic


@contextmanager
def tokenizer_errors(tokenizer: Any) -> Iterator[None]:
    """Around what a tokenizer computes.

    Raises:
        GymError: ``MODEL_INVALID`` for a panic, and for exceptions of the tokenizers library.
    """
    try:
        yield
    except BaseException as error:
        # The library raises bare ``Exception``s, for example if the unknown token is not in the vocabulary.
        if not (is_panic(error) or type(error) is Exception):
            raise
        raise _failed(tokenizer, error) from error


def _failed(tokenizer: Any, error: BaseException) -> GymError:
    """The error for a panic."""
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    reason = (str(error).splitlines() or ["no reason given"])[0]
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"{name}: its tokenizer failed on a text: {reason[:200]}",
        "correct the patterns in its tokenizer.json, or give another model",
    )
