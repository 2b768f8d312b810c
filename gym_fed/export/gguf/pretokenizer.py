"""Detection of the llama.cpp pre-tokenizer that splits texts like a byte-level tokenizer, by comparison on probes.

A GGUF file names its pre-tokenizer, and llama.cpp knows about thirty. Its converter recognises a tokenizer by a hash of
the ids of one text, so it does not recognise a tuned or new one even if that splits like a known one. Here the source's
tokenizer is compared with itself under each of the known pre-tokenizers, token by token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gym_fed.base.modeling.split_patterns import PATTERNS
from gym_fed.export.gguf.probes import probes

WHOLE_WORDS = frozenset({"llama-bpe", "tekken"})
"""Of ``PATTERNS``, llama.cpp looks a whole piece up before it merges (``ignore_merges``)."""
_CUT = 3000
"""The number of probes whose pieces are compared; the first of them are the plain ones."""


@dataclass(frozen=True)
class Match:
    """The result of a detection.

    Attributes:
        name: The value of ``tokenizer.ggml.pre``; empty if none matches.
        nearest: The one that matches most probes.
        text: The first probe that even the nearest splits differently.
    """

    name: str
    nearest: str = ""
    text: str = ""


def matching(tokenizer: Any, first: str = "") -> Match:
    """Find a member of ``PATTERNS`` under which every probe gets the tokenizer's own token ids.

    Those that split texts into the same pieces come first, since a tokenizer with few merges may match several.

    Args:
        tokenizer: A ``tokenizers.Tokenizer`` of byte-level BPE. Its NFC stays in the comparison: llama.cpp reads texts
            as they are, for all models.
        first: Tried before the others: the converter's own guess.
    """
    texts = list(probes())
    values = json.loads(tokenizer.to_str())
    whole = bool(values["model"].get("ignore_merges"))
    cut = [_cut(tokenizer.pre_tokenizer, text) for text in texts[:_CUT]]
    names = sorted(
        PATTERNS,
        key=lambda name: (name != first, not _cuts(name, texts, cut), (name in WHOLE_WORDS) != whole),
    )
    expected = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    furthest, nearest, text = -1, "", ""
    for name in names:
        other = _under(values, PATTERNS[name], whole_words=name in WHOLE_WORDS)
        at = _first_difference(other, texts, expected)
        if at is None:
            return Match(name)
        if at > furthest:
            furthest, nearest, text = at, name, texts[at]
    return Match("", nearest, text)


def _first_difference(tokenizer: Any, texts: list[str], expected: list[list[int]]) -> int | None:
    """Return the position of the first difference; a few texts show it for most patterns."""
    step = 250
    for first in range(0, len(texts), step):
        encodings = tokenizer.encode_batch(texts[first : first + step], add_special_tokens=False)
        for number, encoding in enumerate(encodings, first):
            if encoding.ids != expected[number]:
                return number
    return None


def _cuts(name: str, texts: list[str], expected: list[list[str]]) -> bool:
    """Return whether a pattern splits the first texts into the expected pieces."""
    own = _pieces(PATTERNS[name])
    return all(_cut(own, text) == pieces for text, pieces in zip(texts, expected, strict=False))


def _cut(pre_tokenizer: Any, text: str) -> list[str]:
    return (
        [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)] if pre_tokenizer is not None else [text]
    )


def _under(values: dict[str, Any], patterns: tuple[str, ...], *, whole_words: bool) -> Any:
    """Return the tokenizer as llama.cpp runs it: split by these patterns, then bytes, then merges."""
    from tokenizers import Tokenizer

    normalizer = values["normalizer"] if (values["normalizer"] or {}).get("type") == "NFC" else None
    model = {**values["model"], "ignore_merges": whole_words}
    made = Tokenizer.from_str(
        json.dumps(
            {
                **values,
                "model": model,
                "normalizer": normalizer,
                "pre_tokenizer": None,
                "post_processor": None,
            }
        )
    )
    made.pre_tokenizer = _pieces(patterns)
    return made


def _pieces(patterns: tuple[str, ...]) -> Any:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
