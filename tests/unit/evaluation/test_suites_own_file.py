"""Task files of one's own: read without Python, refused by key and line before any model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.suites.tasks import EvalTask, tasks_of

CHOICES = """\
task: capitals
dataset_kwargs: {data_files: {test: capitals.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: "{{cities}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
"""
ROWS = [
    {"country": "France", "cities": ["Paris", "Rome"], "answer": 0},
    {"country": "Italy", "cities": ["Paris", "Rome"], "answer": 1},
]


def _task(folder: Path, text: str = CHOICES, rows: list[dict[str, Any]] | None = None) -> Path:
    (folder / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS))
    file = folder / "capitals.yaml"
    file.write_text(text)
    return file


def _of(file: Path) -> EvalTask:
    return tasks_of([str(file)], home=file.parent)[0]


def _refusal(file: Path) -> GymError:
    with pytest.raises(GymError) as caught:
        _of(file)
    return caught.value


def test_a_task_file_gives_a_task_whose_templates_run_in_the_sandbox(tmp_path: Path) -> None:
    spec = _of(_task(tmp_path))
    assert (spec.name, spec.kind, spec.num_rows, spec.licence) == ("capitals", "choices", 2, "own")
    assert spec.config["doc_to_text"](ROWS[0]) == "The capital of France is"
    assert spec.config["doc_to_choice"](ROWS[1]) == ["Paris", "Rome"]
    assert spec.config["doc_to_target"](ROWS[1]) == 1
    assert spec.lock == _of(_task(tmp_path)).lock
    assert spec.lock != _of(_task(tmp_path, CHOICES.replace("capital of", "capital in"))).lock
    assert spec.lock != _of(_task(tmp_path, rows=ROWS[:1])).lock


def test_the_harness_runs_a_task_file(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.task import ConfigurableTask

    task = ConfigurableTask(config=dict(_of(_task(tmp_path)).config))
    doc = next(iter(task.test_docs()))
    assert task.fewshot_context(doc, 0) == "The capital of France is"
    assert task.process_results(doc, [(-1.0, True), (-2.0, False)]) == {"acc": 1.0}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("doc_to_text:", "doc_to_txt:", r"l:5:1: doc_to_txt: unknown key \(did you mean 'doc_to_text'\?\)"),
        ("metric: acc", "metric: accuracy", r"capitals\.yaml:9:5: metric_list\.0\.metric: .*acc_norm"),
        ("metric: acc", "metric: exact_match", r"exact_match does not go with output_type multiple_choice"),
        ("test_split: test", "test_split: tset", r"capitals\.yaml:3:1: test_split: data_files has no split 'tset'"),
        ("capitals.jsonl", "../x.jsonl", r"capitals\.yaml:2:\d+: dataset_kwargs\.data_files\.test: no file"),
        ("capitals.jsonl", "/x/capitals.jsonl", r"capitals\.yaml:2:\d+: .*'/x/capitals.jsonl' is an absolute path"),
        ("{{country}}", "{{county}}", r"capitals\.yaml:5:1: doc_to_text: row 0 of test: 'county' is undefined"),
        ("{{country}}", "{{country", r"capitals\.yaml:5:1: doc_to_text: no Jinja template"),
        ("{{cities}}", "{{country}}", r"capitals\.yaml:6:1: doc_to_choice: row 0 of test: renders no list"),
        ("{{answer}}", "{{answer + 1}}", r"l:7:1: doc_to_target: row 1 of test: 2 is none of the 2 choices"),
        ("{{country}}", "{{ ''.__class__.__mro__ }}", r"doc_to_text: row 0 of test: is not allowed.*__class__"),
        ("{{country}}", "{{ 'a' * 10**9 }}", r"doc_to_text: row 0 of test: is not allowed"),
        ('"{{answer}}"', "!function utils.target", r"capitals\.yaml:7:\d+: !function: no Python of a task file is run"),
        ("task: capitals", "task: mmlu", r"'mmlu' is a task of gym-fed"),
        ("test_split: test", "process_docs: utils.x", r"process_docs: unknown key"),
    ],
)  # fmt: skip
def test_a_file_that_breaks_the_contract_is_refused_by_key_and_line(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    file = _task(tmp_path, CHOICES.replace(old, new, 1))
    with pytest.raises(GymError, match=said) as caught:
        _of(file)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_columns_that_change_their_type_are_refused_with_both_rows(tmp_path: Path) -> None:
    error = _refusal(_task(tmp_path, rows=[*ROWS, {**ROWS[0], "answer": "0"}]))
    assert error.code is ErrorCode.DATA_INVALID
    assert "row 2: column 'answer' is text, in row 0 it is a number" in error.message


def test_a_row_without_a_column_is_refused(tmp_path: Path) -> None:
    assert (
        "row 1: column 'answer'"
        in _refusal(_task(tmp_path, rows=[ROWS[0], {"country": "x", "cities": ["a"]}])).message
    )


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    inside = tmp_path / "tasks"
    inside.mkdir()
    file = _task(inside)
    (inside / "capitals.jsonl").unlink()
    (inside / "capitals.jsonl").symlink_to(tmp_path / "secret.jsonl")
    assert "no file 'capitals.jsonl'" in _refusal(file).message


def test_code_of_a_task_file_is_graded_in_the_sandbox(tmp_path: Path) -> None:
    text = CHOICES.partition("output_type")[0] + (
        'output_type: generate_until\ndoc_to_text: "{{prompt}}"\ndoc_to_target: "{{prompt}}"\ngrade: humaneval\n'
    )
    row = {"prompt": "def one():\n", "test": "def check(f):\n    assert f() == 1", "entry_point": "one"}
    spec = _of(_task(tmp_path, text, [row]))
    assert (spec.kind, spec.metric) == ("code", "pass@1")
    assert spec.config["process_results"](row, ["    return 1\n"]) == {"pass@1": 1.0}
    error = _refusal(_task(tmp_path, text, [{"prompt": "def one():\n"}]))
    assert "capitals.yaml:7:1: grade: humaneval needs the column 'test'" in error.message
