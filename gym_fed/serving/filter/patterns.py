"""Regular expressions whose search takes bounded time and whose matches have bounded length.

A text that a stranger chose can make Python's ``re`` take exponential time (``(a+)+b``), and a search cannot be
stopped. Trying a pattern, as is done where the texts are known (``gym_fed.base.modeling.patterns``), shows nothing
about other texts. So the ways in which a pattern can match are counted instead: a backtracking search
visits each at most once from each place. Only what can be counted is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from gym_fed.serving.filter.folding import FOLDS

MAX_CHARACTERS = 500
"""Of a pattern."""
MAX_WIDTH = 200
"""Characters of a match: as many are held back of a stream."""
MAX_WAYS = 1000
_ATOMS = {sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN}
_BOUNDARIES = {sre.AT_BOUNDARY, sre.AT_NON_BOUNDARY}


def safe_pattern(text: str) -> tuple[re.Pattern[str], int]:
    """The compiled pattern, and the most characters of its match.

    Args:
        text: Searched in folded text, without regard to case.

    Raises:
        ValueError: Why it is refused.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"a pattern of {len(text)} characters; {MAX_CHARACTERS} at most")
    plain = "".join(one if one.isascii() else re.escape(FOLDS[ord(one)]) for one in text)
    try:
        tree = parser.parse(plain)
        if tree.state.flags & ~re.UNICODE:
            raise ValueError("flags such as (?i) are not allowed: case is ignored as it is")
        least, most = tree.getwidth()
        if least == 0:
            raise ValueError("it matches the empty text")
        if most > MAX_WIDTH:
            raise ValueError(
                f"its match can have more than {MAX_WIDTH} characters: give repeats a limit, as in .{{0,40}}"
            )
        if _ways(tree) > MAX_WAYS:
            raise ValueError(
                f"there are more than {MAX_WAYS:,} ways to match it, which may take long: write fewer or shorter "
                "repeats"
            )
        return re.compile(plain, re.IGNORECASE), int(most)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no regular expression: {error}") from error


def _ways(tree: Iterable[tuple[Any, Any]]) -> int:
    """Upper bound of the paths that a backtracking search can take from one place; stops soon beyond ``MAX_WAYS``."""
    total = 1
    for kind, value in tree:
        total *= _ways_of(kind, value)
        if total > MAX_WAYS:
            break
    return total


def _ways_of(kind: Any, value: Any) -> int:
    if kind in _ATOMS or (kind is sre.AT and value in _BOUNDARIES):
        return 1
    if kind is sre.BRANCH:
        return _ways_of_branches(value[1])
    if kind is sre.SUBPATTERN:
        _, added, removed, inner = value
        if added or removed:
            raise ValueError("flags such as (?i:...) are not allowed: case is ignored as it is")
        return _ways(inner)
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        least, most, inner = value
        one, total = _ways(inner), 0
        for times in range(int(least), int(most) + 1):
            total += one**times
            if total > MAX_WAYS:
                break
        return total
    name = str(value if kind is sre.AT else kind).removeprefix("AT_").lower().replace("_", " ")
    raise ValueError(f"{name} is not allowed: characters, classes, groups, |, counted repeats and \\b are")


def _ways_of_branches(branches: Iterable[Any]) -> int:
    """Of branches that begin with different characters one alone can go on."""
    total: dict[str | None, int] = {}
    for branch in branches:
        begins = chr(branch[0][1]).casefold() if len(branch) and branch[0][0] is sre.LITERAL else None
        total[begins] = total.get(begins, 0) + _ways(branch)
    anything = total.pop(None, 0)
    return anything + max(total.values(), default=0)
