"""Patches that let llama.cpp's converter write tokenizers that it does not know, or writes incorrectly.

They run in the process of ``convert.py``, in which ``patch_tokenizers`` replaces methods of the converter's classes.

A GGUF file names its pre-tokenizer, and llama.cpp knows about thirty. Its converter recognises a tokenizer by a hash of
the ids of one text, so it does not recognise a tuned or new one even if that splits like a known one. Here the source's
tokenizer is compared with itself under each of the known pre-tokenizers, token by token.
"""

from __future__ import annotations

import json
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.split_patterns import PATTERNS
from gym_fed.core.tokenizer_errors import tokenizer_errors
from gym_fed.export.gguf.probes import probes

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_MERGES = "tokenizer.ggml.merges"
_UNREACHED = -1e9
"""The score of a piece that no merge produces."""
WHOLE_WORDS = frozenset({"llama-bpe", "tekken"})
"""The ``PATTERNS`` for which llama.cpp looks up a whole piece before it merges (``ignore_merges``)."""
_CUT = 3000
"""The number of probes whose pieces are compared; the plain ones come first."""


@dataclass(frozen=True)
class Match:
    """The result of a detection.

    Attributes:
        name: The value of ``tokenizer.ggml.pre``; empty if none matches.
        nearest: The pre-tokenizer that matches most probes.
        text: The first probe that even the nearest splits differently.
    """

    name: str
    nearest: str = ""
    text: str = ""


def matching(tokenizer: Any, first: str = "") -> Match:
    """Find a member of ``PATTERNS`` under which every probe gets the tokenizer's own token ids.

    Pre-tokenizers that split texts into the same pieces come first, since a tokenizer with few merges may match
    several.

    Args:
        tokenizer: A ``tokenizers.Tokenizer`` of byte-level BPE. Its NFC stays in the comparison: llama.cpp reads texts
            as they are, for all models.
        first: The converter's own guess, tried before the others.
    """
    texts = list(probes())
    values = json.loads(tokenizer.to_str())
    ignore = bool(values["model"].get("ignore_merges"))
    cut = [_cut(tokenizer.pre_tokenizer, text) for text in texts[:_CUT]]
    names = sorted(
        PATTERNS,
        key=lambda name: (name != first, not _cuts(name, texts, cut), (name in WHOLE_WORDS) != ignore),
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
    """Return the index of the first text with different ids; None if there is none."""
    step = 250
    for first in range(0, len(texts), step):
        encodings = tokenizer.encode_batch(texts[first : first + step], add_special_tokens=False)
        for number, encoding in enumerate(encodings, first):
            if encoding.ids != expected[number]:
                return number
    return None


def _cuts(name: str, texts: list[str], expected: list[list[str]]) -> bool:
    """Return True if a pattern splits the first texts into the expected pieces."""
    own = _pieces(PATTERNS[name])
    return all(_cut(own, text) == pieces for text, pieces in zip(texts, expected, strict=False))


def _cut(pre_tokenizer: Any, text: str) -> list[str]:
    if pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def _under(values: dict[str, Any], patterns: tuple[str, ...], *, whole_words: bool) -> Any:
    """Return the tokenizer as llama.cpp applies it: split by these patterns, then bytes, then merges."""
    from tokenizers import Tokenizer

    normalizer = values["normalizer"] if (values["normalizer"] or {}).get("type") == "NFC" else None
    model = {**values["model"], "ignore_merges": whole_words}
    changes = {"model": model, "normalizer": normalizer, "pre_tokenizer": None, "post_processor": None}
    tokenizer = Tokenizer.from_str(json.dumps(values | changes))
    tokenizer.pre_tokenizer = _pieces(patterns)
    return tokenizer


def _pieces(patterns: tuple[str, ...]) -> Any:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, as_bytes])


class UnknownTokenizerError(Exception):
    """No pre-tokenizer of llama.cpp splits texts like this tokenizer."""


def patch_tokenizers(model_class: Any) -> None:
    """Patch the tokenizer methods of the converter's ``model_class``.

    The converter recognises a byte-level tokenizer by a hash of one text's ids, which different tokenizers can share,
    such as one with GPT-2's splitting and a vocabulary of single digits. Unless the hash gives a pre-tokenizer outside
    ``PATTERNS``, ``matching`` therefore decides if it finds a match.

    The converter writes an added token as its encoding decodes. A byte-level decoder takes each of its letters for a
    byte, so ``§5A`` became ``\ufffd5A``. The texts of added tokens are therefore those of ``tokenizer.json``.

    A SentencePiece-style tokenizer without SentencePiece's own file, which is usual for tuned models, is written from
    ``tokenizer.json`` with the order of its merges. A byte-level tokenizer without merges gets an empty list of merges:
    llama.cpp requires the list, and the ``gguf`` package cannot write an empty one.
    """
    import gguf

    by_hash, by_file = model_class.get_vocab_base_pre, model_class._set_vocab_sentencepiece
    by_class, by_model = model_class.get_vocab_base, model_class.set_vocab

    def base(self: Any) -> tuple[list[str], list[int], str]:
        tokens, kinds, pre = by_class(self)
        file = Path(self.dir_model) / "tokenizer.json"
        for token in json.loads(file.read_text("utf-8"))["added_tokens"] if file.is_file() else []:
            tokens[token["id"]] = token["content"]
        return tokens, kinds, pre

    def vocabulary(self: Any) -> None:
        try:
            by_model(self)
        except (FileNotFoundError, ValueError) as error:  # Phi-3 reads only SentencePiece's own file
            if "tokenizer.model" not in str(error):
                raise
            byte_level(self)

    def pre_tokenizer(self: Any, tokenizer: Any) -> str:
        known = ""
        with suppress(NotImplementedError):
            known = str(by_hash(self, tokenizer))
        if known and known not in PATTERNS:
            return known
        with tokenizer_errors(tokenizer):
            match = matching(tokenizer.backend_tokenizer, known)
        if not match.name and known:
            return known
        if not match.name:
            raise UnknownTokenizerError(
                f"no pre-tokenizer of llama.cpp splits {match.text!r} like its tokenizer; the "
                f"closest is {match.nearest}"
            )
        return match.name

    def pieces(self: Any, *arguments: Any, **named: Any) -> None:
        try:
            by_file(self, *arguments, **named)
        except FileNotFoundError:
            _write_pieces(self)

    def byte_level(self: Any) -> None:
        with suppress(FileNotFoundError):  # the converters of some families call this for both kinds
            return _write_pieces(self)
        by_bytes(self)
        values = self.gguf_writer.kv_data[0]
        if _MERGES not in values:
            values[_MERGES] = gguf.GGUFValue((), gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING)

    def packed(self: Any, value: Any, kind: Any, *arguments: Any, **named: Any) -> bytes:
        if value == ():
            return struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING, 0)
        return bytes(pack(self, value, kind, *arguments, **named))

    by_bytes, pack = model_class._set_vocab_gpt2, gguf.GGUFWriter._pack_val
    model_class._set_vocab_gpt2 = byte_level
    gguf.GGUFWriter._pack_val = packed  # type: ignore[method-assign,assignment]
    model_class.set_vocab, model_class.get_vocab_base = vocabulary, base
    model_class.get_vocab_base_pre = pre_tokenizer
    model_class._set_vocab_sentencepiece = pieces
    model_class._set_vocab_llama_hf = _write_pieces


def _write_pieces(self: Any) -> None:
    """Write a SentencePiece-style tokenizer (BPE with byte fallback) from ``tokenizer.json``.

    llama.cpp merges the two neighbours whose joint piece has the highest score. So the score of a piece is the negative
    rank of its merge, as in SentencePiece's own files.

    Raises:
        FileNotFoundError: If there is no such tokenizer; the converter then tries byte-level ones.
    """
    import gguf
    from tokenizers import Tokenizer

    values = json.loads((Path(self.dir_model) / "tokenizer.json").read_text("utf-8"))
    model = values["model"]
    if model["type"] != "BPE" or not model.get("byte_fallback"):
        raise FileNotFoundError("not a SentencePiece-style tokenizer")
    texts = {index: piece for piece, index in model["vocab"].items()}
    added = {token["id"]: token for token in values["added_tokens"]}
    scores: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge if isinstance(merge, list) else merge.split(" ")
        scores.setdefault(left + right, float(-rank))
    size = max(self.hparams.get("vocab_size", 0), max(texts) + 1, max(added, default=0) + 1)
    tokens, kinds, placed = [], [], []
    for index in range(size):
        token = added.get(index)
        text = token["content"] if token else texts.get(index, f"[PAD{index}]")
        if text == model.get("unk_token"):
            kind = gguf.TokenType.UNKNOWN
        elif token:
            kind = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
            if not token["special"] and token["normalized"]:  # it matches after spaces were replaced
                text = text.replace("▁", " ")
        elif index not in texts:
            kind = gguf.TokenType.UNUSED
        else:
            kind = gguf.TokenType.BYTE if _BYTE.fullmatch(text) else gguf.TokenType.NORMAL
        tokens.append(text.encode())
        kinds.append(kind)
        placed.append(scores.get(text, _UNREACHED))
    self.gguf_writer.add_tokenizer_model("llama")
    self.gguf_writer.add_tokenizer_pre("default")
    self.gguf_writer.add_token_list(tokens)
    self.gguf_writer.add_token_scores(placed)
    self.gguf_writer.add_token_types(kinds)
    gguf.SpecialVocab(self.dir_model, n_vocab=size).add_to_gguf(self.gguf_writer)
    first = Tokenizer.from_str(json.dumps(values)).encode("a", add_special_tokens=False).tokens[0]
    self.gguf_writer.add_add_space_prefix(first.startswith("▁"))
