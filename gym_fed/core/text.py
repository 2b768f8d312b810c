"""Sanitise untrusted text before it is shown in a terminal, a log or a table.

Terminals interpret control characters, and bidirectional overrides and zero-width characters mislead readers, so all of
them are shown as escape sequences.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError

MAX_TEXT = 300
"""Maximum length of an untrusted text on one line, in characters."""

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)\s*", re.IGNORECASE)
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | {
    chr(code) for start, end in ((0xFE00, 0xFE0F), (0xE0100, 0xE01EF)) for code in range(start, end + 1)
}
"""Invisible characters that Unicode classifies as letters or marks: fillers, variation selectors."""

_MAX_MARKS = 4

_TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the direction of the following text."""

_FILE_URL = re.compile(r"(file|sqlite)://+(?=/)")
_PATH = re.compile(r"(?<![\w/:.~])(~?/|[A-Za-z]:[\\/])(?:[^\s/\\:'\"]+[/\\])+([^\s/\\:'\"]+)")
"""Pattern of an absolute path with at least two components, outside of URLs."""

_SINGULAR_VERBS = {"are": "is", "do": "does", "have": "has", "were": "was"}

_PROGRAMS = frozenset({"gym", "gym-server", "gym-client", "pip", "make", "export"})
"""Words that begin a command in a sentence."""


def plain(text: object, limit: int = MAX_TEXT) -> str:
    """Return the text as one line of at most ``limit`` visible characters.

    Unprintable characters (control characters, line ends, bidirectional and zero-width ones, surrogates) are escaped
    as ``\\x1b`` or ``\\u202e``; truncated text ends with ``...``.
    """
    shown: list[str] = []
    room = limit
    for character in str(text)[: limit + 1]:
        seen = character if is_visible(character) else _escaped(character)
        if len(seen) > room:
            visible = "".join(shown)
            return visible[: max(0, limit - 3)] + "..."
        shown.append(seen)
        room -= len(seen)
    return "".join(shown)


def quoted(name: str, limit: int = 60) -> str:
    """Quote an untrusted name, which cannot close the quotes; at most ``limit`` characters, no runs of spaces."""
    collapsed = " ".join(name.split()).replace('"', "'")
    return f'"{plain(collapsed, limit)}"'


def without_folders(text: str) -> str:
    """Replace absolute paths in ``text`` by their file names, to keep local paths out of published text."""
    return _PATH.sub(lambda match: match[2], _FILE_URL.sub("", text).replace(str(Path.home()), "~"))


def harmless(text: str) -> str:
    """Remove control characters and bidirectional overrides from ``text``, but keep its lines."""
    if text.isprintable() and text.isascii():
        return text
    return "".join(c if c in "\n\t" or not _drives(c) else _escaped(c) for c in text)


def is_visible(character: str) -> bool:
    """Return True if a character is visible and unambiguous."""
    return character.isprintable() and character not in _INVISIBLE


def is_name(text: str, limit: int) -> bool:
    """Return True if ``text`` is a valid name.

    A name has 1 to ``limit`` visible characters, no space at its ends, no combining mark before any letter, and at most
    ``_MAX_MARKS`` in a row, since they would cover the lines above.
    """
    return (
        1 <= len(text) <= limit
        and text == text.strip()
        and all(map(is_visible, text))
        and not unicodedata.combining(text[0])
        and max(map(len, _marks(text).split())) <= _MAX_MARKS
    )


def _marks(text: str) -> str:
    """Return ``m`` for each mark over or under a letter, and a space for any other character; never only spaces."""
    return "m " + "".join("m" if unicodedata.category(each) in ("Mn", "Me") else " " for each in text)


def require_utf8(what: str, text: object, hint: str) -> None:
    """Raise ``USAGE`` for a name that is not UTF-8, which file systems and command lines allow.

    Such names cannot be signed or sent; Python represents their bytes as lone surrogates.
    """
    try:
        str(text).encode("utf-8")
    except UnicodeEncodeError:
        raise GymError(ErrorCode.USAGE, f"{what} {plain(text, 200)} is not UTF-8", hint) from None


def whole_number(text: str, max_digits: int = 19) -> int | None:
    """Parse ASCII digits; None for any other text or more than ``max_digits`` digits."""
    return int(text) if len(text) <= max_digits and text.isascii() and text.isdecimal() else None


def readable_seconds(seconds: float) -> str:
    """Format a duration as ``12 s``, ``3 min``, ``2 h 5 min`` or ``40 days``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 2 * 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{round(minutes / (24 * 60))} days"


def _drives(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in _TURNING


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def wrapped(text: str, width: int) -> str:
    """Wrap prose to lines of at most ``width`` characters, keeping each line's indent.

    Commands stay on one line, so that they can be copied: there are no breaks after ``gym`` and similar commands, or
    next to an option. Parts longer than a line are broken by the terminal.
    """
    return "\n".join(line if len(line) <= width else _broken(line, width) for line in text.split("\n"))


def _broken(line: str, width: int) -> str:
    words = line.split()
    indent = line[: len(line) - len(line.lstrip())]
    parts = words[:1]
    for number, word in enumerate(words[1:], 1):
        command = not _PROGRAMS.isdisjoint(words[max(0, number - 2) : number])
        option = word.startswith("-") and word != "-"
        if command or option or words[number - 1].startswith("--"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = [indent + parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(indent + part)
    return "\n".join(lines)


def counted(number: int, noun: str, verb: str = "") -> str:
    """Format a count as ``1 update``, ``2,000 updates``, ``2 entries`` or ``2 matches``.

    Args:
        number: The count.
        noun: What is counted, in the singular.
        verb: A verb to append in the number of the noun; given in the plural, such as ``are``.
    """
    if number == 1:
        words = noun
        verb = verb and _SINGULAR_VERBS.get(verb, f"{verb}s")
    elif noun.endswith("y") and noun[-2:-1] not in ("a", "e", "i", "o", "u"):
        words = f"{noun[:-1]}ies"
    else:
        words = f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"
    return f"{number:,} {words}{verb and f' {verb}'}"


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Format counts by plural noun as ``1 snapshot, 8 entries``."""
    return ", ".join(
        counted(number, f"{name[:-3]}y" if name.endswith("ies") else name.removesuffix("s"))
        for name, number in counts.items()
    )


def readable_bytes(num_bytes: float) -> str:
    """Format a size as ``1.5 MB``, with powers of ten."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"


def parse_bytes(value: object) -> object:
    """Parse ``10GB`` (powers of 1000) or ``10GiB`` (powers of 1024) to a number of bytes; numbers are unchanged."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{value!r} is not a size such as 10GB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def with_error(value: float, error: float | None) -> str:
    """Format a signed value with its standard error, if known, such as "+0.0042 +- 0.0103"."""
    return f"{value:+.4f}" if error is None else f"{value:+.4f} +- {error:.4f}"
