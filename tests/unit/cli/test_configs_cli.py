"""`gym configs`: recipes are found, copied and checked, and editors get a schema that agrees with the loader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.config import recipes as recipes_module
from gym_fed.config.recipes import get_recipe, recipes
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError
from tests.unit.interop.test_llamafactory import COMMON

CONFIGS = Path(__file__).parents[3] / "configs"
RUNNER = CliRunner()


def gym(*words: object) -> Any:
    done = RUNNER.invoke(app, ["configs", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("gym api", "base: gym-nano\nvariants: null\n"),
        ("gym-server run", "base_model: gym-nano\nrounds: {num_rounds: 2}\n"),
        ("gym predict", "model: gym-nano\neval_data: [{path: rows.jsonl}]\nmax_new_tokens: 4\n"),
        ("gym grade", "graders: [{grader: exact}]\n"),
        (
            "gym tune",
            "model: gym-nano\ndata: [{path: rows.jsonl}]\neval_split: 0.1\n"
            "search: {parameters: {learning_rate: {choices: [1.0e-3, 1.0e-4]}}}\n",
        ),
        (
            "gym eval",
            "task: mine\noutput_type: generate_until\ndoc_to_text: q\ndoc_to_target: a\ngrade: chrf\n"
            "test_split: test\ndataset_kwargs: {data_files: {test: rows.jsonl}}\n",
        ),
    ],
)
def test_a_file_of_any_command_is_checked_by_that_commands_schema(
    tmp_path: Path, command: str, text: str
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    (tmp_path / "rows.jsonl").write_text('{"q": "1 + 1 =", "a": "2"}\n')
    assert f"a valid config of {command}" in gym("validate", file).stdout
    file.write_text(text + "unknown_key: 1\n")
    with pytest.raises(GymError, match="unknown_key: unknown key"):
        gym("validate", file)


def test_a_task_file_that_names_a_column_its_rows_lack_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(
        "task: mine\noutput_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: a\ngrade: chrf\n"
        "test_split: test\ndataset_kwargs: {data_files: {test: rows.jsonl}}\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"q": "1 + 1 =", "a": "2"}\n')
    with pytest.raises(GymError, match=r"task.yaml:3:1: doc_to_text: row 0 of test: 'question' is undefined"):
        gym("validate", file)
    assert "a valid config of gym eval" in gym("validate", "--schema-only", file).stdout


@pytest.mark.parametrize(
    ("name", "said"), [("exact_mach", "did you mean 'exact'"), ("exact", "write {grader: exact}")]
)
def test_a_grader_that_is_only_named_gets_a_hint(tmp_path: Path, name: str, said: str) -> None:
    file = tmp_path / "graders.yaml"
    file.write_text(f"graders: [{name}]\n")
    with pytest.raises(GymError, match=said):
        gym("validate", file)


def test_every_recipe_is_listed_with_what_it_does() -> None:
    listed = json.loads(gym("list", "--json").stdout)
    files = [*CONFIGS.glob("*.yaml"), *CONFIGS.glob("models/*.yaml")]
    assert sorted(row["name"] for row in listed) == sorted(file.stem for file in files)
    sizes = {row["name"]: row["sizes"] for row in listed}
    assert sizes["qwen3-lora"] == ["0.6B", "1.7B", "4B", "8B", "14B", "32B"]
    assert not sizes["nano-sft"]
    assert all(row["summary"] for row in listed)
    assert "nano-sft" in gym("list").stdout


def test_an_installed_package_finds_its_own_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assets = tmp_path / "gym_fed/assets/configs"
    assets.mkdir(parents=True)
    (assets / "mine.yaml").write_text(
        "# Does a thing,\n# and another.\n#   gym train mine.yaml\nmodel: gym-nano\n"
    )
    monkeypatch.setattr(recipes_module, "__file__", str(tmp_path / "gym_fed/config/recipes.py"))
    assert [(r.name, r.summary) for r in recipes()] == [("mine", "Does a thing, and another.")]
    (assets / "mine.yaml").unlink()
    assets.rmdir()
    with pytest.raises(GymError, match="no recipes in"):
        recipes()


def test_a_recipe_is_copied_once_and_never_over_another_file(tmp_path: Path) -> None:
    gym("copy", "nano-sft", tmp_path)
    copied = tmp_path / "nano-sft.yaml"
    assert copied.read_text() == get_recipe("nano-sft").file.read_text()
    copied.write_text("mine")
    with pytest.raises(GymError, match="exists") as caught:
        gym("copy", "nano-sft.yaml", tmp_path)
    assert caught.value.code is ErrorCode.FILE_EXISTS
    assert copied.read_text() == "mine"
    gym("copy", "nano-sft", tmp_path, "--overwrite")
    gym("copy", "nano-lora", tmp_path / "new/folder/a.yaml")
    assert load_config(tmp_path / "new/folder/a.yaml", TrainingConfig).finetuning == "lora"
    with pytest.raises(GymError, match="no recipe is called 'nano-sfd'"):
        gym("copy", "nano-sfd", tmp_path)


def test_rows_that_a_recipe_brings_are_copied_with_it(tmp_path: Path) -> None:
    bringing = [recipe for recipe in recipes() if "path: configs/data/" in recipe.file.read_text()]
    assert bringing
    for recipe in bringing:
        folder = tmp_path / recipe.name
        gym("copy", recipe.name, folder / "mine.yaml")
        paths = [source.path for source in load_config(folder / "mine.yaml", TrainingConfig).data]
        assert paths
        assert all(path.startswith(f"{folder}/data/") and Path(path).is_file() for path in paths if path)


def test_recipes_with_the_same_rows_go_into_one_folder(tmp_path: Path) -> None:
    for name in ("nano-dpo", "nano-kto"):
        gym("copy", name, tmp_path)
        assert "root of the repository" not in (tmp_path / f"{name}.yaml").read_text()
    rows = tmp_path / "data/prefer-capitals.jsonl"
    rows.write_text("mine")
    with pytest.raises(GymError, match=r"prefer-capitals\.jsonl already exists"):
        gym("copy", "nano-dpo-lora", tmp_path)
    assert rows.read_text() == "mine"


def test_a_valid_file_is_reported_as_valid_and_a_wrong_one_in_full(tmp_path: Path) -> None:
    assert "can run on this machine (sft, full)" in gym("validate", CONFIGS / "nano-sft.yaml").stdout
    assert json.loads(gym("validate", CONFIGS / "nano-lora.yaml", "--json").stdout)["valid"]
    file = tmp_path / "wrong.yaml"
    file.write_text("model: gym-nano\nlearning_rate: -1\nmax_step: 3\nlora: {r: 4}\n")
    with pytest.raises(GymError) as caught:
        gym("validate", file)
    assert f"{file}:2:" in caught.value.message
    assert f"{file}:3:" in caught.value.message
    assert "max_steps" in caught.value.message


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", "model: not set"),
        ("model: gym-nano", "data: no rows"),
        ("model: gym-nona\ndata: [{tasks: [copy], num_examples: 4}]", "no model called 'gym-nona'"),
        ("model: gym-nano\ndata: [{path: no.jsonl}]", r"no data file at no\.jsonl"),
        (
            "model: gym-nano\nalgorithm: grpo\ndata: [{tasks: [copy], num_examples: 4}]",
            "graders: grpo learns from rewards",
        ),
    ],
)
def test_what_training_would_not_find_is_part_of_the_check(tmp_path: Path, words: str, problem: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(words)
    with pytest.raises(GymError, match=problem):
        gym("validate", file)
    assert "a valid config (" in gym("validate", file, "--schema-only").stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_what_this_machine_lacks_is_part_of_the_check(tmp_path: Path) -> None:
    with pytest.raises(GymError, match="liger: true needs a CUDA GPU"):
        gym("validate", CONFIGS / "nano-sft.yaml", "--set", "liger=true")
    assert (
        "a valid config (sft"
        in gym("validate", CONFIGS / "nano-sft.yaml", "--set", "liger=true", "--schema-only").stdout
    )


def test_the_schema_takes_every_recipe_and_refuses_what_the_loader_refuses(tmp_path: Path) -> None:
    file = tmp_path / "gym.schema.json"
    done = gym("schema", "-o", file)
    assert done.stdout.strip() == f"# yaml-language-server: $schema={file}"
    schema = json.loads(file.read_text())
    assert schema == json.loads(gym("schema").stdout)
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for recipe in recipes():
        values = yaml.safe_load(recipe.file.read_text())
        if isinstance((values.get("dpo") or {}).get("loss_type"), str):
            values["dpo"]["loss_type"] = [values["dpo"]["loss_type"]]  # one may stand for a list of one
        if "algorithm" in values:
            validator.validate(values)
    for wrong in ({"lr": 1}, {"learning_rate": "fast"}, {"lora": {"rank": 1}}, {"data": [{"weight": -1}]}):
        assert list(validator.iter_errors(wrong)), wrong
    assert "Maximum length of a row in tokens" in schema["properties"]["max_length"]["description"]


def test_a_llamafactory_file_is_written_in_our_words(tmp_path: Path) -> None:
    file, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    file.write_text(yaml.safe_dump(COMMON))
    gym("import", file, "-o", ours)
    assert ours.read_text().startswith("# Translated from theirs.yaml")
    assert "# plot_loss: use gym runs plot" in ours.read_text()
    assert load_config(ours, TrainingConfig).lora.r == 8
    assert yaml.safe_load(gym("import", file).stdout) == yaml.safe_load(ours.read_text())
    with pytest.raises(GymError, match="exists"):
        gym("import", file, "-o", ours)
    reply = json.loads(gym("import", file, "-o", tmp_path / "b.yaml", "--json").stdout)
    assert "# plot_loss: use gym runs plot" in reply["notes"]
    assert "note:" in gym("validate", file, "--schema-only").stderr
    file.write_text(yaml.safe_dump({**COMMON, "fp8": True}))
    with pytest.raises(GymError, match="fp8"):
        gym("import", file)
    assert "# fp8:" in gym("import", file, "--ignore-unsupported").stdout
    with pytest.raises(GymError, match="fp8"):
        gym("validate", file)


@pytest.mark.parametrize(
    "words", [["--help"], ["list"], ["schema"], ["validate", "--schema-only", CONFIGS / "nano-sft.yaml"]]
)
def test_none_of_this_imports_torch(words: list[object]) -> None:
    code = (
        "import sys\n"
        f"sys.argv = {['gym', 'configs', *map(str, words)]!r}\n"
        "from gym_fed.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
