"""Texts and tokens on which exports are compared, and exports that could not be judged."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.checking import compared
from gym_fed.export.formats.base import Options, Tolerance
from gym_fed.export.formats.torchscript import TorchScript
from gym_fed.export.probe_texts import LANGUAGES, probe_texts, vocabulary_ids
from gym_fed.export.process import Processes
from gym_fed.export.readers.reading import RUN_FAILED
from gym_fed.export.run import export, unchecked_path
from gym_fed.export.source import Source, open_source

ADDED = ["§5A", "Ünïcode tok", "<|sp|>"]


@pytest.fixture(scope="module")
def nano() -> Source:
    return open_source("gym-nano")


def _with_added_tokens(nano: Source) -> Any:
    tokenizer = deepcopy(nano.tokenizer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return tokenizer


def test_every_added_token_and_every_language_is_in_the_texts(nano: Source) -> None:
    tokenizer = _with_added_tokens(nano)
    texts = probe_texts(tokenizer)
    assert set(ADDED) <= set(texts)
    assert set(LANGUAGES) <= set(texts)
    ids = {number for text in texts for number in tokenizer(text)["input_ids"]}
    assert set(tokenizer.added_tokens_decoder) <= ids


def test_logits_are_compared_for_added_tokens_and_for_all_of_the_vocabulary(nano: Source) -> None:
    tokenizer = _with_added_tokens(nano)
    ids = vocabulary_ids(tokenizer, 100)
    assert len(ids) == len(set(ids)) == 100
    assert set(tokenizer.added_tokens_decoder) <= set(ids)
    assert max(ids) - min(ids) > 200
    assert not set(tokenizer.added_tokens_decoder) & set(vocabulary_ids(tokenizer, 100, added=False))


def _answers(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    same = {
        "ids.0": torch.tensor([1, 2]),
        "ids.texts": torch.tensor([1, 2, -1, 3, -1, 4, 5, -1]),
        "logits.0": torch.randn(2, 5),
        "logits.vocabulary": torch.randn(4, 5),
        "greedy": torch.tensor([1]),
    }
    return {**same, **changes}


def test_the_first_text_with_other_ids_is_named() -> None:
    figures = compared(_answers(), _answers(**{"ids.texts": torch.tensor([1, 2, -1, 9, -1, 4, 5, -1])}))
    assert figures == {"same_token_ids": False, "other_text": 2}
    assert "'§5A'" in str(Tolerance().problem({"same_token_ids": False, "text": "§5A"}))


@pytest.mark.parametrize(("value", "says"), [(9.0, "whole vocabulary"), (float("nan"), "NaN logits")])
def test_a_wrong_row_of_a_token_that_no_text_has_is_refused(value: float, says: str) -> None:
    other = _answers()
    other["logits.vocabulary"][2] = value
    figures = compared(_answers(), other)
    assert figures["max"] == 0
    assert says in str(Tolerance().problem(figures))


@pytest.mark.parametrize("failure", ["status", "memory"])
def test_an_export_whose_reader_fails_is_kept_as_unchecked(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any) -> tuple[int, list[str]]:
        if failure == "memory":
            raise GymError(ErrorCode.BUSY, "the process of reading was killed", "")
        return 1, ["ValueError: a kind of model that this reader lacks"]

    monkeypatch.setattr(Processes, "start", lambda *_args, **_named: None)
    monkeypatch.setattr(Processes, "run", run)
    with pytest.raises(GymError) as raised:
        export(open_source("gym-nano"), "huggingface", tmp_path / "model", Options())
    assert raised.value.code is ErrorCode.EXPORT_UNCHECKED
    kept = tmp_path / "model.unchecked"
    assert str(kept) in raised.value.message
    assert [entry.name for entry in tmp_path.iterdir()] == [kept.name]
    record = json.loads((kept / "export.json").read_text())
    assert record["check"] is None
    assert record["unchecked"] in raised.value.message
    assert (kept / "model.safetensors").is_file()


def test_a_name_for_an_unchecked_export_is_always_a_new_one(tmp_path: Path) -> None:
    assert unchecked_path(tmp_path / "a.gguf", is_file=True).name == "a.unchecked.gguf"
    (tmp_path / "a.unchecked.gguf").touch()
    assert unchecked_path(tmp_path / "a.gguf", is_file=True).name == "a.unchecked-2.gguf"
    assert unchecked_path(tmp_path / "v1.5", is_file=False).name == "v1.5.unchecked"


def test_a_program_that_runs_for_one_shape_only_is_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processes, "start", lambda *_args, **_named: None)
    monkeypatch.setattr(Processes, "run", lambda *_: (RUN_FAILED, ["RuntimeError: a size of 7 is fixed"]))
    monkeypatch.setattr(TorchScript, "write_program", lambda _self, _model, file, _options: file.touch())
    monkeypatch.setattr(TorchScript, "weights", lambda *_: None)
    with pytest.raises(GymError, match=r"length differs from .* a size of 7 is fixed") as raised:
        export(open_source("gym-nano"), "torchscript", tmp_path / "program", Options())
    assert raised.value.code is ErrorCode.EXPORT_DIFFERS
    assert "huggingface or gguf" in str(raised.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_a_forward_that_no_tracer_records_is_refused_by_the_models_name_with_other_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a tensor of another device\nand more")

    monkeypatch.setattr(Processes, "start", lambda *_args, **_named: None)
    monkeypatch.setattr(TorchScript, "write_program", fail)
    with pytest.raises(GymError, match="gym-nano cannot be recorded as a program: RuntimeError") as raised:
        export(open_source("gym-nano"), "torchscript", tmp_path / "program", Options(), check=False)
    assert raised.value.code is ErrorCode.USAGE
    assert "huggingface or gguf or torch_export or onnx" in str(raised.value.hint)
    assert list(tmp_path.iterdir()) == []
