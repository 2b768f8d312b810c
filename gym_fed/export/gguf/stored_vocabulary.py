"""Comparison of the vocabulary in a GGUF file with the source's tokenizer: every token, its kind, and the merges.

Token ids of texts alone do not reveal a wrong token: no text contains all of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gym_fed.base.imports.gguf.header import read_header
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_ADDED_KINDS = (_CONTROL, _USER_DEFINED)
_MODELS = ("gpt2", "llama", "gemma4")
"""llama.cpp's tokenizers whose tokens are those of ``tokenizer.json``: of bytes, and two of pieces."""
_SPACE = "▁"
"""SentencePiece's letter for a space."""


def compare_vocabulary(file: Path, tokenizer: Any) -> dict[str, Any]:
    """Compare tokens, kinds and merges of a file with a tokenizer.

    Args:
        file: The written file.
        tokenizer: The source's ``transformers`` tokenizer.

    Returns:
        ``compared`` tokens, ``added`` tokens among them, and ``merges``; or ``not_compared`` with the reason.

    Raises:
        GymError: ``EXPORT_DIFFERS`` naming the token.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"not_compared": "the source's tokenizer is not one of the tokenizers library"}
    header = read_header(file)
    state = json.loads(backend.to_str())
    model = header.values.get(f"{_PREFIX}model")
    if model not in _MODELS:
        return {"not_compared": f"the file's tokenizer is of the kind {model}"}
    tokens: list[str] = header.values[f"{_PREFIX}tokens"]
    kinds = [int(kind) for kind in header.values[f"{_PREFIX}token_type"]]
    is_bytes = model == "gpt2"
    added = {token["id"]: token for token in state["added_tokens"]}
    ids = {number: text for text, number in _vocabulary(state["model"]).items()}
    if len(kinds) != len(tokens) or max([*ids, *added]) >= len(tokens):
        raise _differs(f"it has {counted(len(tokens), 'token')}, the tokenizer {max([*ids, *added]) + 1}")
    unknown = state["model"].get("unk_token")
    for number, (text, kind) in enumerate(zip(tokens, kinds, strict=True)):
        token = added.get(number)
        if token is None:
            expected = ids.get(number)
            if expected is None and kind != _UNUSED:
                raise _differs(f"token {number} is {_shown(text)}, and the tokenizer has none")
            if expected is not None and (text != expected or (is_bytes and kind in _ADDED_KINDS)):
                raise _differs(f"token {number} is {_shown(text)} of kind {kind}, not {_shown(expected)}")
            continue
        expected = token["content"]
        is_spaced = not (is_bytes or token["special"]) and (token["normalized"] or not expected.strip(_SPACE))
        spaced = expected.replace(_SPACE, " ") if is_spaced else expected
        kinds_of_it = (_CONTROL,) if token["special"] else _ADDED_KINDS
        if text not in (expected, spaced) or not (
            kind in kinds_of_it or (expected == unknown and kind == _UNKNOWN)
        ):
            raise _differs(f"added token {number} is {_shown(text)} of kind {kind}, not {_shown(expected)}")
    merges = _compare_merges(header.values.get(f"{_PREFIX}merges", []), state["model"]) if is_bytes else None
    return {"compared": len({*ids, *added}), "added": len(added), "merges": merges}


def stripping_tokens(tokenizer: Any) -> list[str]:
    """Return the added tokens that take adjacent white space, or are whole words, which GGUF does not record."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return [token.content for token in added.values() if token.lstrip or token.rstrip or token.single_word]


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    """Return the ids of a tokenizer's model by text; a unigram model has a list of texts with scores."""
    vocabulary: Any = model["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {text: number for number, (text, _) in enumerate(vocabulary)}


def _compare_merges(stored: list[str], model: dict[str, Any]) -> int:
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model.get("merges", [])]
    if list(stored) != merges:
        pairs = zip([*stored, None], [*merges, None], strict=False)
        number, (other, own) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
        raise _differs(f"merge {number} is {_shown(other)}, not {_shown(own)}")
    return len(merges)


def _shown(text: str | None) -> str:
    return "missing" if text is None else repr(plain(text, 60))


def _differs(why: str) -> GymError:
    return GymError(
        ErrorCode.EXPORT_DIFFERS,
        f"the vocabulary in the file is not the tokenizer's: {why}; nothing was kept",
        "report this with the model's name; --skip-check writes it all the same",
    )
