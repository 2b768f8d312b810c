"""Which models and variants of a machine are listed, by what they are called in commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.webui import inventory
from gym_fed.webui.inventory import find_base, local_bases, local_variants
from gym_fed.webui.workbench import Workbench, open_workbench
from tests.support.nano_store import nano_store


@pytest.fixture
def workbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workbench:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    return open_workbench(tmp_path / "bench", tmp_path / "elsewhere")


def write(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(json.dumps({}))


def test_models_are_found_below_the_folder_and_the_runs(workbench: Workbench) -> None:
    write(workbench.runs / "sft", "config.json", "run.json")
    write(workbench.runs / "sft" / "checkpoints" / "checkpoint-5", "config.json")
    write(workbench.folder / "models" / "<img src=x>", "config.json")
    write(workbench.folder / "lora", "adapter_config.json")
    write(workbench.folder / ".hidden", "config.json")
    write(workbench.folder / "unfinished", "config.yaml", "run.json")
    (workbench.folder / "small.gguf").write_bytes(b"GGUF")
    (workbench.folder / "lora" / "gone").symlink_to("nowhere")
    found = {model.id: model.kind for model in local_bases(workbench) if model.kind != "cache"}
    assert found == {
        "gym-nano": "package",
        str(workbench.runs / "sft"): "run",
        "models/<img src=x>": "folder",
        "lora": "adapter",
        "small.gguf": "gguf",
    }
    assert find_base(workbench, "lora").name == "lora"
    with pytest.raises(GymError) as refused:
        find_base(workbench, "lora/..")
    assert refused.value.code is ErrorCode.MODEL_NOT_FOUND


def test_a_large_tree_is_not_walked_to_its_end(workbench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_MAX_FOLDERS", 3)
    for number in range(9):
        write(workbench.folder / f"m{number}", "config.json")
    assert len([model for model in local_bases(workbench) if model.kind == "folder"]) == 2


def test_variants_are_those_of_the_environment_s_store(
    tmp_path: Path, workbench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert local_variants() == []
    nano_store(tmp_path / "home" / "variants", ["ann", "bob"])
    assert {row["name"] for row in local_variants()} == {"ann", "bob"}
    monkeypatch.setenv("GYM_VARIANTS", str(tmp_path / "others"))
    assert local_variants() == []
