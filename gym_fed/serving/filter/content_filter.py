"""The content filter of one server: refusals by rules, text held back in streams, and counts by category.

Neither the log nor the counts ever contain a text.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from gym_fed.config.content_filter import FilterConfig, Side
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.filter.rules import FOLDS, PACKAGE_RULES, Rules, fold, read_rules

_log = logging.getLogger(__name__)

Direction = Literal["input", "output"]


@dataclass(frozen=True)
class _Filtered:
    """The rules of one direction, and whether a classifier judges it."""

    rules: Rules
    classified: bool


class ContentFilter:
    """Refuses requests and answers by rules; from any thread.

    Args:
        config: A config with ``input`` or ``output`` on.

    Attributes:
        config: The given config.

    Raises:
        GymError: As ``read_rules``; ``CONFIG_INVALID`` for a category without rule or classifier.
    """

    def __init__(self, config: FilterConfig) -> None:
        self.config = config
        rules = read_rules([*([PACKAGE_RULES] if config.package_rules else []), *config.rules])
        sides: tuple[tuple[Direction, Side], ...] = (("input", config.input), ("output", config.output))
        self._on = {key: self._chosen(rules, side, key) for key, side in sides if side}
        self._lock = threading.Lock()
        self._refused: Counter[tuple[Direction, str]] = Counter()

    def classifies(self, direction: Direction) -> bool:
        """Return whether a classifier judges this direction, after the rules."""
        return direction in self._on and self._on[direction].classified

    def category_of(self, direction: Direction, texts: Iterable[str]) -> str | None:
        """Return the category of the rule that refuses one of these whole texts."""
        if direction not in self._on:
            return None
        categories = map(self._on[direction].rules.find, texts)
        return next((category for category in categories if category is not None), None)

    def held_text(self, before: str = "") -> HeldText | None:
        """Return the ``HeldText`` of an answer that continues a text; None if answers are not filtered."""
        return HeldText(self._on["output"].rules, before) if "output" in self._on else None

    def count(self, direction: Direction, category: str) -> None:
        """Count and log a refusal."""
        _log.warning("content filter: %s refused, category %s", direction, category)
        with self._lock:
            self._refused[direction, category] += 1

    def refused(self) -> dict[tuple[Direction, str], int]:
        """Return refusals so far by direction and category, zeros included."""
        counts = {(key, name): 0 for key, side in self._on.items() for name in self._categories(side)}
        with self._lock:
            return {**counts, **self._refused}

    def _chosen(self, rules: Rules, side: Side, key: Direction) -> _Filtered:
        own = self.config.classifier
        if isinstance(side, bool):
            return _Filtered(rules, own is not None)
        known = [*rules.categories, *([] if own is None else [own.category])]
        for name in side:
            if name not in known:
                raise GymError(
                    ErrorCode.CONFIG_INVALID,
                    f"filter.{key}: nothing is of category {name!r}",
                    f"there are {', '.join(known)}",
                )
        return _Filtered(rules.of(side), own is not None and own.category in side)

    def _categories(self, side: _Filtered) -> list[str]:
        own = self.config.classifier
        return [*side.rules.categories, *([own.category] if own is not None and side.classified else [])]


def texts_in(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)


class HeldText:
    """Holds back the end of a growing answer until no rule can match it, however it is split into chunks.

    A match has at most ``width`` folded characters, so text further than that before the end can be in no match to
    come. A match that touches the end waits for the next character, which may make another word of it.

    Args:
        rules: The rules to match.
        before: The text that the answer continues: a match may begin in it, but not end in it.

    Attributes:
        category: The category of the rule that matched; after that nothing is released.
    """

    def __init__(self, rules: Rules, before: str = "") -> None:
        self.category: str | None = None
        self._rules = rules
        self._width = rules.width
        context = fold(before)[-self._width - 1 :]
        self._folded = context
        self._starts = [0] * len(context)  # where in ``_text`` each folded character comes from
        self._context = len(context)  # how many folded characters are released already
        self._begins = 0  # first place where a match may begin: earlier ones were searched before
        self._text = ""

    def push(self, text: str, *, last: bool = False) -> str:
        """Add text, and return what may be shown. With ``last`` that is all, unless a rule matches."""
        if self.category is not None:
            return ""
        if not self._width:
            return text
        self._take(text)
        size = len(self._folded)
        until = size if last else size - 1
        self.category = self._rules.find_within(self._folded, self._begins, self._context, until)
        if self.category is not None:
            self._text = ""
            return ""
        if last:
            out, self._text = self._text, ""
            return out
        return self._release(size - self._width)

    def _take(self, text: str) -> None:
        folded, blank = [self._folded], self._folded.endswith(" ")
        for place, character in enumerate(text, len(self._text)):
            for letter in FOLDS[ord(character)]:
                if letter == " " and blank:
                    continue
                blank = letter == " "
                folded.append(letter)
                self._starts.append(place)
        self._text += text
        self._folded = "".join(folded)

    def _release(self, count: int) -> str:
        """Release the first ``count`` folded characters, and their text; the last of them stays as context."""
        while 0 < count < len(self._starts) and self._starts[count] == self._starts[count - 1]:
            count -= 1  # one character was folded to several
        if count <= self._context:
            return ""
        cut = self._starts[count]
        out, self._text = self._text[:cut], self._text[cut:]
        self._folded = self._folded[count - 1 :]
        self._starts = [max(0, place - cut) for place in self._starts[count - 1 :]]
        self._context = self._begins = 1
        return out
