"""GGUF of a tuned Llama: reading back, metadata, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.formats import gguf as format_module
from gym_fed.export.formats.base import Options
from gym_fed.export.gguf.convert import known_architectures
from gym_fed.export.gguf.write import LICENSE_TEXT, metadata_of, require_metadata
from gym_fed.export.readers.gguf import GGUF_LIBRARIES
from gym_fed.export.run import export
from gym_fed.export.source import Source, open_source
from tests.support.siblings import make_sibling

pytestmark = pytest.mark.shared
TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"
    "{% generation %}<|end|>{% endgeneration %}"
)


@pytest.fixture(scope="module")
def tuned(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """stories260K with a card, a licence, a chat template and two tokens more."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("tuned") / "stories"
    stories = shared_folder / "models/stories260K"
    model: Any = AutoModelForCausalLM.from_pretrained(stories)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|end|>"]})
    tokenizer.chat_template = TEMPLATE
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = [2, tokenizer.convert_tokens_to_ids("<|end|>")]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n# Stories\n")
    (folder / "LICENSE").write_text("Permission is hereby granted.")
    source = open_source(str(folder))
    source.base = "karpathy/stories260K"
    return source


@pytest.fixture(scope="module")
def exported(tuned: Source, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Its f32 file, and what the check of it has found."""
    file = tmp_path_factory.mktemp("gguf") / "stories.gguf"
    return file, export(tuned, "gguf", file, Options(quantization="f32"))


def test_a_tuned_llama_is_read_back_with_the_same_logits_ids_and_answer(
    exported: tuple[Path, dict[str, Any]],
) -> None:
    _, record = exported
    back = record["check"]["read_back"]
    assert back["max"] < 1e-4
    assert back["same_token_ids"]
    assert back["same_passage_ids"]
    assert back["same_greedy_tokens"]
    assert record["unchecked"] is False
    assert ("llama-cpp-python" in record["check"]["read_by"]) is format_module._LLAMA_CPP


def test_the_file_says_the_sources_tokens_template_licence_and_base(
    exported: tuple[Path, dict[str, Any]], tuned: Source
) -> None:
    fields = gguf.GGUFReader(exported[0]).fields
    said = {key: fields[key].contents() for key in fields if not key.startswith("tokenizer.ggml.tokens")}
    assert said["general.license"] == "mit"
    assert said[LICENSE_TEXT] == "Permission is hereby granted."
    assert said["general.base_model.0.name"] == "stories260K"
    assert said["tokenizer.chat_template"] == TEMPLATE.replace(
        "{% generation %}", "{% if true %}{% endif %}"
    ).replace("{% endgeneration %}", "{% if true %}{% endif %}")
    assert said["tokenizer.ggml.bos_token_id"] == 1
    assert said["tokenizer.ggml.eos_token_id"] == 2
    assert said["tokenizer.ggml.eot_token_id"] == 513
    assert said["tokenizer.ggml.add_bos_token"] is True
    assert said["tokenizer.ggml.add_eos_token"] is False
    scores = said["tokenizer.ggml.scores"]
    assert len(set(scores)) > 100, "llama.cpp joins pieces by their scores"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.chat_template", "another"),
        ("tokenizer.ggml.add_bos_token", False),
        ("general.license", "apache-2.0"),
        ("general.base_model.1.name", "none"),
    ],
)
def test_a_file_that_says_something_else_is_refused_by_the_key(
    exported: tuple[Path, dict[str, Any]], tuned: Source, key: str, value: Any
) -> None:
    wanted = metadata_of(tuned, int(gguf.LlamaFileType.ALL_F32))
    require_metadata(exported[0], wanted)
    with pytest.raises(GymError, match=key) as raised:
        require_metadata(exported[0], {**wanted, key: value})
    assert raised.value.code is ErrorCode.EXPORT_DIFFERS


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"vision_config": {}}, "mmproj"),
        ({"model_type": "gym_mixture_of_depths"}, "mixture of depths"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "reward model"),
        ({"architectures": ["NobodysForCausalLM"]}, "does not know NobodysForCausalLM"),
        (
            {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
            "full attention in one layer of every 6",
        ),
        (
            {"model_type": "mistral", "sliding_window": 8, "max_position_embeddings": 64},
            "no sliding window for mistral, whose window is 8 tokens",
        ),
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, "normalises the weights of chosen experts"),
    ],
)
def test_what_llama_cpp_cannot_hold_is_refused_by_name(config: dict[str, Any], says: str) -> None:
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **config}
    source = Source("MODEL", SimpleNamespace(config=SimpleNamespace(**values)), None, None)
    with pytest.raises(GymError, match=says) as raised:
        format_module.Gguf().check(source)
    assert raised.value.code is ErrorCode.USAGE
    assert "LlamaForCausalLM" in known_architectures()


def test_rows_that_the_converter_drops_are_refused_by_their_number() -> None:
    values = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "vocab_size": 320}
    model = SimpleNamespace(config=SimpleNamespace(**values))
    with pytest.raises(GymError, match=r"320 rows, of which .* keeps 262"):
        format_module.Gguf().check(Source("MODEL", model, range(262), None))


def test_a_tuned_prompt_is_refused_by_name() -> None:
    model = SimpleNamespace(
        config=SimpleNamespace(model_type="llama", architectures=["LlamaForCausalLM"]),
        peft_config={"default": SimpleNamespace(is_prompt_learning=True)},
    )
    with pytest.raises(GymError, match="is not part of the weights"):
        format_module.Gguf().check(Source("MODEL", model, None, None))


@pytest.mark.slow  # the converter's process imports torch and transformers: 10 s on one core
def test_gym_nano_with_heads_of_32_and_newlines_in_special_tokens_is_read_back_without_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format_module, "_LLAMA_CPP", False)
    monkeypatch.setattr(format_module.Gguf, "reader_libraries", GGUF_LIBRARIES)
    export(open_source("gym-nano"), "gguf", tmp_path / "model.gguf", Options())
    assert (tmp_path / "model.gguf").is_file()


@pytest.mark.slow  # the converter's process imports torch and transformers: 10 s on one core
def test_an_unknown_tokenizer_is_refused_with_the_text_that_it_splits_otherwise(tmp_path: Path) -> None:
    folder = make_sibling("smollm2", tmp_path / "model")
    values = json.loads((folder / "tokenizer.json").read_text())
    values["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "[aeiou]|[^aeiou]+"}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # which takes the file as it is
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    expected = r"no pre-tokenizer of llama\.cpp splits .* like its tokenizer; the closest is"
    with pytest.raises(GymError, match=expected) as raised:
        export(open_source(str(folder)), "gguf", tmp_path / "model.gguf", Options(), check=False)
    assert raised.value.code is ErrorCode.USAGE
    shutil.rmtree(folder)
    assert list(tmp_path.iterdir()) == []
