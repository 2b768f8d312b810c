"""The model card of an export: licence, base, data sets and their licences, for every format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256
from gym_fed.core.registries import EXPORT_FORMATS
from gym_fed.export.formats.base import Options
from gym_fed.export.run import export, require_new
from gym_fed.export.source import open_source
from gym_fed.training.trainer import Trainer
from tests.support.adapters import settings, sibling


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = sibling("Llama", tmp_path_factory.mktemp("base") / "llama")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A Llama\n")
    return folder


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run on generated rows and on rows of a local file."""
    folder = tmp_path_factory.mktemp("tuned")
    rows = folder / "private-names.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    data = [{"tasks": ["double"], "num_examples": 8}, {"path": str(rows)}]
    Trainer(settings(folder / "run", model=str(base), finetuning="lora", data=data)).train()
    return folder / "run"


def front_matter(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return found


def test_a_folder_has_a_card_with_licence_base_and_data_of_the_run(tuned: Path, tmp_path: Path) -> None:
    record = export(open_source(str(tuned)), "huggingface", tmp_path / "out", Options(), check=False)
    text = (tmp_path / "out/README.md").read_text()
    assert record["files"]["README.md"] == file_sha256(tmp_path / "out/README.md")
    assert front_matter(text)["license"] == "mit"
    assert "| Base | llama |" in text
    assert "Model: MIT. Base: MIT." in text
    assert "| tasks of gym-fed: double | Apache-2.0 |" in text
    assert "| files of the trainer | not stated |" in text
    assert "sft, lora" in text
    assert "private-names" not in text
    assert str(tuned) not in text


def test_an_export_names_those_who_contributed_to_a_hubs_version(base: Path, tmp_path: Path) -> None:
    version = tmp_path / "version"
    shutil.copytree(base, version)
    people = [{"contributor": "c1", "name": "Ann", "share": 0.75}, {"contributor": "c2", "share": 0.25}]
    (version / "contributors.json").write_text(json.dumps({"contributors": people}))
    export(open_source(str(version)), "huggingface", tmp_path / "out", Options(), check=False)
    card = (tmp_path / "out/README.md").read_text()
    assert "Ann" in card
    assert "c2" in card
    again = tmp_path / "again"
    export(open_source(str(tmp_path / "out")), "huggingface", again, Options(), check=False)
    assert "Ann" in (again / "README.md").read_text()


def test_an_adapters_card_names_peft_as_its_library(tuned: Path, tmp_path: Path) -> None:
    export(open_source(str(tuned)), "adapter", tmp_path / "out", Options(), check=False)
    assert front_matter((tmp_path / "out/README.md").read_text())["library_name"] == "peft"


def test_a_single_file_has_its_card_beside_it(tuned: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    record = export(open_source(str(tuned)), "torchscript", path, Options(), check=False)
    card = tmp_path / "model.pt.card.md"
    assert "| tasks of gym-fed: double | Apache-2.0 |" in card.read_text()
    assert record["files"][card.name] == file_sha256(card)
    assert not path.with_name("README.md").exists()


def test_a_gguf_file_names_licence_base_and_data_sets_inside(tuned: Path, tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "model.gguf"
    export(open_source(str(tuned)), "gguf", path, Options(), check=False)
    fields = gguf.GGUFReader(path).fields
    said = {key: fields[key].contents() for key in fields if key.startswith("general.")}
    assert said["general.license"] == "mit"
    assert said["general.base_model.0.name"] == "llama"
    assert said["general.dataset.count"] == 2
    assert said["general.dataset.0.name"] == "tasks of gym-fed: double"
    assert front_matter((tmp_path / "model.gguf.card.md").read_text())["library_name"] == "gguf"


def test_what_no_record_says_is_not_stated(base: Path, tmp_path: Path) -> None:
    plain = sibling("Llama", tmp_path / "plain")
    export(open_source(str(plain)), "huggingface", tmp_path / "out", Options(), check=False)
    text = (tmp_path / "out/README.md").read_text()
    assert front_matter(text)["license"] == "unknown"
    assert "Model: not stated." in text
    assert "## Data\n\nNot stated." in text
    again = open_source(str(tmp_path / "out"))
    export(again, "huggingface", tmp_path / "again", Options(), check=False)
    assert front_matter((tmp_path / "again/README.md").read_text())["license"] == "unknown"


def test_a_run_whose_records_cannot_be_read_is_exported_with_a_note(tuned: Path, tmp_path: Path) -> None:
    source = open_source(str(tuned))
    config = tuned / "config.yaml"
    before = config.read_text()
    config.write_text("algorithm: no-such\n")
    try:
        record = export(source, "huggingface", tmp_path / "out", Options(), check=False)
    finally:
        config.write_text(before)
    assert any("model card omits the lineage in run" in note for note in record["notes"])
    assert json.loads((tmp_path / "out/export.json").read_text())["notes"] == record["notes"]


def test_a_card_that_somebody_else_has_beside_the_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf.card.md").write_text("mine")
    with pytest.raises(GymError, match=r"model\.gguf\.card\.md already exists") as caught:
        require_new(tmp_path / "model.gguf", EXPORT_FORMATS.new("gguf"))
    assert caught.value.code is ErrorCode.FILE_EXISTS


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("float16", "f16"),
        pytest.param("bfloat16", "bf16", marks=pytest.mark.slow),
        pytest.param("float32", "f32", marks=pytest.mark.slow),
    ],
)
def test_gguf_keeps_the_precision_of_the_source_by_default(
    base: Path, tmp_path: Path, stored: str, expected: str
) -> None:
    folder = tmp_path / "stored"
    export(open_source(str(base)), "huggingface", folder, Options(dtype=stored), check=False)
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("dtype") == stored
    if stored == "float16":  # a folder whose config does not say it
        (folder / "config.json").write_text(json.dumps(config))
    source = open_source(str(folder))
    record = export(source, "gguf", tmp_path / "model.gguf", Options(), check=False)
    assert record["quantization"] == expected
    full = Options(quantization="f32")
    asked = export(open_source(str(folder)), "gguf", tmp_path / "f32.gguf", full, check=False)
    assert asked["quantization"] == "f32"
    smaller = {"bf16": 0.7, "f16": 0.7, "f32": 1.01}[expected]
    assert record["bytes"] < smaller * asked["bytes"]


def test_the_size_in_8_bits_that_is_suggested_is_the_size_that_is_written(base: Path, tmp_path: Path) -> None:
    from gym_fed.export.gguf.write import bytes_in_8_bits

    for name in ("f32", "q8_0"):
        export(open_source(str(base)), "gguf", tmp_path / name, Options(quantization=name), check=False)
    assert bytes_in_8_bits(tmp_path / "f32") == pytest.approx((tmp_path / "q8_0").stat().st_size, rel=0.05)


def test_only_a_file_in_full_precision_gets_the_suggestion_of_8_bits(base: Path, tmp_path: Path) -> None:
    chosen = EXPORT_FORMATS.new("gguf")
    path = tmp_path / "model.gguf"
    export(open_source(str(base)), "gguf", path, Options(quantization="f16"), check=False)
    assert "--quantization q8_0 takes about" in chosen.suggestion(path, Options(quantization="f16"))
    assert chosen.suggestion(path, Options(quantization="q4_k_m")) == ""
