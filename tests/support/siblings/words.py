"""Tokenizers of two kinds, trained on a page of text: byte-level BPE, and BPE as SentencePiece exports it.

The files are those of a repository: ``tokenizer.json`` and ``tokenizer_config.json`` with the published
``tokenizer_class``, so that ``AutoTokenizer`` goes the way that it goes for the real model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = (
    "The quick brown fox jumps over the lazy dog. What is the capital of Peru? The capital of Peru is Lima. "
    "Janet has 16 eggs a day and sells 9 of them for 2 dollars each. How many dollars does she make every day? "
    "She makes 9 * 2 = 18 dollars every day. The answer is 18. Write a list of three colours: red, green and blue. "
)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MERGES = 60
_UNUSED = 64
"""The model has words for a multiple of so many, as published models have."""


@dataclass(frozen=True)
class Words:
    """A tokenizer's kind and tokens.

    Attributes:
        form: ``bytes`` (byte-level), ``gemma`` (spaces as ▁, none put before a text) or ``llama`` (one put before).
        tokenizer_class: As published.
        special: Tokens that are never split, in order; the first ids are theirs in the SentencePiece forms.
        eos: The tokenizer's end token.
        bos: Its beginning token.
        pad: Its padding token; None where the repository names none.
        unk: Its unknown token.
        adds_bos: Whether encoding a text puts ``bos`` before it.
        settings: More of ``tokenizer_config.json``.
    """

    form: str
    tokenizer_class: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    pad: str | None = None
    unk: str | None = None
    adds_bos: bool = False
    settings: tuple[tuple[str, Any], ...] = ()

    def write(self, folder: Path, template: str) -> dict[str, int]:
        """Write the files; returns ids by token, and ``vocab_size`` of the model."""
        tokenizer = _byte_level() if self.form == "bytes" else _sentencepiece(self.special, self.form)
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in self.special])
        if self.adds_bos and self.bos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{self.bos} $A",
                pair=f"{self.bos} $A {self.bos} $B",
                special_tokens=[(self.bos, tokenizer.token_to_id(self.bos))],
            )
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": self.tokenizer_class,
            "chat_template": template,
            "bos_token": self.bos,
            "eos_token": self.eos,
            "unk_token": self.unk,
            "model_max_length": 131072,
            "clean_up_tokenization_spaces": False,
            **({"pad_token": self.pad} if self.pad else {}),
            **({"add_bos_token": self.adds_bos} if self.form != "bytes" else {}),
            **dict(self.settings),
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        size = tokenizer.get_vocab_size()
        return {**tokenizer.get_vocab(), "vocab_size": (size // _UNUSED + 1) * _UNUSED}


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + _MERGES, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def _sentencepiece(special: tuple[str, ...], form: str) -> Tokenizer:
    """The published layout: special tokens first, then one for each byte, then pieces."""
    pieces, merges = _pieces()
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    unknown = {"unk_token": "<unk>"} if "<unk>" in special else {}
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: index for index, name in enumerate(dict.fromkeys(names))},
            merges=list(merges),
            byte_fallback=True,
            fuse_unk=True,
            **unknown,
        )
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if form == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


@cache
def _pieces() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=50 + _MERGES, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = tuple(
        tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]
    )
    return tuple(sorted(model["vocab"], key=model["vocab"].__getitem__)), merges  # type: ignore[return-value]
