"""The vocabulary in a GGUF file beside the tokenizer: a planted difference of any token is refused by its number."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from gym_fed.base.imports.gguf.header import read_header
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.gguf.stored import compare_vocabulary, stripping_tokens
from tests.support.gguf_files import write_gguf
from tests.support.siblings import make_sibling

TOKENS, KINDS, MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with the token ``§5A``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_sibling("llama3", tmp_path_factory.mktemp("llama") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("§5A", normalized=False)])
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def values(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = write_gguf(folder, tmp_path_factory.mktemp("whole") / "model.gguf")
    return read_header(file).values


def test_a_file_of_the_tokenizer_passes_and_says_what_was_compared(
    folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    result = compare_vocabulary(write_gguf(folder, tmp_path / "model.gguf"), tokenizer)
    assert result["compared"] == len(tokenizer)
    assert result["added"] == len(tokenizer.added_tokens_decoder)
    assert result["merges"] > 0


@pytest.mark.parametrize("change", ["text", "kind", "ordinary", "more", "merges", "fewer"])
def test_a_difference_is_refused_with_the_token(
    change: str, folder: Path, tokenizer: Any, values: dict[str, Any], tmp_path: Path
) -> None:
    number = tokenizer.convert_tokens_to_ids("§5A")
    tokens, kinds, merges = list(values[TOKENS]), [int(kind) for kind in values[KINDS]], list(values[MERGES])
    says = f"token {number}"
    if change == "text":
        tokens[number] = "\ufffd5A"
    elif change == "kind":
        kinds[number] = 1
    elif change == "ordinary":
        tokens[40], says = "other", "token 40"
    elif change == "more":
        tokens, kinds, says = [*tokens, "one more"], [*kinds, 1], f"token {len(tokens)}"
    elif change == "merges":
        merges[3], says = "a b", "merge 3"
    else:
        tokens, kinds, says = tokens[:number], kinds[:number], "it has"
    file = write_gguf(folder, tmp_path / "model.gguf", keys={TOKENS: tokens, KINDS: kinds, MERGES: merges})
    with pytest.raises(GymError, match=says) as raised:
        compare_vocabulary(file, tokenizer)
    assert raised.value.code is ErrorCode.EXPORT_DIFFERS


def test_tokens_that_take_white_space_are_listed_since_gguf_does_not_record_it(tokenizer: Any) -> None:
    assert stripping_tokens(tokenizer) == []
    other = deepcopy(tokenizer)
    other.add_tokens([AddedToken("<mask>", lstrip=True), AddedToken("word", single_word=True)])
    assert stripping_tokens(other) == ["<mask>", "word"]
