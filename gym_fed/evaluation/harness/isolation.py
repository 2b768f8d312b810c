"""Isolation of calls into the harness: no network, fixed seeds, and conversion of errors."""

from __future__ import annotations

import logging
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from gym_fed.core.bounded.patterns import BOUNDED_REGEX, BoundedPattern
from gym_fed.core.errors import ErrorCode, GymError

SEED = 1234  # the harness's seed for drawing few-shot examples


@contextmanager
def offline() -> Iterator[None]:
    """Disable the network inside the block. Libraries read the variables once and keep the values."""
    import datasets
    import huggingface_hub.constants

    places: list[tuple[Any, str]] = [
        (huggingface_hub.constants, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_DATASETS_OFFLINE"),
    ]
    before = [(module, name, getattr(module, name)) for module, name in places if hasattr(module, name)]
    serial = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"  # the harness would bootstrap errors in a process for every core
    bars = datasets.are_progress_bars_disabled()
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)  # its warnings are for authors of tasks
    for module, name, _ in before:
        setattr(module, name, True)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        log.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
        if serial is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = serial


@contextmanager
def templates_kept() -> Iterator[None]:
    """Cache compiled templates inside the block; the harness would compile them for every row."""
    from lm_eval.utils import env

    env.from_string = _compiled  # on the object, which hides the method of its class
    try:
        yield
    finally:
        del env.from_string


@cache
def _compiled(template: str) -> Any:
    from lm_eval.utils import env

    return type(env).from_string(env, template)


@contextmanager
def patterns_bounded() -> Iterator[None]:
    """Apply a metric's ``regexes_to_ignore``, which are untrusted, in the child process.

    The harness's own metrics use ``re`` for nothing else.
    """
    from lm_eval.api import metrics

    metrics.re = _BoundedRe()
    try:
        yield
    finally:
        metrics.re = re


class _BoundedRe:
    """The part of the module ``re`` that ``lm_eval.api.metrics`` uses."""

    def sub(self, pattern: str, replacement: str, text: str) -> str:
        """Return the text without the matches."""
        if replacement:
            raise NotImplementedError("only removal is supported")
        return BoundedPattern(pattern, "regexes_to_ignore").remove(str(text))


@cache
def register_bounded_filter() -> None:
    """Register ``BOUNDED_REGEX``: the harness's filter ``regex``, which searches in the child process."""
    from lm_eval.api.registry import register_filter
    from lm_eval.filters.extraction import RegexFilter

    @register_filter(BOUNDED_REGEX)
    class BoundedRegex(RegexFilter):  # type: ignore[misc]  # the harness is not typed
        def __init__(self, regex_pattern: str, group_select: int = 0, fallback: str = "[invalid]") -> None:
            super().__init__(regex_pattern, group_select, fallback)
            self.regex = BoundedPattern(regex_pattern, "filter_list.regex_pattern")


@contextmanager
def seeded() -> Iterator[None]:
    """Set the harness's seeds, which tasks that shuffle rows need, and restore the caller's state."""
    import numpy as np

    plain, arrays = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(SEED)
    try:
        yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)


@contextmanager
def as_gym_error(code: ErrorCode, message: str, hint: str) -> Iterator[None]:
    """Convert an exception of the harness to a ``GymError``, with its text after ``message``."""
    try:
        yield
    except GymError:
        raise
    except Exception as error:
        raise GymError(code, f"{message}: {type(error).__name__}: {str(error)[:500]}", hint) from error
