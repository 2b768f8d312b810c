"""Model classes of transformers with tiny random models: what docs/support.md says of them is what happens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tools.architectures.classes import architectures
from tools.architectures.steps import COLUMNS, Checks
from tools.architectures.table import kind_of, page_kinds

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
QUICK_COLUMNS = ("load", "lora", "eval", "api")


@pytest.mark.parametrize("name", USUAL)
def test_a_class_loads_trains_and_is_served_as_the_page_says(name: str, tmp_path: Path) -> None:
    require_same(name, tmp_path, QUICK_COLUMNS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_every_column_of_a_class_is_as_the_page_says(name: str, tmp_path: Path) -> None:
    require_same(name, tmp_path, tuple(column for column in COLUMNS if column != "gguf"))


def require_same(name: str, folder: Path, columns: tuple[str, ...]) -> None:
    from tools.architectures.folders import NotTriedError

    if CLASSES[name].reads != "text" and importlib.util.find_spec("torchvision") is not None:
        pytest.skip("the page was made without torchvision, which more image processors need")
    said = page_kinds(name)
    try:
        checks = Checks(CLASSES[name], folder)
    except NotTriedError:
        assert {said[column] for column in columns} == {"not tried"}
        return
    results = {column: checks.run(column) for column in columns}
    assert {column: kind_of(text) for column, text in results.items()} == {c: said[c] for c in columns}, (
        results
    )
