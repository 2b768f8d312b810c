"""Convert panics of the tokenizers library, which are not an ``Exception``, to errors.

A pattern in tokenizer.json may exceed the library's step limit on only some texts. ``install`` covers every tokenizer
of transformers; ``tokenizer_errors`` covers one of the tokenizers library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.system_errors import is_panic


@contextmanager
def tokenizer_errors(tokenizer: Any) -> Iterator[None]:
    """Convert errors of a tokenizer in the block.

    Raises:
        GymError: ``MODEL_INVALID`` for panics and other exceptions of the tokenizers library.
    """
    try:
        yield
    except BaseException as error:
        # The library raises bare ``Exception``s, for example if the unknown token is not in the vocabulary.
        if not (is_panic(error) or type(error) is Exception):
            raise
        raise _failed(tokenizer, error) from error


def install() -> None:
    """Convert the errors of all fast tokenizers of transformers; repeated calls have no effect."""
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    for name in ("_encode_plus", "_decode"):
        method = getattr(TokenizersBackend, name)
        if not hasattr(method, "__wrapped__"):
            setattr(TokenizersBackend, name, _converting(method))


def _converting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def converting(self: Any, *arguments: Any, **named: Any) -> Any:
        with tokenizer_errors(self):
            return method(self, *arguments, **named)

    return converting


def _failed(tokenizer: Any, error: BaseException) -> GymError:
    """Return the error for a panic."""
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    reason = (str(error).splitlines() or ["no reason given"])[0]
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"{name}: its tokenizer failed on a text: {reason[:200]}",
        "correct the patterns in its tokenizer.json, or give another model",
    )
