"""Finds which of llama.cpp's pre-tokenizers splits texts as a byte-level tokenizer does, by comparing both on probes.

A GGUF file names its pre-tokenizer, and llama.cpp knows about thirty. Its converter recognises a tokenizer by a hash of
the ids of one text, so a tuned or new one is unknown to it though it splits as a known one. Here the source's
tokenizer is compared with itself under each of the known pre-tokenizers, token by token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gym_fed.export.gguf.probes import probes

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(
    digits: str, *, letters: str = r"\p{L}", short: str = rf"{_SHORT}|", rest: str = r"[^\s\p{L}\p{N}]"
) -> str:
    return rf"{short}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?{rest}+[\r\n]*|{_END}"


def _cased(digits: str, ending: str) -> str:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ending}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}"
    return rf"{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"


_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _END
)
PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_words(r"\p{N}{1,3}"),),
    "smaug-bpe": (_words(r"\p{N}{1,3}"),),
    "qwen2": (_words(r"\p{N}"),),
    "qwen35": (_words(r"\p{N}", letters=r"[\p{L}\p{M}]", rest=r"[^\s\p{L}\p{M}\p{N}]"),),
    "ufakzeka": (_words(r"\p{N}", short=""),),
    "minicpm5": (r"\p{N}{1,3}", _words(r"\p{N}+")),
    "tekken": (_cased(r"\p{N}", ""),),
    "gpt-4o": (_cased(r"\p{N}{1,3}", f"{_SHORT}?"),),
    "deepseek-v3": (r"\p{N}{1,3}", _HAN, _DEEPSEEK),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "poro-chat": (r" ?[^(\s|.,!?…。，、।۔،)]+",),
    "viking": (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"),
    "bailingmoe": (
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "seed-coder": (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_END}",),
    "laguna": (r"[^\n]+|[\n]+", _words(r"\p{N}")),
}  # fmt: skip
"""What llama.cpp splits by, under the name in the file: each regex splits what the one before has left whole."""
WHOLE_WORDS = frozenset({"llama-bpe", "tekken"})
"""Of these, llama.cpp looks a whole piece up before it merges (``ignore_merges``)."""
_CUT = 3000
"""Probes whose pieces are compared; the first of them are the plain ones."""


@dataclass(frozen=True)
class Match:
    """Which pre-tokenizer it is.

    Attributes:
        name: The value of ``tokenizer.ggml.pre``; empty where none splits the same.
        nearest: That of most probes.
        text: The first probe that even the nearest splits otherwise.
    """

    name: str
    nearest: str = ""
    text: str = ""


def matching(tokenizer: Any, first: str = "") -> Match:
    """Of ``PATTERNS``, one under which every probe gets the token ids that the tokenizer gives.

    Those that cut texts into the same pieces come first: a tokenizer with few merges may be like several.

    Args:
        tokenizer: A ``tokenizers.Tokenizer`` of byte-level BPE. Its NFC stays in the comparison: llama.cpp reads texts
            as they are, for all models.
        first: Tried before the others: what the converter takes it for.
    """
    texts = list(probes())
    values = json.loads(tokenizer.to_str())
    whole = bool(values["model"].get("ignore_merges"))
    cut = [_cut(tokenizer.pre_tokenizer, text) for text in texts[:_CUT]]
    names = sorted(
        PATTERNS,
        key=lambda name: (name != first, not _cuts(name, texts, cut), (name in WHOLE_WORDS) != whole),
    )
    wanted = [found.ids for found in tokenizer.encode_batch(texts, add_special_tokens=False)]
    furthest, nearest, text = -1, "", ""
    for name in names:
        other = _under(values, PATTERNS[name], whole_words=name in WHOLE_WORDS)
        at = _first_difference(other, texts, wanted)
        if at is None:
            return Match(name)
        if at > furthest:
            furthest, nearest, text = at, name, texts[at]
    return Match("", nearest, text)


def _first_difference(tokenizer: Any, texts: list[str], wanted: list[list[int]]) -> int | None:
    """Its place; a few texts show it for most."""
    step = 250
    for first in range(0, len(texts), step):
        found = tokenizer.encode_batch(texts[first : first + step], add_special_tokens=False)
        for number, one in enumerate(found, first):
            if one.ids != wanted[number]:
                return number
    return None


def _cuts(name: str, texts: list[str], wanted: list[list[str]]) -> bool:
    """Return whether it cuts the first texts into the wanted pieces."""
    own = _pieces(PATTERNS[name])
    return all(_cut(own, text) == pieces for text, pieces in zip(texts, wanted, strict=False))


def _cut(pre_tokenizer: Any, text: str) -> list[str]:
    return (
        [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)] if pre_tokenizer is not None else [text]
    )


def _under(values: dict[str, Any], patterns: tuple[str, ...], *, whole_words: bool) -> Any:
    """The tokenizer as llama.cpp runs it: split by these patterns, then bytes, then merges."""
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
