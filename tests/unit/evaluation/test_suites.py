"""Suites and tasks by name; rows in a folder, as their authors publish them; what is missing or unlike."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.suites.rendering import render
from gym_fed.evaluation.suites.row_files import read_rows
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

pytest.importorskip("lm_eval")


def _lines(file: Path, *rows: dict[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_unknown_name_lists_the_nearest_ones(tmp_path: Path) -> None:
    with pytest.raises(GymError, match="'hellaswagg'") as caught:
        tasks_of(["hellaswagg"], home=tmp_path)
    assert caught.value.code is ErrorCode.USAGE
    assert "did you mean hellaswag" in caught.value.hint
    with pytest.raises(GymError) as caught:
        tasks_of(["mmlu_anatomi"], home=tmp_path)
    assert "mmlu_anatomy" in caught.value.hint


def test_sets_that_are_not_here_are_all_named_with_the_command_that_fetches_them(tmp_path: Path) -> None:
    with pytest.raises(GymError, match=r"hellaswag \(Rowan/hellaswag, MIT\).*arc") as caught:
        tasks_of(["hellaswag", "tiny_cloze", "arc_easy"], home=tmp_path)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert "gym eval fetch hellaswag arc_easy" in caught.value.hint


def test_a_name_that_comes_twice_gives_its_task_once(tmp_path: Path) -> None:
    names = [task.name for task in tasks_of(["tiny_cloze", "tiny_cloze", "tiny_upper"], home=tmp_path)]
    assert names == ["tiny_cloze", "tiny_upper"]


def test_mmlu_of_its_authors_and_with_a_header_are_the_same_rows(tmp_path: Path) -> None:
    for folder, head, answer in (
        ("a/mmlu", None, "C"),
        ("b/mmlu", "question,choice0,choice1,choice2,choice3,answer", "2"),
    ):
        file = tmp_path / folder / "test" / "anatomy_test.csv"
        file.parent.mkdir(parents=True)
        with file.open("w", newline="") as stream:
            if head:
                stream.write(head + "\n")
            csv.writer(stream).writerow(["Which, of\nthese?", "a", "b", "c", "d", answer])
    first, second = (tasks_of(["mmlu_anatomy"], tmp_path / at, home=tmp_path)[0] for at in "ab")
    assert first.rows == second.rows
    assert first.lock == second.lock
    assert render(first.config, first.rows["test"][0]).target == "C"


def test_examples_are_refused_where_the_folder_has_none(tmp_path: Path) -> None:
    file = tmp_path / "mmlu_dev" / "dev" / "anatomy_dev.csv"
    file.parent.mkdir(parents=True)
    file.write_text("Q,a,b,c,d,B\n")
    assert "5 dev rows" in tasks_of(["mmlu_anatomy"], tmp_path, home=tmp_path)[0].partial
    with pytest.raises(GymError, match="the split 'dev' has no rows"):
        tasks_of(["mmlu_anatomy"], tmp_path, num_fewshot=5, home=tmp_path)


def test_winogrande_of_beginnings_gives_the_texts_of_the_sentence_form(tmp_path: Path) -> None:
    options = [
        "Ann used the pen, not the pencil, for the pen",
        "Ann used the pen, not the pencil, for the pencil",
    ]
    _lines(
        tmp_path / "a/winogrande/dev.jsonl",
        {"context_options": options, "continuation": "was new.", "gold": 1},
    )
    row = {
        "qID": "1",
        "sentence": "Ann used the pen, not the pencil, for the _ was new.",
        "option1": "pen",
        "option2": "pencil",
        "answer": "2",
    }
    _lines(tmp_path / "b/winogrande/dev.jsonl", row)
    first, second = (tasks_of(["winogrande"], tmp_path / at, home=tmp_path)[0] for at in "ab")
    assert first.rows == second.rows
    rendered = render(first.config, first.rows["validation"][0])
    assert rendered.choices == tuple(options)
    assert rendered.gold == (1,)
    assert rendered.target == "was new."


def test_arc_of_both_layouts_gives_the_same_rows(tmp_path: Path) -> None:
    _lines(tmp_path / "a/arc_easy/test.jsonl", {"query": "Question: Why?", "choices": ["x", "y"], "gold": 1})
    choices = [{"text": "x", "label": "A"}, {"text": "y", "label": "B"}]
    row = {"id": "1", "question": {"stem": "Why?", "choices": choices}, "answerKey": "B"}
    _lines(tmp_path / "b/ARC-V1/ARC-Easy/ARC-Easy-Test.jsonl", row)
    first, second = (tasks_of(["arc_easy"], tmp_path / at, home=tmp_path)[0] for at in "ab")
    assert first.rows == second.rows
    assert render(first.config, first.rows["test"][0]).prompt == "Question: Why?\nAnswer:"


def test_truthfulqa_columns_are_split_at_semicolons(tmp_path: Path) -> None:
    file = tmp_path / "truthfulqa" / "TruthfulQA.csv"
    file.parent.mkdir()
    file.write_text("Question,Best Answer,Correct Answers,Incorrect Answers\nQ?,a,a; b,c; d ;\n")
    mc1, mc2 = tasks_of(["truthfulqa"], tmp_path, home=tmp_path)
    assert render(mc1.config, mc1.rows["validation"][0]).choices == ("a", "c", "d")
    assert mc2.rows["validation"][0]["mc2_targets"] == {
        "choices": ["a", "b", "c", "d"],
        "labels": [1, 1, 0, 0],
    }


def test_hellaswag_is_rendered_as_its_definition_processes_the_rows(tmp_path: Path) -> None:
    row = {
        "activity_label": "Cooking",
        "ctx_a": "A man [title] cuts.",
        "ctx_b": "he",
        "endings": ["eats.", "flies."],
        "label": "0",
    }
    _lines(tmp_path / "hellaswag/all/validation.jsonl", row)
    assert tasks_of(["hellaswag"], tmp_path, home=tmp_path)[0].num_rows == 1
    _lines(tmp_path / "hellaswag/all/validation.jsonl", {**row, "label": "7"})
    with pytest.raises(
        GymError, match=r"task hellaswag: row 0: doc_to_target: 7 is neither one of the 2 choices"
    ):
        tasks_of(["hellaswag"], tmp_path, home=tmp_path)


def test_rows_of_another_layout_are_refused_with_the_file(tmp_path: Path) -> None:
    file = _lines(tmp_path / "winogrande/dev.jsonl", {"text": "?"})
    with pytest.raises(GymError, match="unexpected layout; a row must have") as caught:
        tasks_of(["winogrande"], tmp_path, home=tmp_path)
    assert str(file) in caught.value.message
    file.write_text('{"sentence": \n')
    with pytest.raises(GymError, match="line 1: not JSON"):
        tasks_of(["winogrande"], tmp_path, home=tmp_path)


def test_the_harness_takes_the_config_and_its_rows(tmp_path: Path) -> None:
    from lm_eval.api.task import ConfigurableTask

    spec = tasks_of(["tiny_choice"], home=tmp_path)[0]
    task = ConfigurableTask(config=dict(spec.config))
    docs = list(task.test_docs())
    assert len(docs) == 40
    assert task.doc_to_text(docs[0]) == render(spec.config, docs[0]).prompt
    assert (
        task.process_results(docs[0], [(0.0 if n == docs[0]["gold"] else -9.0, False) for n in range(4)])[
            "acc"
        ]
        == 1
    )


def test_listing_and_help_import_neither_torch_nor_the_harness(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom gym_fed.cli.main import app\n"
        f"app(['eval', 'list', '--json', '--sets', {str(tmp_path)!r}], standalone_mode=False)\n"
        "assert not {'torch', 'lm_eval', 'datasets'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    suites = json.loads(done.stdout)["suites"]
    assert [task["here"] for task in suites["tiny"]["tasks"]] == [True] * 6
    assert {task["name"]: task["here"] for task in suites["core"]["tasks"]}["hellaswag"] is False


def test_list_prints_what_of_a_given_folder_is_partial(tmp_path: Path) -> None:
    _lines(tmp_path / "arc_easy/test.jsonl", {"query": "Question: Why?", "choices": ["x", "y"], "gold": 1})
    shown = CliRunner().invoke(
        app, ["eval", "list", "--data", str(tmp_path), "--sets", str(tmp_path)], catch_exceptions=False
    )
    line = next(line for line in shown.output.splitlines() if "arc_easy" in line)
    assert "in part" in line
    assert "the test split only" in line


def test_parquet_csv_and_json_lines_of_one_table_are_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"a": "ü", "b": "2"}, {"a": "x, y", "b": "3"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    _lines(tmp_path / "t.jsonl", *rows)
    (tmp_path / "t.csv").write_text('a,b\nü,2\n"x, y",3\n')
    (tmp_path / "t.json").write_text(json.dumps({"canary": "x", "examples": rows}))
    for name in ("t.parquet", "t.jsonl", "t.csv", "t.json"):
        assert read_rows(tmp_path / name) == rows
    (tmp_path / "bad.parquet").write_bytes(b"PAR1nothing")
    with pytest.raises(GymError, match="not a Parquet file"):
        read_rows(tmp_path / "bad.parquet")


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
        ("metric: acc", "metric: exact_match", r"exact_match cannot be combined with output_type multiple_choice"),
        ("test_split: test", "test_split: tset", r"capitals\.yaml:3:1: test_split: data_files has no split 'tset'"),
        ("capitals.jsonl", "../x.jsonl", r"capitals\.yaml:2:\d+: dataset_kwargs\.data_files\.test: no file"),
        ("capitals.jsonl", "/x/capitals.jsonl", r"capitals\.yaml:2:\d+: .*'/x/capitals.jsonl' is an absolute path"),
        ("{{country}}", "{{county}}", r"capitals\.yaml:5:1: doc_to_text: row 0 of test: 'county' is undefined"),
        ("{{country}}", "{{country", r"capitals\.yaml:5:1: doc_to_text: not a Jinja template"),
        ("{{cities}}", "{{country}}", r"capitals\.yaml:6:1: doc_to_choice: row 0 of test: does not render a list"),
        ("{{answer}}", "{{answer + 1}}", r"l:7:1: doc_to_target: row 1 of test: 2 is neither one of the 2 choices"),
        ("{{country}}", "{{ ''.__class__.__mro__ }}", r"doc_to_text: row 0 of test: is not allowed.*__class__"),
        ("{{country}}", "{{ 'a' * 10**9 }}", r"doc_to_text: row 0 of test: is not allowed"),
        ('"{{answer}}"', "!function utils.target", r"capitals\.yaml:7:\d+: !function: Python in a task file is never"),
        ("task: capitals", "task: mmlu", r"'mmlu' is already the name of a built-in suite or task"),
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
    assert "row 2: column 'answer' is text, but a number in row 0" in error.message


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
