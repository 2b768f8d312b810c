"""The search for settings: trials, pruning, and going on after Ctrl-C or a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_fed.config.train.training import DataConfig, SearchConfig, TrainingConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.run.hooks import StepReport
from gym_fed.training.search import Search, TrialResult


def config(tiny_base: Path, folder: Path, **search: Any) -> SearchConfig:
    ranges = {
        "learning_rate": {"low": 1e-5, "high": 1e-1, "log": True},
        "lora.r": {"choices": [2, 4]},
        "warmup_steps": {"low": 0, "high": 2, "integer": True},
    }
    values = {"parameters": ranges, "num_trials": 4, "pruner": {"name": "none"}, **search}
    return SearchConfig(
        model=str(tiny_base),
        finetuning="lora",
        data=[{"tasks": ["copy"], "num_examples": 16}],
        eval_data=[{"tasks": ["copy"], "num_examples": 4, "seed": 1}],
        output_dir=folder,
        max_steps=4,
        eval_steps=2,
        save_steps=1,
        per_device_train_batch_size=4,
        max_length=32,
        device="cpu",
        num_threads=1,
        reproducibility={"record": False},
        search=values,
    )


def test_trials_differ_and_the_best_is_a_config_that_trains(tiny_base: Path, tmp_path: Path) -> None:
    search = Search(config(tiny_base, tmp_path / "search", num_trials=3))
    results = search.run()
    assert [result.number for result in results] == [0, 1, 2]
    assert len({json.dumps(result.parameters) for result in results}) == 3
    best = search.best(results)
    assert best is not None
    assert best.value == min(result.value for result in results if result.value is not None)
    written = load_config(tmp_path / "search/best.yaml", TrainingConfig)
    assert written.learning_rate == best.parameters["learning_rate"]
    assert written.lora is not None
    assert written.lora.r == best.parameters["lora.r"]
    run = tmp_path / "search/trials" / best.folder
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert best.value == [line["eval_loss"] for line in last if "eval_loss" in line][-1]
    assert (run / "result.json").exists()


def test_a_search_from_somebody_else_trains_in_no_folder_outside_of_it(
    tiny_base: Path, tmp_path: Path
) -> None:
    settings = config(tiny_base, tmp_path / "search")
    Search(settings, should_stop=lambda: False)._claim_folder()
    study = Search(settings)._study()
    study.enqueue_trial({}, user_attrs={"folder": "../../../outside"})
    with pytest.raises(GymError, match=r"trial 0 of the search has the folder '\.\./") as caught:
        Search(settings).run()
    assert caught.value.code is ErrorCode.STATE_CORRUPT
    assert not (tmp_path / "outside").exists()


def test_a_stopped_search_repeats_the_stopped_trial_from_its_checkpoint(
    tiny_base: Path, tmp_path: Path
) -> None:
    steps: list[tuple[int, int]] = []
    settings = config(tiny_base, tmp_path / "search", num_trials=3)

    def note(trial: int, report: StepReport) -> None:
        if report.evaluation is None:
            steps.append((trial, report.step))

    with pytest.raises(GymError, match="stopped in trial 1") as caught:
        Search(settings, on_report=note, should_stop=lambda: steps[-1] == (1, 3)).run()
    assert caught.value.code is ErrorCode.INTERRUPTED
    lines = (tmp_path / "search/trials/trial-0001/config.yaml").read_text()
    steps.clear()
    results = Search(settings, on_report=note).run()
    assert steps[0] == (2, 4), "trial 1, now 2, goes on after its third step"
    assert [(result.number, result.folder) for result in results] == [
        (0, "trial-0000"),
        (2, "trial-0001"),
        (3, "trial-0003"),
    ]
    repeated = yaml.safe_load(lines)
    assert results[1].parameters["learning_rate"] == repeated["learning_rate"]
    assert results[0].parameters != results[2].parameters, "the resumed sampler does not begin again"
    # The same question again changes nothing; more trials may be asked for; another question is refused.
    assert Search(settings).run() == results
    with pytest.raises(GymError, match="contains another search"):
        Search(config(tiny_base, tmp_path / "search", seed=5)).run()


def test_a_kill_leaves_a_trial_that_is_run_again(tiny_base: Path, tmp_path: Path) -> None:
    class Killed(BaseException):
        """As if the process had ended here: nobody gets to say goodbye."""

    settings = config(tiny_base, tmp_path / "search", num_trials=2)

    def kill(trial: int, report: StepReport) -> None:
        if (trial, report.step) == (1, 2):
            raise Killed

    with pytest.raises(Killed):
        Search(settings, on_report=kill).run()
    results = Search(settings).run()
    assert [(result.number, result.folder, result.state) for result in results] == [
        (0, "trial-0000", "complete"),
        (2, "trial-0001", "complete"),
    ]


def test_workers_share_a_search(tiny_base: Path, tmp_path: Path) -> None:
    settings = config(tiny_base, tmp_path / "search", num_trials=3)
    seen: list[TrialResult] = []

    def as_another_worker(trial: int, report: StepReport) -> None:
        if (trial, report.step) == (0, 1):
            seen.extend(Search(settings).run())

    results = Search(settings, on_report=as_another_worker).run()
    assert [result.number for result in seen] == [1, 2], "the first trial was in progress"
    assert [result.number for result in results] == [0, 1, 2]
    assert len({json.dumps(result.parameters) for result in results}) == 3
    assert len(json.loads((tmp_path / "search/trials.json").read_text())) == 3


def test_trials_that_do_worse_are_given_up(tiny_base: Path, tmp_path: Path) -> None:
    rates = {"learning_rate": {"choices": [1e-2, 1e-9]}}
    pruner = {"name": "median", "n_startup_trials": 1}
    settings = config(
        tiny_base, tmp_path / "search", parameters=rates, pruner=pruner, num_trials=5, sampler="random"
    )
    results = Search(settings).run()

    def halfway(folder: str) -> float:
        lines = (tmp_path / "search/trials" / folder / "metrics.jsonl").read_text().splitlines()
        return next(float(line["eval_loss"]) for line in map(json.loads, lines) if "eval_loss" in line)

    pruned = [result for result in results if result.state == "pruned"]
    complete = [result for result in results if result.state == "complete"]
    assert pruned
    best = min(halfway(result.folder) for result in complete)
    assert all(halfway(result.folder) > best for result in pruned)
    assert all("pruned at step 2 of 4" in result.why for result in pruned)
    assert not (tmp_path / "search/trials" / pruned[0].folder / "result.json").exists()


def test_a_loss_that_diverges_is_an_answer_and_a_bad_row_is_not(tiny_base: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "to copy"}\n{"text": 1}\n')
    rates = {"learning_rate": {"choices": [1e30]}}
    settings = config(tiny_base, tmp_path / "search", parameters=rates, num_trials=1).model_copy(
        update={"data": [DataConfig(path=str(file))], "max_grad_norm": 0.0}
    )
    with pytest.raises(GymError, match=r"rows\.jsonl:2"):
        Search(settings).run()
    file.write_text('{"text": "to copy"}\n')
    (result,) = Search(settings).run()
    assert result.state == "pruned"
    assert "nan" in result.why


def test_a_key_a_metric_and_a_range_that_make_no_sense_are_refused(tiny_base: Path, tmp_path: Path) -> None:
    for key in ("lr", "lora.rank"):
        wrong = config(tiny_base, tmp_path / "search", parameters={key: {"low": 1, "high": 2}})
        with pytest.raises(GymError, match=r"unknown key|did you mean"):
            Search(wrong)
    with pytest.raises(GymError, match="adamww"):  # wherever it stands in the list
        Search(config(tiny_base, tmp_path / "a", parameters={"optimizer": {"choices": ["adamw", "adamww"]}}))
    with pytest.raises(GymError, match="warmup_ratio"):
        Search(config(tiny_base, tmp_path / "a", parameters={"warmup_ratio": {"low": 0, "high": 7}}))
    assert not (tmp_path / "a").exists()
    for values in ({"low": 2, "high": 1}, {"low": 1}, {"low": 0, "high": 1, "log": True}, {"choices": []}):
        with pytest.raises(ValueError, match=r"choices|log needs|at least 1"):
            config(tiny_base, tmp_path / "search", parameters={"learning_rate": values})
    unknown = config(tiny_base, tmp_path / "metric", metric="bleu", num_trials=1)
    with pytest.raises(GymError, match="the run does not log 'bleu'"):
        Search(unknown).run()
    assert not (tmp_path / "search").exists()
