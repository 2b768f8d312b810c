"""Configs that an older release has stored lack newer keys: those have their defaults, and unfinished work goes on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from gym_fed.config.schema.base import with_schema_defaults
from gym_fed.config.train.training import SearchConfig, TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.personalization.create import _claim
from gym_fed.training.run.folder import RunFolder
from gym_fed.training.search import Search


def config(folder: Path, **keys: Any) -> TrainingConfig:
    return TrainingConfig(
        model="m", output_dir=folder, finetuning="lora", data=[{"path": "rows.jsonl"}], **keys
    )


def begun(settings: TrainingConfig) -> Path:
    """The stored config of an unfinished run."""
    run = RunFolder(settings.output_dir)
    run.open(settings, "rows", resume=False)
    run.close()
    (settings.output_dir / "metrics.jsonl").write_text("{}\n")
    return settings.output_dir / "config.yaml"


def remove(file: Path, *path: Any) -> None:
    values = yaml.safe_load(file.read_text())
    section = values
    for key in path[:-1]:
        section = section[key]
    del section[path[-1]]
    file.write_text(json.dumps(values) if file.suffix == ".json" else yaml.safe_dump(values))


@pytest.mark.parametrize(
    "path", [("chat_template_tokens",), ("seed",), ("lora", "use_dora"), ("data", 0, "weight")], ids=str
)
def test_a_run_whose_stored_config_lacks_a_key_goes_on_with_the_keys_default(
    tmp_path: Path, path: tuple[Any, ...]
) -> None:
    settings = config(tmp_path / "run")
    remove(begun(settings), *path)
    RunFolder(settings.output_dir).check(settings, "rows", resume=True)


def test_a_run_whose_stored_config_lacks_a_key_is_refused_with_another_value_of_it(tmp_path: Path) -> None:
    settings = config(tmp_path / "run")
    stored = begun(settings)
    remove(stored, "chat_template_tokens")
    remove(stored, "lora", "use_dora")
    changed = config(
        tmp_path / "run", chat_template_tokens="add", lora={**settings.lora.model_dump(), "use_dora": True}
    )
    with pytest.raises(GymError) as caught:
        RunFolder(settings.output_dir).check(changed, "rows", resume=True)
    assert "chat_template_tokens was 'require' and is now 'add'" in caught.value.message
    assert "lora.use_dora was False and is now True" in caught.value.message


def test_every_key_that_has_its_default_may_be_missing_from_a_stored_config(tmp_path: Path) -> None:
    settings = config(tmp_path / "run")
    whole = settings.model_dump(mode="json")
    defaults = with_schema_defaults({}, settings)
    given = {key: value for key, value in whole.items() if key not in defaults or defaults[key] != value}
    assert given.keys() >= {"model", "output_dir", "data", "lora"}
    assert len(given) < 10
    assert with_schema_defaults(given, settings) == whole


def test_a_search_that_was_stored_without_a_key_goes_on(tmp_path: Path) -> None:
    search = {"metric": "loss", "parameters": {"seed": {"choices": [1, 2]}}}
    settings = SearchConfig(model="m", output_dir=tmp_path / "search", search=search)
    Search(settings)._claim_folder()
    stored = settings.output_dir / "search.yaml"
    remove(stored, "chat_template_tokens")
    Search(settings)._claim_folder()
    with pytest.raises(GymError, match="another search"):
        Search(settings.model_copy(update={"chat_template_tokens": "add"}))._claim_folder()


def test_a_variant_that_was_begun_without_a_key_goes_on(tmp_path: Path) -> None:
    training = config(tmp_path / "run")
    job: Any = SimpleNamespace(folder=tmp_path / "variant", training=training)
    base: Any = SimpleNamespace(spec=SimpleNamespace(digest="base"))
    rows: Any = SimpleNamespace(digest="rows")
    _claim(job, base, rows)
    remove(job.folder / "order.json", "training", "chat_template_tokens")
    _claim(job, base, rows)
    job.training = training.model_copy(update={"chat_template_tokens": "add"})
    with pytest.raises(GymError, match="different training"):
        _claim(job, base, rows)
