"""Model classes of transformers with tiny random models: what docs/support.md says of them is what happens.

A fault on the page is an expected failure. Once it is fixed, the test fails until the page is generated again.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import pytest
import torch

from gym_fed.core.errors import GymError
from tests.support.tiny_models import tiny_model
from tools.architectures.__main__ import is_chosen
from tools.architectures.classes import architectures
from tools.architectures.steps import COLUMNS, Checks, require_close, require_unchanged
from tools.architectures.table import (
    BEGIN,
    END,
    PAGE,
    drop_torn_line,
    kind_of,
    page_cells,
    page_kinds,
    results_of,
    table,
)

CLASSES = {each.name: each for each in architectures()}
USUAL = (
    *("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel", "BloomForCausalLM"),
    *("MptForCausalLM", "GPTJForCausalLM", "FalconH1ForCausalLM", "Mamba2ForCausalLM", "RwkvForCausalLM"),
    *(
        "JambaForCausalLM",
        "Qwen3NextForCausalLM",
        "MixtralForCausalLM",
        "GptOssForCausalLM",
        "PhimoeForCausalLM",
    ),
    *("DeepseekV3ForCausalLM", "Llama4ForCausalLM", "BartForCausalLM", "LlavaForConditionalGeneration"),
    "Qwen2VLForConditionalGeneration",
)
"""One of each kind: dense, windows, other positions, state spaces, hybrids, experts, latent attention, images."""
MISSING = [name for name in ("torchvision", "num2words") if importlib.util.find_spec(name) is None]
"""Packages that the page was made with, and that this environment lacks."""
QUICK_COLUMNS = ("load", "lora", "eval", "api")


@pytest.mark.few(4, "one path for every class")
@pytest.mark.parametrize("name", USUAL)
def test_a_class_loads_trains_and_is_served_as_the_page_says(name: str, tmp_path: Path) -> None:
    said = page_kinds(name)
    assert [said[column] for column in ("load", "lora", "eval")] == ["works"] * 3
    assert said["api"] in ("works", "refused")
    require_same(name, tmp_path, QUICK_COLUMNS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_every_column_of_a_class_is_as_the_page_says(name: str, tmp_path: Path) -> None:
    require_same(name, tmp_path, tuple(column for column in COLUMNS if column != "gguf"))


def require_same(name: str, folder: Path, columns: tuple[str, ...]) -> None:
    from tools.architectures.folders import NotTriedError

    said = page_kinds(name)
    try:
        checks = Checks(CLASSES[name], folder)
    except (GymError, NotTriedError) as error:
        refused = "refused" if isinstance(error, GymError) else "not tried"
        assert {said[column] for column in columns} == {refused}
        return
    if MISSING and checks.no_processor and said["lora"] != "not tried":
        pytest.skip(f"the page was made with {', '.join(MISSING)}: {checks.no_processor}")
    results = {column: checks.run(column) for column in columns}
    assert {column: kind_of(text) for column, text in results.items()} == {c: said[c] for c in columns}, (
        results
    )
    if faults := [column for column in columns if said[column] == "fault"]:
        pytest.xfail(f"faults that docs/support.md has: {', '.join(faults)}")


def test_a_class_with_results_of_some_columns_is_checked_again_for_the_others() -> None:
    llama, load_only = CLASSES["LlamaForCausalLM"], {"LlamaForCausalLM": {"load": "works"}}
    options = argparse.Namespace(only=[], faults=False, columns=None)
    assert is_chosen(llama, options, {})
    assert is_chosen(llama, options, load_only)
    assert not is_chosen(llama, options, {llama.name: dict.fromkeys(COLUMNS, "works")})
    options.columns = ["load"]
    assert not is_chosen(llama, options, load_only)


def test_a_line_of_results_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"class": "A", "cells": {"load": "works"}}\n{"class": "B", "cel', encoding="utf-8")
    drop_torn_line(path)
    drop_torn_line(path)
    assert results_of(path) == {"A": {"load": "works"}}


def test_a_result_of_an_unknown_kind_is_an_error() -> None:
    assert [kind_of(text) for text in ("works (gpt)", "FAULT (x)", "")] == ["works", "fault", "not tried"]
    with pytest.raises(ValueError, match="'wroks' begins with none of works"):
        kind_of("wroks")


def test_reasons_that_differ_in_the_model_type_share_a_number() -> None:
    refused = "refused (model-invalid: base: transformers has no text language model of type {})"
    classes = [each for each in architectures() if each.reads == "text"][:2]
    results = {each.name: {"load": refused.format(each.model_types[0])} for each in classes}
    assert table(results, classes).count("no text language model") == 1


def test_results_on_the_page_can_be_written_again() -> None:
    text = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert table(page_cells(text), architectures()).strip() == text.strip()


def test_a_weight_of_the_base_that_training_changed_is_a_fault() -> None:
    base, trained = tiny_model("llama"), tiny_model("llama")
    require_unchanged(trained, base)
    with torch.no_grad():
        trained.model.norm.weight[0] += 1e-6
    with pytest.raises(AssertionError, match=r"changed model\.norm\.weight and 0 more"):
        require_unchanged(trained, base)


def test_logits_that_differ_by_a_part_of_the_change_that_training_made_are_a_fault() -> None:
    before, wanted = torch.full((4,), 10.0), torch.full((4,), 10.001)
    require_close(before, wanted, "logits")
    with pytest.raises(AssertionError, match="logits differ by 1"):
        require_close(before, wanted, "logits", before=before)
    require_close(torch.full((4,), 10.00095), wanted, "logits", before=before)
