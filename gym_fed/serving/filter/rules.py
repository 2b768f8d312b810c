"""Filter rules by category, read from text files: words and phrases, and patterns between slashes.

    # a comment
    [weapons]
    pipe bomb
    /\\b(?:build|make)\\b.{0,20}\\bbomb/

A phrase matches whole words in scripts that separate words by spaces, and anywhere in the others (Chinese, Japanese,
Korean, Thai).

Rules and texts are compared in a folded form, so that a slightly different spelling does not hide a word: text is
normalised (NFKD), accents from U+0300 to U+036F and invisible characters are removed, and case is folded. White space
of any length becomes one space. Similar letters of other alphabets, digits in place of letters, and s p a c e d words
are not recognised.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from gym_fed.config.serving import CATEGORY
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, is_visible, plain

_SPACES = re.compile(" +")
_ACCENTS = range(0x300, 0x370)


class _Folds(dict[int, str]):
    """The folded form of each character, computed on first use; its size is bounded by that of Unicode."""

    def __missing__(self, code: int) -> str:
        self[code] = folded = _folded(chr(code))
        return folded


def _folded(character: str) -> str:
    if character.isspace():
        return " "
    parts = unicodedata.normalize("NFKD", character).casefold()
    characters = [part for part in unicodedata.normalize("NFKD", parts) if ord(part) not in _ACCENTS]
    return "".join(
        " " if part.isspace() else part for part in characters if part.isspace() or is_visible(part)
    )


FOLDS = _Folds()
"""The folded form by code point; white space becomes a space, and invisible characters become empty."""


def fold(text: str) -> str:
    """Return the folded form of ``text``, in which rules are compared."""
    return _SPACES.sub(" ", text.translate(FOLDS))


MAX_CHARACTERS = 500
"""Maximum number of characters of a pattern."""
MAX_WIDTH = 200
"""Maximum number of characters of a match, and thus of held-back text in a stream."""
MAX_WAYS = 1000
_ATOMS = {sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN}
_BOUNDARIES = {sre.AT_BOUNDARY, sre.AT_NON_BOUNDARY}


def safe_pattern(text: str) -> tuple[re.Pattern[str], int]:
    """Compile a pattern whose search takes bounded time, and return it with the maximum length of its match.

    An attacker's text can make Python's ``re`` take exponential time (``(a+)+b``), and a search cannot be stopped.
    Therefore the ways in which a pattern can match are counted, since a backtracking search visits each at most once
    per position. Only constructs that can be counted are allowed.

    Args:
        text: The pattern, which is searched in folded text, ignoring case.

    Raises:
        ValueError: If the pattern is refused, with the reason.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {counted(len(text), 'character')}; at most {MAX_CHARACTERS} are allowed")
    plain = "".join(letter if letter.isascii() else re.escape(FOLDS[ord(letter)]) for letter in text)
    try:
        tree = parser.parse(plain)
        if tree.state.flags & ~re.UNICODE:
            raise ValueError("flags such as (?i) are not allowed: case is ignored anyway")
        least, most = tree.getwidth()
        if least == 0:
            raise ValueError("it matches the empty text")
        if most > MAX_WIDTH:
            raise ValueError(
                f"its match can have more than {MAX_WIDTH} characters: give repeats a limit, as in .{{0,40}}"
            )
        if _ways(tree) > MAX_WAYS:
            raise ValueError(
                f"there are more than {MAX_WAYS:,} ways to match it, which may be slow: write fewer or shorter "
                "repeats"
            )
        return re.compile(plain, re.IGNORECASE), int(most)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is not a regular expression: {error}") from error


def _ways(tree: Iterable[tuple[Any, Any]]) -> int:
    """Return an upper bound on the paths of a backtracking search from one position, counting up to ``MAX_WAYS``."""
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
            raise ValueError("flags such as (?i:...) are not allowed: case is ignored anyway")
        return _ways(inner)
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        least, most, inner = value
        ways, total = _ways(inner), 0
        for times in range(int(least), int(most) + 1):
            total += ways**times
            if total > MAX_WAYS:
                break
        return total
    name = str(value if kind is sre.AT else kind).removeprefix("AT_").lower().replace("_", " ")
    raise ValueError(f"{name} is not allowed: characters, classes, groups, |, counted repeats and \\b are")


def _ways_of_branches(branches: Iterable[Any]) -> int:
    """Return the sum over branches, of which only one can match if they begin with different characters."""
    total: dict[str | None, int] = {}
    for branch in branches:
        begins = chr(branch[0][1]).casefold() if len(branch) and branch[0][0] is sre.LITERAL else None
        total[begins] = total.get(begins, 0) + _ways(branch)
    anything = total.pop(None, 0)
    return anything + max(total.values(), default=0)


PACKAGE_RULES = Path(__file__).resolve().parents[2] / "assets" / "filter" / "rules.txt"
MAX_BYTES = 1 << 20
MAX_PATTERNS = 200
"""Maximum number of patterns in all files, since each is searched after every token."""
MAX_CATEGORIES = 32
MAX_PHRASE = 100
_CATEGORY = re.compile(CATEGORY, re.ASCII)
_SPACED = "\\x00-\\u0dff"  # Latin to Sinhala; Thai is the first script without spaces


@dataclass(frozen=True)
class _ContentRule:
    """A compiled rule: all phrases of a category, or one of its patterns."""

    category: str
    pattern: re.Pattern[str]
    width: int


@dataclass(frozen=True)
class Rules:
    """A set of rules that are matched against folded texts.

    Attributes:
        width: Maximum number of characters of a match.
    """

    _rules: tuple[_ContentRule, ...]

    @property
    def width(self) -> int:
        return max((rule.width for rule in self._rules), default=0)

    @property
    def categories(self) -> list[str]:
        return list(dict.fromkeys(rule.category for rule in self._rules))

    def of(self, categories: Sequence[str]) -> Rules:
        """Return the rules of some categories."""
        return Rules(tuple(rule for rule in self._rules if rule.category in categories))

    def find(self, text: str) -> str | None:
        """Return the category of the first rule that matches anywhere in ``text``; None without a match."""
        folded = fold(text)
        return next((rule.category for rule in self._rules if rule.pattern.search(folded)), None)

    def find_within(self, folded: str, begins: int, ends_after: int, until: int) -> str | None:
        """Find a match in a folded text that begins at ``begins`` or later and ends in ``(ends_after, until]``."""
        for rule in self._rules:
            place = begins
            while (match := rule.pattern.search(folded, place)) is not None:
                if ends_after < match.end() <= until:
                    return rule.category
                place = match.start() + 1
        return None


def read_rules(paths: Iterable[Path]) -> Rules:
    """Read the rules of several files.

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
                    raise _refused(where, f"more than {MAX_CATEGORIES} categories", "merge some of them")
            elif category is None:
                raise _refused(
                    where, "a rule before the first category", "begin with a line such as [weapons]"
                )
            elif line.startswith("/"):
                patterns.append(_pattern(line, category, where))
                if len(patterns) > MAX_PATTERNS:
                    raise _refused(where, f"more than {MAX_PATTERNS} patterns", "use phrases where possible")
            else:
                phrases[category][_phrase(line, where)] = None
    rules = [
        _ContentRule(category, _any_of(list(some)), max(map(len, some)))
        for category, some in phrases.items()
        if some
    ]
    return Rules((*rules, *patterns))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbers and texts of the lines that are neither empty nor comments."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        code = ErrorCode.FILE_NOT_FOUND if isinstance(error, FileNotFoundError) else ErrorCode.CONFIG_INVALID
        raise GymError(
            code, f"filter.rules: cannot read {path}: {error.strerror}", "use the path of a rule file"
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
            f"{plain(line, 80)!r} is not a valid category",
            "write it as [self-harm]: lowercase letters, digits, - and _, 32 at most",
        )
    return name


def _pattern(line: str, category: str, where: str) -> _ContentRule:
    if len(line) < 3 or not line.endswith("/"):
        raise _refused(where, f"{plain(line, 80)!r} begins with / but does not end with /", "write /pattern/")
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
        raise _refused(where, "a phrase without visible characters", "remove the line")
    return folded


def _any_of(phrases: list[str]) -> re.Pattern[str]:
    """Compile all phrases to one pattern, a prefix tree, so that a search stays fast with thousands of phrases."""
    begins = f"(?:(?=[{_SPACED}])(?<!\\w)|(?=[^{_SPACED}]))"
    ends = f"(?:(?<=[{_SPACED}])(?!\\w)|(?<=[^{_SPACED}]))"
    return re.compile(f"{begins}(?:{_tree(sorted(phrases))}){ends}")


def _tree(phrases: list[str]) -> str:
    """Join sorted texts as alternatives, grouped by common prefixes."""
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
    """Return the length of the common prefix of two texts."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )


def _refused(where: str, problem: str, hint: str) -> GymError:
    return GymError(ErrorCode.CONFIG_INVALID, f"{where}: {problem}", hint)
