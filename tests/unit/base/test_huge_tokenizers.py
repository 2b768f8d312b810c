"""Numbers in an untrusted tokenizer's files that would take memory: token ids, and lengths to pad to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.modeling.split_patterns import MAX_TOKEN_ID, require_quick_tokenizer
from gym_fed.base.models import load_tokenizer, nano_path
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.detokenizing import TextDecoder
from gym_fed.serving.plain_tokenizer import plain_tokenizer

HUGE = 4_000_000_000


def changed(folder: Path, **changes: Any) -> Path:
    """gym-nano with other values in ``tokenizer.json``."""
    shutil.copytree(nano_path(), folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def huge(folder: Path, where: str, number: int) -> Path:
    """gym-nano with one more token, whose id is ``number``."""
    state = json.loads((nano_path() / "tokenizer.json").read_text())
    if where == "added":
        state["added_tokens"].append(state["added_tokens"][-1] | {"id": number, "content": "<more>"})
    else:
        state["model"]["vocab"]["<more>"] = number
    return changed(folder, model=state["model"], added_tokens=state["added_tokens"])


@pytest.mark.parametrize("where", ["added", "vocabulary"])
@pytest.mark.parametrize("number", [MAX_TOKEN_ID + 1, HUGE])
def test_a_huge_token_id_is_refused_by_every_reader_of_tokenizers(
    tmp_path: Path, where: str, number: int
) -> None:
    folder = huge(tmp_path / "huge", where, number)
    for read in (lambda: load_tokenizer(str(folder)), lambda: plain_tokenizer(folder, "Qwen3ForCausalLM")):
        with pytest.raises(GymError, match=f"tokenizer.json has the token id {number}, but") as raised:
            read()
        assert raised.value.code is ErrorCode.MODEL_INVALID


def test_a_huge_id_in_a_vocabulary_file_is_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path / "old")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": HUGE}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(GymError, match=f"vocab.json has the token id {HUGE}"):
        require_quick_tokenizer(folder, "old")


def test_the_largest_id_and_large_numbers_elsewhere_are_accepted(tmp_path: Path) -> None:
    require_quick_tokenizer(huge(tmp_path / "largest", "vocabulary", MAX_TOKEN_ID), "largest")
    length = {"direction": "Right", "max_length": HUGE, "strategy": "LongestFirst", "stride": 0}
    require_quick_tokenizer(changed(tmp_path / "length", truncation=length), "length")


def test_a_length_to_pad_to_or_to_cut_at_has_no_effect_on_any_encoding(tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": 3000}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    padding |= {"pad_type_id": 0, "pad_token": "<pad>"}
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    expected = load_tokenizer(str(nano_path())).backend_tokenizer.encode("many words").ids
    for name, part in (("padded", {"padding": padding}), ("cut", {"truncation": cut})):
        tokenizer = load_tokenizer(str(changed(tmp_path / name, **part)))
        assert tokenizer.backend_tokenizer.encode("many words").ids == expected
        tokenizer.save_pretrained(tmp_path / f"{name} copy")
        saved = json.loads((tmp_path / f"{name} copy" / "tokenizer.json").read_text())
        assert (saved["padding"], saved["truncation"]) == (None, None)
        tokenizer.backend_tokenizer.enable_padding(length=3000)  # as another thread may do
        assert TextDecoder(tokenizer).backend.encode("many words").ids == expected
