"""Rules by category, from text files: words and phrases, and patterns between slashes.

    # a comment
    [weapons]
    pipe bomb
    /\\b(?:build|make)\\b.{0,20}\\bbomb/

A phrase matches whole words in scripts that put blanks between words, and anywhere in the others (Chinese, Japanese,
Korean, Thai).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gym_fed.config.content_filter import CATEGORY
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.serving.filter.folding import fold
from gym_fed.serving.filter.patterns import MAX_CHARACTERS, safe_pattern

PACKAGE_RULES = Path(__file__).resolve().parents[2] / "assets" / "filter" / "rules.txt"
MAX_BYTES = 1 << 20
MAX_PATTERNS = 200
"""Of all files: each is searched with every token."""
MAX_CATEGORIES = 32
MAX_PHRASE = 100
_CATEGORY = re.compile(CATEGORY, re.ASCII)
_SPACED = "\\x00-\\u0dff"  # Latin to Sinhala; Thai is the first script without blanks


@dataclass(frozen=True)
class _ContentRule:
    """All phrases of one category, or one of its patterns."""

    category: str
    pattern: re.Pattern[str]
    width: int


@dataclass(frozen=True)
class Rules:
    """Rules to compare folded texts with.

    Attributes:
        width: Most characters of a match.
    """

    _rules: tuple[_ContentRule, ...]

    @property
    def width(self) -> int:
        return max((rule.width for rule in self._rules), default=0)

    @property
    def categories(self) -> list[str]:
        return list(dict.fromkeys(rule.category for rule in self._rules))

    def of(self, categories: Sequence[str]) -> Rules:
        """Those of some categories."""
        return Rules(tuple(rule for rule in self._rules if rule.category in categories))

    def find(self, text: str) -> str | None:
        """Category of the first rule that matches somewhere in ``text``; None without one."""
        folded = fold(text)
        return next((rule.category for rule in self._rules if rule.pattern.search(folded)), None)

    def find_within(self, folded: str, begins: int, ends_after: int, until: int) -> str | None:
        """As ``find``, in a folded text, of a match that begins at ``begins`` or later and ends between two places."""
        for rule in self._rules:
            place = begins
            while (found := rule.pattern.search(folded, place)) is not None:
                if ends_after < found.end() <= until:
                    return rule.category
                place = found.start() + 1
        return None


def read_rules(paths: Iterable[Path]) -> Rules:
    """The rules of these files together.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``TOO_LARGE``; ``CONFIG_INVALID`` naming file and line.
    """
    phrases: dict[str, dict[str, None]] = {}
    patterns: list[_ContentRule] = []
    for path in paths:
        category = None
        for number, line in _lines(path):
            where = f"{path}:{number}"
            if line.startswith("["):
                category = _category(line, where)
                phrases.setdefault(category, {})
                if len(phrases) > MAX_CATEGORIES:
                    raise _refused(where, f"more than {MAX_CATEGORIES} categories", "join some of them")
            elif category is None:
                raise _refused(where, "a rule before any category", "begin with a line such as [weapons]")
            elif line.startswith("/"):
                patterns.append(_pattern(line, category, where))
                if len(patterns) > MAX_PATTERNS:
                    raise _refused(where, f"more than {MAX_PATTERNS} patterns", "write phrases where they do")
            else:
                phrases[category][_phrase(line, where)] = None
    rules = [
        _ContentRule(category, _any_of(list(some)), max(map(len, some)))
        for category, some in phrases.items()
        if some
    ]
    return Rules((*rules, *patterns))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers and texts of the lines that are not empty and no comments."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        code = ErrorCode.FILE_NOT_FOUND if isinstance(error, FileNotFoundError) else ErrorCode.CONFIG_INVALID
        raise GymError(
            code, f"filter.rules: cannot read {path}: {error.strerror}", "give the path of a rule file"
        ) from error
    if len(data) > MAX_BYTES:
        raise GymError(
            ErrorCode.TOO_LARGE, f"filter.rules: {path} has more than {MAX_BYTES:,} bytes", "remove rules"
        )
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise _refused(f"{path}:{number}", "the line is not UTF-8", "save the file as UTF-8") from error
        if text and not text.startswith("#"):
            yield number, text


def _category(line: str, where: str) -> str:
    name = line.removeprefix("[").removesuffix("]").strip()
    if not line.endswith("]") or not _CATEGORY.fullmatch(name):
        raise _refused(
            where,
            f"{plain(line, 80)!r} names no category",
            "write it as [self-harm]: small letters, digits, - and _, 32 at most",
        )
    return name


def _pattern(line: str, category: str, where: str) -> _ContentRule:
    if len(line) < 3 or not line.endswith("/"):
        raise _refused(where, f"{plain(line, 80)!r} begins with / and has no end", "write /pattern/")
    try:
        pattern, width = safe_pattern(line[1:-1])
    except ValueError as error:
        raise _refused(
            where, f"pattern {plain(line, 80)!r}: {error}", "see docs/content-filter.md"
        ) from error
    return _ContentRule(category, pattern, width)


def _phrase(line: str, where: str) -> str:
    if len(line) > MAX_CHARACTERS or len(folded := fold(line).strip()) > MAX_PHRASE:
        raise _refused(where, f"a phrase of more than {MAX_PHRASE} characters", "shorten it")
    if not folded:
        raise _refused(where, "a phrase without a character that is seen", "remove the line")
    return folded


def _any_of(phrases: list[str]) -> re.Pattern[str]:
    """One pattern of all phrases: a tree by their letters, so that a search takes no longer for thousands of them."""
    begins = f"(?:(?=[{_SPACED}])(?<!\\w)|(?=[^{_SPACED}]))"
    ends = f"(?:(?<=[{_SPACED}])(?!\\w)|(?<=[^{_SPACED}]))"
    return re.compile(f"{begins}(?:{_tree(sorted(phrases))}){ends}")


def _tree(phrases: list[str]) -> str:
    """Alternatives of sorted texts, grouped by what they begin with."""
    groups: dict[str, list[str]] = {}
    for phrase in phrases:
        groups.setdefault(phrase[:1], []).append(phrase)
    branches = []
    for first, group in groups.items():
        if not first or len(group) == 1:
            branches.append(re.escape(group[0]))
            continue
        shared = _shared(group[0], group[-1])
        branches.append(f"{re.escape(group[0][:shared])}(?:{_tree([text[shared:] for text in group])})")
    return "|".join(branches)


def _shared(first: str, last: str) -> int:
    """Length of the common beginning of two texts."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )


def _refused(where: str, what: str, hint: str) -> GymError:
    return GymError(ErrorCode.CONFIG_INVALID, f"{where}: {what}", hint)
