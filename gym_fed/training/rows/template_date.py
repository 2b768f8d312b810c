"""The date that a run's chat template prints: that of the run's beginning, also on a later day.

Llama 3's templates and others print the day (``strftime_now``). A run that goes on tomorrow would learn from other
tokens than it began with, so the moment is kept in ``run.json`` and given to the templates as long as the run lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from typing import Any


@contextmanager
def templates_say(moment: str) -> Iterator[None]:
    """Within, templates that call for the present time get ``moment``, in ISO format and local time."""
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    before, fixed = module.datetime, datetime.fromisoformat(moment)

    class Then(datetime):
        """transformers calls nothing but ``now``."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return fixed.astimezone(tz) if tz is not None else fixed

    module.datetime = Then
    try:
        yield
    finally:
        module.datetime = before
