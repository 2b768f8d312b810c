"""Patches that let llama.cpp's converter write tokenizers that it does not know, or writes incorrectly.

It runs in the process of ``convert.py``, where ``teach`` replaces methods of the converter's classes.
"""

from __future__ import annotations

import json
import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.split_patterns import PATTERNS
from gym_fed.export.gguf.pretokenizer import matching

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_MERGES = "tokenizer.ggml.merges"
_UNREACHED = -1e9
"""The score of a piece that no merge produces."""


class UnknownTokenizerError(Exception):
    """Raised if no pre-tokenizer of llama.cpp splits texts like this tokenizer."""


def teach(model_class: Any) -> None:
    """Patch the tokenizer methods of the converter's ``model_class``.

    The converter recognises a byte-level tokenizer by a hash of one text's ids, which different tokenizers can share,
    such as one with GPT-2's splitting and a vocabulary of single digits. Unless the hash gives a pre-tokenizer outside
    ``PATTERNS``, ``pretokenizer.matching`` therefore decides if it finds a match.

    A SentencePiece-style tokenizer without SentencePiece's own file, which is usual for tuned models, is written from
    ``tokenizer.json`` with the order of its merges. A byte-level tokenizer without merges gets an empty list of merges:
    llama.cpp requires the list, and the ``gguf`` package cannot write an empty one.
    """
    import gguf

    by_hash, by_file = model_class.get_vocab_base_pre, model_class._set_vocab_sentencepiece

    def pre_tokenizer(self: Any, tokenizer: Any) -> str:
        known = ""
        with suppress(NotImplementedError):
            known = str(by_hash(self, tokenizer))
        if known and known not in PATTERNS:
            return known
        match = matching(tokenizer.backend_tokenizer, known)
        if not match.name and known:
            return known
        if not match.name:
            raise UnknownTokenizerError(
                f"its tokenizer splits {match.text!r} as no pre-tokenizer of llama.cpp does; "
                f"the nearest is {match.nearest}"
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
        raise FileNotFoundError("no tokenizer of pieces")
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
            text = text if token["special"] else text.replace("▁", " ")
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
