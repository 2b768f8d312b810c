"""Search a pattern of an untrusted ``tokenizer.json`` in texts made for it; called in the child process.

Whether a pattern is slow depends on the text, so the texts consist of the characters that it matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

_TEXT_CHARS = 1 << 12
_MAX_WINDOW = 3
_MAX_WINDOWS = 200
_ATOM = re.compile(
    r"\\[pP]\{\^?\w+\}|\\x\{\w+\}|\\u\w{4}|\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|[^()|?*+{}^$]", re.S
)
_ALPHABET = "aZé中क1²٣ \t\n\r\u00a0.,!'\"-_/$+\u0301\u200d\x00"


def search_texts(pattern: str) -> None:
    """Search a pattern in texts that it partly matches.

    Raises:
        ValueError: If the library refuses the pattern, or gives up a search.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    search = _without_panics(Split(Regex(pattern), behavior="isolated").pre_tokenize_str)
    for text in probe_texts(pattern):
        search(text)


def probe_texts(pattern: str) -> Iterator[str]:
    """Return repeats of single characters, and of what successive parts of the pattern match, each ended by another."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    def sample(atom: str) -> str:
        try:
            split = Split(Regex(atom), behavior="removed", invert=True)
            matched = [piece for piece, _ in split.pre_tokenize_str(_ALPHABET + atom)]
        except Exception:  # noqa: BLE001  # no pattern by itself
            return ""
        return matched[0] if matched else ""

    parts = [part for part in map(cache(sample), _ATOM.findall(pattern)) if part]
    windows = dict.fromkeys(
        "".join(parts[at : at + size]) for size in range(1, _MAX_WINDOW + 1) for at in range(len(parts))
    )
    for unit in [*_ALPHABET, *list(windows)[:_MAX_WINDOWS], "".join(parts)]:
        for end in ("", "\x01", *parts[-1:]):
            yield unit * (_TEXT_CHARS // max(1, len(unit))) + end


def _without_panics(function: Callable[[str], Any]) -> Callable[[str], Any]:
    """The library panics where a search takes too many steps, which is not an ``Exception``."""

    def call(text: str) -> Any:
        try:
            return function(text)
        except BaseException as error:
            raise ValueError((str(error).splitlines() or ["no reason given"])[0]) from error

    return call
