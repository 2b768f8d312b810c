"""The form in which rules and texts are compared, so that spelling a word a little differently does not hide it.

Letter by letter: compatibility forms become plain (NFKD: full-width, ligatures, mathematical letters; two texts are
equal in it exactly where they are in NFKC), accents of U+0300 to U+036F and invisible characters go, case is folded.
White space of any length is one blank. Look-alikes of other alphabets, digits for letters and s p a c e d words stay.
"""

from __future__ import annotations

import re
import unicodedata

from gym_fed.core.text import is_visible

_SPACES = re.compile(" +")
_ACCENTS = range(0x300, 0x370)


class _Folds(dict[int, str]):
    """The folded text of each character, made when it is first met; its size is that of Unicode at most."""

    def __missing__(self, code: int) -> str:
        self[code] = found = _folded(chr(code))
        return found


def _folded(character: str) -> str:
    if character.isspace():
        return " "
    parts = unicodedata.normalize("NFKD", character).casefold()
    kept = [one for one in unicodedata.normalize("NFKD", parts) if ord(one) not in _ACCENTS]
    return "".join(" " if one.isspace() else one for one in kept if one.isspace() or is_visible(one))


FOLDS = _Folds()
"""Folded text by code point; white space is a blank, and what is not seen is nothing."""


def fold(text: str) -> str:
    """``text`` as rules see it."""
    return _SPACES.sub(" ", text.translate(FOLDS))
