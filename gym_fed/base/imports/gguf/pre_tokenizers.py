"""How a byte-level tokenizer cuts text before its merges, by the name in ``tokenizer.ggml.pre``.

llama.cpp has the expressions in ``llama-vocab.cpp``; transformers' reader has some of them, and leaves others at
GPT-2's, which changes every number in a text. A name that neither knows is refused.
"""

from __future__ import annotations

from typing import Any

GPT2 = ("gpt-2", "phi-2", "gigachat", "mellum", "olmo", "mpt", "jais")
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Each digit alone, then as GPT-2."""
WHOLE_WORDS = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "tekken",
)
"""A part of the text that is a token is that token, whatever the merges are."""
NORMALISED = ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "qwen35")
"""Composed first (NFC), as their published tokenizers do and llama.cpp does not."""


def set_pre_tokenizer(backend: Any, pre: str, *, needed: bool) -> bool:
    """Set the cutting of a ``tokenizers.Tokenizer``; False for a name that is not known.

    Args:
        backend: Changed.
        pre: The name.
        needed: Whether there are merges; without them every byte is a token, however the text is cut.
    """
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if pre in NORMALISED:
        backend.normalizer = normalizers.NFC()
    split = GGUF_PRE_TOKENIZER_SPLITS.get(pre)
    cut: list[Any] = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    if pre in DIGITS:
        cut = [pre_tokenizers.Digits(individual_digits=True)]
    by_gpt2 = pre in DIGITS or pre in GPT2
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_gpt2)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cut, last]) if cut else last
    return bool(cut) or by_gpt2 or not needed
