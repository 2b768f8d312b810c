"""Reject a model folder whose tokenizer has slow regular expressions or huge token ids before it is loaded.

The tokenizers library searches in compiled code, which neither Ctrl-C nor a time limit can interrupt. Unknown
patterns are therefore tested in a child process first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gym_fed.core.bounded.errors import LimitExceededError
from gym_fed.core.bounded.patterns import search_texts
from gym_fed.core.bounded.pool import EvaluationError, evaluate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.text import plain

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
"""Patterns by llama.cpp's name of the pre-tokenizer; each one splits the parts that the previous one did not split."""

KNOWN = frozenset(
    form
    for patterns in PATTERNS.values()
    for pattern in patterns
    for form in (pattern, pattern.replace(_SHORT, "(?i:'s|'t|'re|'ve|'m|'ll|'d)"))
)
"""All of these patterns, also in the spelling of the published tokenizers. Their time is linear in the length of a
text."""


MAX_PATTERNS = 32
MAX_CHARS = 4000
_MAX_BYTES = 256 << 20
MAX_TOKEN_ID = 1 << 21
"""Maximum token id; embeddings and exported vocabularies have an entry for each smaller one. Published vocabularies
have up to a million tokens."""
_LARGE_NUMBER = re.compile(r":\s*\d{7,}\s*[,}]")
_KEY = re.compile(r'"(?:R|\\u0052)(?:e|\\u0065)(?:g|\\u0067)(?:e|\\u0065)(?:x|\\u0078)"\s*:\s*(?=")')
"""Regular expression for the key of a pattern, also with escaped letters."""
_LINEAR = re.compile(
    r"(?:\\[pPsSdDwWrnt](?:\{\^?\w+\})?|\[(?:\\.|[^\[\]\\&])*\]|[^()\[\]|?*+{}^$\\])+(?:[+*]|\{\d{0,2}(?:,\d{0,2})?\})?",
    re.S,
)
"""Patterns with at most one repeat, at the end, and counts below 100; their time is linear in the text length."""
_LARGE_COUNT = re.compile(r"(?<!\\)(?<!\\[xo])\{(?:\d*,)?\d{4,}(?:,\d*)?\}")
"""Pattern of repeat counts that are too large, since each character can take that many steps. Escaped braces and codes
such as ``\\x{1F600}`` do not match."""


def require_quick_tokenizer(folder: Path, name: str) -> None:
    """Reject a model folder whose tokenizer has a slow pattern or a huge token id; a missing file is not an error.

    Args:
        folder: Folder of the model.
        name: Name of the model in errors.

    Raises:
        GymError: ``MODEL_INVALID`` with the pattern or id, or if ``tokenizer_config.json`` names a file other than
            ``tokenizer.json``.
    """
    config = folder / "tokenizer_config.json"
    named = read_object(config).get("fast_tokenizer_files") if config.is_file() else None
    if named and named != ["tokenizer.json"]:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: its tokenizer_config.json has fast_tokenizer_files, but only tokenizer.json is read",
            "remove the key fast_tokenizer_files, and rename the tokenizer's file to tokenizer.json",
        )
    file, tekken = folder / "tokenizer.json", folder / "tekken.json"
    if file.is_file():
        if file.stat().st_size > _MAX_BYTES:
            raise _refused(name, file.name, f"has more than {_MAX_BYTES >> 20} MiB", "use another model")
        text = file.read_text("utf-8", errors="replace")
        require_quick_splits(text, name)
        _require_small_ids(file, text, name)
    elif tekken.is_file():
        settings = read_object(tekken).get("config")
        if isinstance(settings, dict) and isinstance(pattern := settings.get("pattern"), str):
            _require_quick({pattern}, name, tekken.name)
    elif (vocabulary := folder / "vocab.json").is_file():
        if vocabulary.stat().st_size > _MAX_BYTES:
            raise _refused(
                name, vocabulary.name, f"has more than {_MAX_BYTES >> 20} MiB", "use another model"
            )
        _require_small_ids(vocabulary, vocabulary.read_text("utf-8", errors="replace"), name)


def without_lengths(tokenizer: Any) -> Any:
    """Remove truncation and padding to a length, which a tokenizer's file may set to any number.

    transformers ignores both, but the library below it does not.

    Args:
        tokenizer: A transformers tokenizer, changed in place.
    """
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        backend.no_padding()
        backend.no_truncation()
    return tokenizer


def require_quick_splits(text: str, name: str) -> None:
    """Reject slow patterns in the text of a ``tokenizer.json``; see ``require_quick_tokenizer``."""
    _require_quick(set(_patterns(text)), name, "tokenizer.json")


def _require_quick(patterns: set[str], name: str, file: str) -> None:
    unknown = sorted(item for item in patterns if item not in KNOWN and not _LINEAR.fullmatch(item))
    if len(unknown) > MAX_PATTERNS or any(len(item) > MAX_CHARS for item in unknown):
        raise _refused(
            name, file, f"has more than {MAX_PATTERNS} patterns, or one of more than {MAX_CHARS:,} characters"
        )
    for pattern in unknown:
        if count := _LARGE_COUNT.search(pattern):
            raise _refused(
                name, file, f"has the pattern {plain(pattern, 80)!r}, whose {count[0][:20]} is over 999"
            )
        try:
            evaluate(search_texts, pattern=pattern)
        except (LimitExceededError, EvaluationError) as error:
            need = error.need if isinstance(error, LimitExceededError) else f"fails: {plain(str(error), 200)}"
            raise _refused(name, file, f"has the pattern {plain(pattern, 80)!r}, which {need}") from error


def _require_small_ids(file: Path, text: str, name: str) -> None:
    """Reject ids over ``MAX_TOKEN_ID`` in ``tokenizer.json`` or ``vocab.json``, whose ``text`` was read."""
    if not _LARGE_NUMBER.search(text):
        return  # without parsing
    values = read_object(file)
    model, added = values.get("model"), values.get("added_tokens")
    vocabulary = (
        values if file.name == "vocab.json" else model.get("vocab") if isinstance(model, dict) else None
    )
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    largest = max((number for number in ids if isinstance(number, int)), default=0)
    if largest > MAX_TOKEN_ID:
        problem = f"has the token id {plain(largest, 20)}, but at most {MAX_TOKEN_ID:,} is allowed"
        raise _refused(name, file.name, problem, "use another model")


def _patterns(text: str) -> Iterator[str]:
    decode = json.JSONDecoder().raw_decode
    for match in _KEY.finditer(text):
        try:
            yield str(decode(text, match.end())[0])
        except ValueError:  # the library that reads the file reports it
            return


def _refused(name: str, file: str, problem: str, hint: str = "") -> GymError:
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"{name}: its {file} {problem}",
        hint or f"correct the pattern in {file}, or use another model",
    )
