"""Runs of 13 words of a text, as hashes: what an evaluation row is found by in other texts.

Source: Brown et al. 2020 (GPT-3), appendix C: runs of 13 words, in lower case without punctuation; those that many rows
share are boilerplate and do not count.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from gym_fed.data.minhash import folded

GRAM_WORDS = 13
MIN_WORDS = 8
"""A shorter text is said by chance too often to mean anything."""

_WORD = re.compile("[぀-ヿ㐀-鿿가-힣]|[^\\W_]+")
"""A word, or a character of a script that is written without spaces."""


def words_of(text: str) -> list[str]:
    """The words of a text; case, punctuation and the width of spaces do not count."""
    return _WORD.findall(folded(text))


def grams(words: list[str], length: int = GRAM_WORDS) -> Iterator[int]:
    """Hashes, of 64 bits, of every run of so many words."""
    for at in range(len(words) - length + 1):
        yield gram_hash(words[at : at + length])


def gram_hash(words: list[str]) -> int:
    """64 bits of the blake2b of words."""
    text = " ".join(words).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def texts_of(row: Any) -> Iterator[str]:
    """Every text in a row, at any depth of its lists and mappings."""
    if isinstance(row, str):
        yield row
    elif isinstance(row, dict):
        for value in row.values():
            yield from texts_of(value)
    elif isinstance(row, list | tuple):
        for value in row:
            yield from texts_of(value)
