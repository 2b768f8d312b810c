"""The content filter of one server: what is refused, the answer in its place, and counts by category.

Neither the log nor the counts ever hold a text.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from gym_fed.config.content_filter import FilterConfig, Side
from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.filter.held_text import HeldText
from gym_fed.serving.filter.rules import PACKAGE_RULES, Rules, read_rules

_log = logging.getLogger(__name__)

Direction = Literal["input", "output"]


class ContentFilter:
    """Refuses requests and answers by rules; from any thread.

    Args:
        config: With ``input`` or ``output`` on.

    Attributes:
        text: Answered in place of what is refused.

    Raises:
        GymError: As ``read_rules``; ``CONFIG_INVALID`` for a category without rules.
    """

    def __init__(self, config: FilterConfig) -> None:
        self.text = config.text
        rules = read_rules([*([PACKAGE_RULES] if config.package_rules else []), *config.rules])
        self._input = _chosen(rules, config.input, "input")
        self._output = _chosen(rules, config.output, "output")
        self._lock = threading.Lock()
        self._refused: Counter[tuple[Direction, str]] = Counter()

    @property
    def hold_back(self) -> int:
        """Characters by which a streamed answer is behind; none where answers are not filtered."""
        return 0 if self._output is None else self._output.width

    def refuses_input(self, texts: Iterable[str]) -> bool:
        """Whether one of a request's texts is refused; counts and logs it then."""
        if self._input is None:
            return False
        for text in texts:
            if (category := self._input.find(text)) is not None:
                self.count("input", category)
                return True
        return False

    def held_text(self, before: str = "") -> HeldText | None:
        """For one answer that continues a text; None where answers are not filtered."""
        return None if self._output is None else HeldText(self._output, before)

    def category_of(self, text: str) -> str | None:
        """Of a whole text of an answer, such as a call's arguments."""
        return None if self._output is None else self._output.find(text)

    def count(self, direction: Direction, category: str) -> None:
        """Count and log a refusal."""
        _log.warning("content filter: %s refused, category %s", direction, category)
        with self._lock:
            self._refused[direction, category] += 1

    def refused(self) -> dict[tuple[Direction, str], int]:
        """Refusals so far by direction and category, those without any too."""
        with self._lock:
            counts = dict(self._refused)
        sides: tuple[tuple[Direction, Rules | None], ...] = (("input", self._input), ("output", self._output))
        known = [(side, name) for side, rules in sides if rules is not None for name in rules.categories]
        return {**dict.fromkeys(known, 0), **counts}


def _chosen(rules: Rules, side: Side, key: Direction) -> Rules | None:
    if isinstance(side, bool):
        return rules if side else None
    known = rules.categories
    for name in side:
        if name not in known:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"filter.{key}: no rule is of category {name!r}",
                f"there are {', '.join(known) or 'none'}",
            )
    return rules.of(side)


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)
