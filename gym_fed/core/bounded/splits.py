"""Test an untrusted tokenizer's pattern for slow searches, in the child process.

The speed depends on the text, so the test texts consist of characters that the pattern matches.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

_TEXT_CHARS = 1 << 12
_LONGER = 4
_MOST_GROWTH = 8
"""Four times the text takes 4 times as long if a pattern is linear, and 16 times if it is quadratic."""
_SUSPECT_SECONDS = 0.002
_SLOW_SECONDS = 0.02
"""CPU time for a text of ``_LONGER * _TEXT_CHARS``; linear patterns of published models take up to 0.016 s."""
_MAX_WINDOW = 3
_MAX_WINDOWS = 200
_ATOM = re.compile(
    r"\\[pP]\{\^?\w+\}|\\x\{\w+\}|\\u\w{4}|\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|[^()|?*+{}^$]", re.S
)
_ALPHABET = "aZé中क1²٣ \t\n\r\u00a0.,!'\"-_/$+\u0301\u200d\x00"


def search_texts(pattern: str) -> None:
    """Search a pattern in texts that it partly matches, and in longer ones if a search is suspiciously slow.

    Quadratic time is accepted for runs of digits only: published tokenizers group digits from the right.

    Raises:
        ValueError: If the time grows much faster than the text, or if the library rejects the pattern or aborts a
            search.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    search = _without_panics(Split(Regex(pattern), behavior="isolated").pre_tokenize_str)

    def seconds(unit: str, end: str, chars: int) -> float:
        text = unit * (chars // len(unit)) + end
        began = time.thread_time()  # excludes waiting for a CPU on a busy machine
        search(text)
        return time.thread_time() - began

    for unit, end in _probes(pattern):
        short = seconds(unit, end, _TEXT_CHARS)
        if short < _SUSPECT_SECONDS or unit.isdigit():
            continue
        long = seconds(unit, end, _LONGER * _TEXT_CHARS)
        short = max(short, seconds(unit, end, _TEXT_CHARS))
        if long > max(_SLOW_SECONDS, _MOST_GROWTH * short):
            raise ValueError(f"takes {long / short:.0f} times as long for {_LONGER} times the text")


def _probes(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield repeated parts and endings of test texts: single characters, and matches of the pattern's parts."""
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
    for unit in filter(None, [*_ALPHABET, *list(windows)[:_MAX_WINDOWS], "".join(parts)]):
        for end in ("", "\x01", *parts[-1:]):
            yield unit, end


def _without_panics(function: Callable[[str], Any]) -> Callable[[str], Any]:
    """Catch panics of the library, which aborts long searches without raising an ``Exception``."""

    def call(text: str) -> Any:
        try:
            return function(text)
        except BaseException as error:
            raise ValueError((str(error).splitlines() or ["no reason given"])[0]) from error

    return call
