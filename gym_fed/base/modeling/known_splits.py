"""Regular expressions with which published byte-level tokenizers split text."""

from __future__ import annotations

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
"""Patterns by llama.cpp's name of the pre-tokenizer; each one splits what the one before has left whole."""

KNOWN = frozenset(
    form
    for patterns in PATTERNS.values()
    for one in patterns
    for form in (one, one.replace(_SHORT, "(?i:'s|'t|'re|'ve|'m|'ll|'d)"))
)
"""All of these, also as the published tokenizers write them. They take as long as the text, whatever it is."""
