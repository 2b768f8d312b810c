"""Convert the tokenizer and chat template of a GGUF file to ``tokenizer.json`` and its companions.

Byte-level tokenizers split text before applying merges, by a pattern named in ``tokenizer.ggml.pre``. llama.cpp
defines the patterns in ``llama-vocab.cpp``. transformers has some of them and falls back to GPT-2's, which tokenizes
numbers differently. Unknown names are rejected.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from gym_fed.base.imports.gguf.header import Header, invalid
from gym_fed.base.modeling.split_patterns import require_quick_splits
from gym_fed.core.errors import GymError
from gym_fed.core.text import counted, plain

WHOLE = "tokenizer.huggingface.json"
"""Header key with the complete tokenizer.json, which some files have."""
_PREFIX = "tokenizer.ggml."
_FILLER = re.compile(r"\[PAD-?\d+\]")
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_SPECIAL = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}
_ALWAYS = "ĠĊ" + "".join(map(chr, range(33, 127)))
"""Tokens of every byte-level vocabulary: space, newline, and ASCII. Some lack bytes that never occur in UTF-8."""
_MAX_TEMPLATE = 1 << 20


def write_tokenizer(header: Header, folder: Path, max_length: int) -> None:
    """Write the tokenizer of ``header`` and its chat templates.

    Raises:
        GymError: ``MODEL_INVALID`` for an unsupported tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = header.values.get(f"{_PREFIX}tokens")
    if not isinstance(tokens, list) or not tokens:
        raise invalid(header.file, "has no tokenizer")
    special = {f"{name}_token": _token(header, tokens, key) for name, key in _SPECIAL.items()}
    backend = _backend(header, tokens)
    _add_special(header, backend, special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )
    if (template := _template(header)) is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))


def end_tokens(header: Header) -> list[int]:
    """Return the ids of tokens that end a text, a turn or a message."""
    named = [header.values.get(f"{_PREFIX}{key}_token_id") for key in ("eos", "eot", "eom")]
    count = len(header.values.get(f"{_PREFIX}tokens") or [])
    return list(dict.fromkeys(token for token in named if isinstance(token, int) and 0 <= token < count))


def _backend(header: Header, tokens: list[str]) -> Any:
    """Build a ``tokenizers.Tokenizer``."""
    from tokenizers import Tokenizer

    try:
        if isinstance(whole := header.values.get(WHOLE), str):
            require_quick_splits(whole, str(header.file))
            return Tokenizer.from_str(whole)
        return _from_vocabulary(header, tokens)
    except GymError:
        raise
    except Exception as error:  # tokenizers raises plain Exception; panics are handled by the caller
        why = plain(str(error), 200) or type(error).__name__
        raise invalid(header.file, f"its tokenizer cannot be read: {why}") from error


def _from_vocabulary(header: Header, tokens: list[str]) -> Any:
    """Build the tokenizer from the vocabulary: byte-level BPE, or SentencePiece pieces."""
    kinds = header.values.get(f"{_PREFIX}token_type")
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        raise invalid(header.file, f"does not give a type for each of its {counted(len(tokens), 'token')}")
    last = len(tokens)
    while last and kinds[last - 1] == _UNUSED and _FILLER.fullmatch(tokens[last - 1]):
        last -= 1  # embedding rows without a token
    model = header.values.get(f"{_PREFIX}model")
    if model == "gpt2":
        return _byte_level(header, tokens[:last], kinds)
    if model in ("llama", "gemma4"):
        return _pieces(header, tokens[:last])
    raise invalid(header.file, f"its tokenizer model {plain(str(model), 40)!r} is not supported")


def _byte_level(header: Header, tokens: list[str], kinds: np.ndarray) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    merges = header.values.get(f"{_PREFIX}merges")
    pairs = [tuple(merge.split(" ", 1)) for merge in (merges if isinstance(merges, list) else [])]
    pre = str(header.values.get(f"{_PREFIX}pre", ""))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise invalid(header.file, "has the same token twice")
    if not vocabulary.keys() >= set(_ALWAYS):
        raise invalid(
            header.file,
            "its tokenizer is declared byte-level, but lacks a token for a space or a letter",
            "use the model folder that it was converted from",
        )
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in WHOLE_WORDS))
    backend.decoder = decoders.ByteLevel()
    if not set_pre_tokenizer(backend, pre, needed=bool(pairs)):
        raise invalid(
            header.file,
            f"its pre-tokenizer {plain(pre, 60)!r} is not supported",
            "use the model folder that it was converted from",
        )
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, own in zip(tokens, kinds, strict=False) if own == kind]
        backend.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])
    return backend


def _pieces(header: Header, tokens: list[str]) -> Any:
    """Convert SentencePiece pieces with transformers, which recovers the merges from the scores."""
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    values = {
        own: _plain_list(header.values[f"tokenizer.{key}"])
        for key, own in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{key}" in header.values
    }
    backend, _ = convert_gguf_tokenizer(
        str(header.values["general.architecture"]), {**values, "tokens": tokens}
    )
    if not str(header.values["general.architecture"]).startswith("gemma"):
        _set_spaces(backend, add_prefix=values.get("add_prefix_space") is not False)
    return backend


def _set_spaces(backend: Any, *, add_prefix: bool) -> None:
    """Treat spaces like SentencePiece: they belong to pieces, and texts get a leading space."""
    from tokenizers import decoders, normalizers

    backend.pre_tokenizer = None
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if add_prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if add_prefix else [])])


def _add_special(header: Header, backend: Any, special: dict[str, str | None]) -> None:
    """Add BOS and EOS tokens around a text, if the file requires it."""
    from tokenizers.processors import TemplateProcessing

    if isinstance(header.values.get(WHOLE), str):
        return
    is_llama = header.values.get(f"{_PREFIX}model") == "llama"
    first = special["bos_token"] if header.values.get(f"{_PREFIX}add_bos_token", is_llama) else None
    last = special["eos_token"] if header.values.get(f"{_PREFIX}add_eos_token", False) else None
    around = [*([first] if first else []), "$A", *([last] if last else [])]
    second = [part.replace("$A", "$B:1") for part in around]
    used = {token: backend.token_to_id(token) for token in (first, last) if token}
    if used:
        backend.post_processor = TemplateProcessing(
            single=" ".join(around), pair=" ".join([*around, *second]), special_tokens=list(used.items())
        )


def _template(header: Header) -> str | dict[str, str] | None:
    """Return the chat template, or a dict of several by name."""
    default = header.values.get("tokenizer.chat_template")
    named = header.values.get("tokenizer.chat_templates")
    templates = {
        name: header.values.get(f"tokenizer.chat_template.{name}")
        for name in (named if isinstance(named, list) else [])
    }
    templates = {"default": default, **templates}
    texts = {name: text for name, text in templates.items() if isinstance(text, str)}
    if any(len(text) > _MAX_TEMPLATE for text in texts.values()):
        raise invalid(header.file, f"has a chat template of more than {_MAX_TEMPLATE} characters")
    return texts.get("default") if set(texts) <= {"default"} else texts


def _token(header: Header, tokens: list[str], key: str) -> str | None:
    number = header.values.get(f"{_PREFIX}{key}")
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(tokens):
        raise invalid(
            header.file,
            f"{_PREFIX}{key} is {plain(str(number), 40)}, but there are {counted(len(tokens), 'token')}",
        )
    return tokens[number]


def _plain_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


GPT2 = ("gpt-2", "phi-2", "gigachat", "mellum", "olmo", "mpt", "jais")
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Pre-tokenizers that split every digit, then split like GPT-2."""
WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken",
)  # fmt: skip
"""Pre-tokenizers that keep a piece of text whole if it is a token, regardless of the merges."""
NORMALISED = ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "qwen35")
"""Pre-tokenizers that normalise text to NFC first, like the published tokenizers and unlike llama.cpp."""


def set_pre_tokenizer(backend: Any, pre: str, *, needed: bool) -> bool:
    """Set the pre-tokenizer named ``pre``.

    Args:
        backend: Tokenizer to change.
        pre: Name of the pre-tokenizer.
        needed: True if there are merges; without merges every byte is a token, however the text is split.
    """
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if pre in NORMALISED:
        backend.normalizer = normalizers.NFC()
    split = GGUF_PRE_TOKENIZER_SPLITS.get(pre)
    splits: list[Any] = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    if pre in DIGITS:
        splits = [pre_tokenizers.Digits(individual_digits=True)]
    like_gpt2 = pre in DIGITS or pre in GPT2
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=like_gpt2)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, last]) if splits else last
    return bool(splits) or like_gpt2 or not needed
