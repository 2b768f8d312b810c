"""Check regular expressions of custom task files: none may take exponential time.

A backtracking search tries every way to match. If a part that matches in several ways is repeated without a limit, as
in ``(a+)+``, the ways double with every character. The harness's own expressions are not checked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MAX_CHARACTERS = 1000
"""Maximum characters of an expression."""
MAX_OPEN = 3
"""Maximum unbounded repeats; each adds a factor of the text's length to a search."""
_MAX_WAYS = 10_000
_MAX_TIMES = 1000
_REPEATS = {sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT}


def require_quick(text: str) -> None:
    """Refuse an expression whose search may be slow.

    Raises:
        ValueError: Why.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"an expression of {len(text)} characters; {MAX_CHARACTERS} at most")
    try:
        ways, num_open = _counted(parser.parse(text))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"no regular expression: {error}") from error
    if ways > _MAX_WAYS or num_open > MAX_OPEN:
        raise ValueError(
            f"there are too many ways to match it; write at most {MAX_OPEN} repeats without a limit, and fewer others"
        )


def _counted(tree: Iterable[tuple[Any, Any]]) -> tuple[int, int]:
    """Count the ways to match at one position, with unbounded repeats as one way each, and the number of these
    repeats."""
    ways, num_open = 1, 0
    for kind, value in tree:
        more, also_open = _of(kind, value)
        ways, num_open = min(ways * more, _MAX_WAYS + 1), num_open + also_open
    return ways, num_open


def _of(kind: Any, value: Any) -> tuple[int, int]:
    if kind in _REPEATS:
        return _repeated(*value)
    if kind is sre.BRANCH:
        return _branches(value[1])
    if kind is sre.SUBPATTERN:
        return _counted(value[3])
    if kind in (sre.ASSERT, sre.ASSERT_NOT):
        return _counted(value[1])
    if kind is sre.ATOMIC_GROUP:
        return _counted(value)
    if kind is sre.GROUPREF_EXISTS:
        return _branches([branch for branch in value[1:] if branch is not None])
    return 1, 0


def _repeated(least: int, most: Any, inner: Any) -> tuple[int, int]:
    ways, num_open = _counted(inner)
    least, most = int(least), int(most)
    is_open = most > _MAX_TIMES
    if (most > 1 and num_open) or (is_open and (ways > 1 or inner.getwidth()[0] == 0)):
        raise ValueError(
            "a repeat within a repeat, which may take for ever: write it with one, as in [a-z ]+"
        )
    if is_open:
        return 1, 1
    total = 0
    for times in range(least, most + 1):
        total = min(total + ways ** min(times, 64), _MAX_WAYS + 1)
    return total, num_open


def _branches(branches: Iterable[Any]) -> tuple[int, int]:
    """Return the number of branches that can match; those that start with different characters exclude each other."""
    total: dict[Any, int] = {}
    num_open = 0
    for branch in branches:
        ways, more = _counted(branch)
        first = branch[0][1] if len(branch) and branch[0][0] is sre.LITERAL else None
        total[first] = total.get(first, 0) + ways
        num_open += more
    anything = total.pop(None, 0)
    return min(anything + max(total.values(), default=0), _MAX_WAYS + 1), num_open
