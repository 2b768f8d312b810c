"""Tokenise plain text with exactly one BOS and one EOS token, even if the text contains them already.

A post-processor puts BOS before every text (Llama, Gemma, Mistral). Text that was templated beforehand begins with the
same token, and a model that reads it twice is prompted with something it never saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def text_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise texts with the tokenizer's special tokens, and at most one BOS.

    Args:
        tokenizer: A tokenizer of transformers.
        texts: Texts that no chat template has written now; they may have been templated beforehand.
    """
    if not texts:
        return []
    return [without_second_bos(tokenizer, ids) for ids in tokenizer(list(texts))["input_ids"]]


def without_second_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    """Drop leading BOS tokens that are followed by another one."""
    bos = getattr(tokenizer, "bos_token_id", None)
    repeated = 0
    while bos is not None and ids[repeated : repeated + 2] == [bos, bos]:
        repeated += 1
    return ids[repeated:]


def ended(tokenizer: Any, ids: list[int], text: str) -> list[int]:
    """Append the EOS token, unless the text ends with it."""
    end = tokenizer.eos_token_id
    if end is None or ids[-1:] == [end] or text.rstrip().endswith(tokenizer.eos_token):
        return ids
    return [*ids, end]
