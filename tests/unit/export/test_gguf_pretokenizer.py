"""llama.cpp's pre-tokenizers are recognised by how a tokenizer splits texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace

import gguf
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from gym_fed.export.gguf.probes import COUNT, probes
from gym_fed.export.gguf.vocabulary import PATTERNS, matching, patch_tokenizers
from gym_fed.export.readers.reading import PASSAGE


def made(split: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A tokenizer of the passage and of some probes, with 300 merges and tokens of its own, as a tuned one has them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    trainer = trainers.BpeTrainer(
        vocab_size=556, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([PASSAGE, *probes()[:2000]], trainer)
    tokenizer.add_special_tokens(["<|tuned|>"])
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def splitting(*patterns: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def test_probes_are_the_same_on_every_machine() -> None:
    assert len(probes()) == COUNT
    digest = hashlib.sha256("\0".join(probes()).encode()).hexdigest()
    assert digest.startswith("74bc2159bf2c9c38"), digest


_PUBLISHED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As their repositories write them, not as llama.cpp does.
PUBLISHED: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": lambda: splitting(_PUBLISHED.replace("DIGITS", r"\p{N}")),
    "smaug-bpe": lambda: splitting(_PUBLISHED.replace("DIGITS", r"\p{N}{1,3}")),
}


@pytest.mark.few(2, "one comparison for every name")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tuned_tokenizer_is_recognised_by_how_it_splits(name: str) -> None:
    tokenizer = made(PUBLISHED[name]())
    tokenizer.normalizer = normalizers.NFC()
    assert matching(tokenizer).name == name


def test_a_tokenizer_that_splits_otherwise_is_not_recognised_and_the_text_is_named() -> None:
    found = matching(made(splitting("[aeiou]|[^aeiou]+")))
    assert found.name == ""
    assert found.nearest in PATTERNS
    assert found.text


def test_a_tokenizer_that_lowers_letters_is_not_recognised() -> None:
    tokenizer = made(PUBLISHED["gpt-2"]())
    tokenizer.normalizer = normalizers.Lowercase()
    assert matching(tokenizer).name == ""


@pytest.mark.parametrize(
    ("said", "splits", "written"),
    [("smollm", "gpt-2", "gpt-2"), ("jais-2", "gpt-2", "jais-2")],
)
def test_what_the_converter_knows_by_the_hash_of_one_text_is_compared_where_it_can_be(
    said: str, splits: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Converter:
        _set_vocab_gpt2 = _set_vocab_sentencepiece = get_vocab_base = set_vocab = None

        def get_vocab_base_pre(self, tokenizer: object) -> str:
            return said

    monkeypatch.setattr(gguf.GGUFWriter, "_pack_val", gguf.GGUFWriter._pack_val)
    patch_tokenizers(Converter)
    tokenizer = SimpleNamespace(backend_tokenizer=made(PUBLISHED[splits]()))
    assert Converter().get_vocab_base_pre(tokenizer) == written
