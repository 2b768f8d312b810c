"""Resolution of the export format: names of other platforms, suffixes, and formats of other packages."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig

from gym_fed.core import aliases as other_words
from gym_fed.core.aliases import OtherWordNote
from gym_fed.core.errors import GymError
from gym_fed.export.checking import _readers
from gym_fed.export.choice import format_by_suffix, formats, resolve_format
from gym_fed.export.formats.adapter import PeftAdapter
from gym_fed.export.formats.base import ExportFormat, Options
from gym_fed.export.formats.gguf import Gguf
from gym_fed.export.source import Source
from tests.support.installed import install

HERE = "tests.unit.export.test_export_choice"


class Another(Gguf):
    """A format of another package that is called before ours."""

    name = "a_gguf"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_words, "_said", set())


def test_a_suffix_means_our_format_whatever_other_packages_have(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"a_gguf": f"{HERE}:Another", "broken": "not_there:Thing"}
    install(monkeypatch, {"gym_fed.export_formats": points})
    assert format_by_suffix(Path("model.gguf")) == "gguf"
    found = {row["format"]: row["writes"] for row in formats()}
    assert found["broken"].startswith("cannot be used: export format 'broken' of gym-more 1.2")
    assert found["a_gguf"]


@pytest.mark.parametrize(
    ("format", "theirs", "ours"),
    [
        ("gguf", "fast_quantized", "q8_0"),
        ("gguf", "quantized", "q4_k_m"),
        ("gptq", "w8a16", "w8"),
        ("onnx", "qint8", "int8"),
        ("auto_gptq", "8bit", "w8"),
    ],
)
def test_quantizations_of_other_platforms_are_ours_with_a_note(format: str, theirs: str, ours: str) -> None:
    with pytest.warns(OtherWordNote, match=theirs):
        chosen, options = resolve_format(format, None, Options(quantization=theirs))
    assert isinstance(chosen, ExportFormat)
    assert options.quantization == ours


def test_a_quantization_of_another_format_is_refused_with_that_format() -> None:
    with pytest.raises(GymError, match="no quantization q4_k_m, which is for gguf") as error:
        resolve_format(None, Path("out"), Options(quantization="q4_k_m"))
    assert error.value.hint == "--format gguf --quantization q4_k_m"


@pytest.mark.parametrize(("name", "says"), [("merged_16bit", "--dtype float16"), ("merged_4bit", "q4_k_m")])
def test_formats_that_say_more_than_ours_are_refused_with_the_lines_to_write(name: str, says: str) -> None:
    with pytest.raises(GymError, match=name) as error:
        resolve_format(name, None, Options())
    assert says in str(error.value.hint)


def test_a_reader_that_is_called_otherwise_than_its_package_is_named_alone() -> None:
    assert re.fullmatch(r"transformers [\d.]+\S*, yaml", _readers("yaml")), "the module of PyYAML"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, None),
        ({"use_dora": True, "modules_to_save": ["lm_head"]}, "DoRA, modules_to_save"),
        ({"bias": "lora_only"}, "bias: lora_only"),
    ],
)
def test_an_adapter_that_vllm_refuses_is_exported_with_a_note(
    options: dict[str, Any], says: str | None
) -> None:
    model = SimpleNamespace(active_peft_config=LoraConfig(r=2, **options))
    source = Source("tuned", model, None, "base")
    found = PeftAdapter().facts(source, Options()).get("notes", [])
    assert [says in note for note in found if says] == ([True] if says else [])
    assert len(found) == (says is not None)
