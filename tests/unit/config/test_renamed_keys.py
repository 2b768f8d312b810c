"""Old names of keys and options: they work, a line of warning gives the new name, and both at once are refused."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from gym_fed.config.llamafactory.files import load_training_config
from gym_fed.config.train.search import SearchConfig
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import dump_yaml, load_config
from gym_fed.core.errors import GymError
from gym_fed.core.renamed import RenamedWarning
from gym_fed.personalization.create import _claim
from gym_fed.training.run.folder import RunFolder
from gym_fed.training.run.summary import read_config
from gym_fed.training.search import Search
from tests.unit.config.test_llamafactory import COMMON

OLD = "algorithm: grpo\nrewards:\n  - {grader: exact}\n"
NEW = OLD.replace("rewards", "graders")


def written(folder: Path, text: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(text)
    return file


def test_an_old_key_of_a_file_works_and_the_warning_names_file_and_line(tmp_path: Path) -> None:
    file = written(tmp_path, OLD)
    with pytest.warns(RenamedWarning) as found:
        config = load_config(file, TrainingConfig)
    assert [str(w.message) for w in found] == [
        f"{file}:2:1: `rewards` is now `graders`; the old name will be removed"
    ]
    assert config.graders[0].grader == "exact"
    assert "rewards" not in yaml.safe_load(dump_yaml(config))


def test_the_new_key_of_a_file_gives_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_config(written(tmp_path, NEW), TrainingConfig).graders


def test_a_problem_below_an_old_key_is_reported_at_its_place(tmp_path: Path) -> None:
    file = written(tmp_path, OLD.replace("exact", "exakt"))
    with pytest.warns(RenamedWarning), pytest.raises(GymError, match=r"run\.yaml:3:6: graders\.0\.grader"):
        load_config(file, TrainingConfig)


def test_both_names_in_a_file_are_refused_with_the_line(tmp_path: Path) -> None:
    file = written(tmp_path, f"{NEW}rewards: []\n")
    with pytest.raises(GymError, match=r"run\.yaml:4:1: rewards: is now graders, and the file has both"):
        load_config(file, TrainingConfig)


@pytest.mark.parametrize("text", [OLD, NEW])
def test_set_takes_the_old_key_for_files_of_either_name(tmp_path: Path, text: str) -> None:
    with pytest.warns(RenamedWarning, match="--set: `rewards` is now `graders`"):
        config = load_config(written(tmp_path, text), TrainingConfig, ["rewards.0.weight=2"])
    assert config.graders[0].weight == 2


def test_python_takes_the_old_key_and_refuses_both() -> None:
    with pytest.warns(RenamedWarning, match="^`rewards` is now `graders`"):
        config = TrainingConfig.model_validate({"algorithm": "grpo", "rewards": [{"grader": "exact"}]})
    assert config.graders[0].grader == "exact"
    with pytest.raises(ValueError, match="rewards: is now graders, and both are given"):
        TrainingConfig.model_validate({"algorithm": "grpo", "rewards": [], "graders": []})


def test_a_run_that_was_stored_under_the_old_key_goes_on(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, f"{NEW}output_dir: {tmp_path}/run\n"), TrainingConfig)
    run = RunFolder(config.output_dir)
    run.open(config, "rows", resume=False)
    run.close()
    stored = config.output_dir / "config.yaml"
    stored.write_text(stored.read_text().replace("graders:", "rewards:"))
    (config.output_dir / "metrics.jsonl").write_text("{}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.check(config, "rows", resume=True)
        assert read_config(config.output_dir)["graders"][0]["grader"] == "exact"
    other = config.model_copy(update={"graders": []})
    with pytest.raises(GymError, match="another config: graders was"):
        run.check(other, "rows", resume=True)


def test_a_search_that_was_stored_under_the_old_key_goes_on(tmp_path: Path) -> None:
    search = "search: {metric: loss, parameters: {seed: {choices: [1, 2]}}}\n"
    config = load_config(written(tmp_path, f"{NEW}output_dir: {tmp_path}/search\n{search}"), SearchConfig)
    Search(config)._claim_folder()
    stored = config.output_dir / "search.yaml"
    stored.write_text(stored.read_text().replace("graders:", "rewards:"))
    Search(config)._claim_folder()
    assert "graders:" in stored.read_text()


def test_a_variant_that_was_begun_under_the_old_key_goes_on(tmp_path: Path) -> None:
    training = load_config(written(tmp_path, NEW), TrainingConfig)
    job: Any = SimpleNamespace(folder=tmp_path / "variant", training=training)
    base: Any = SimpleNamespace(spec=SimpleNamespace(digest="base"))
    rows: Any = SimpleNamespace(digest="rows")
    _claim(job, base, rows)
    stored = job.folder / "order.json"
    stored.write_text(stored.read_text().replace('"graders"', '"rewards"'))
    _claim(job, base, rows)
    job.training = training.model_copy(update={"graders": []})
    with pytest.raises(GymError, match="other training"):
        _claim(job, base, rows)


def test_the_old_option_works_and_its_warning_is_one_line(tmp_path: Path) -> None:
    file = written(tmp_path, yaml.safe_dump({**COMMON, "use_dft_loss": True}))
    assert load_training_config(file, ignore_unsupported=True)[1]
    words = ["configs", "validate", "--schema-only", "--allow-untranslated", file]
    done = subprocess.run(
        [sys.executable, "-m", "gym_fed.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "warning" in line.lower()]
    assert warned == [
        "warning: `--allow-untranslated` is now `--ignore-unsupported`; the old name will be removed"
    ]
