"""What every task of ours promises: its rows render, the right answer is among the choices, its lock does not move."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.suites import grading
from gym_fed.evaluation.suites.definitions import members
from gym_fed.evaluation.suites.rendering import render
from gym_fed.evaluation.suites.store import ASSETS, listing
from gym_fed.evaluation.suites.tasks import EvalTask, tasks_of
from tools.tiny_suite import FOLDER, MAX_BYTES, files

OURS = [name for name, entry in listing().tasks.items() if entry.dataset in ("tiny", "tools")]
GIVEN = {  # evaluated rows of the files that lie in the shared folder
    "mmlu_anatomy": 5, "winogrande": 1267, "arc_easy": 2376, "truthfulqa_mc1": 817, "truthfulqa_mc2": 817,
    "gsm8k": 6473, "humaneval": 164, "mbpp": 500, "bbh_fewshot_snarks": 178, "bbh_zeroshot_snarks": 178,
}  # fmt: skip


def _require_contract(task: EvalTask, most: int | None = None) -> None:
    config = {
        key: task.config[key]
        for key in ("doc_to_text", "doc_to_target", "doc_to_choice")
        if key in task.config
    }
    for row in task.rows[task.split][:most]:
        rendered = render(config, row)
        assert rendered.target.strip()
        if task.kind == "choices":
            assert rendered.gold
            assert all(0 <= place < len(rendered.choices) for place in rendered.gold)


@pytest.mark.parametrize("entry", OURS)
def test_every_row_of_an_own_task_renders_and_has_its_gold_among_the_choices(
    entry: str, tmp_path: Path
) -> None:
    tasks = tasks_of([entry], home=tmp_path)
    assert sum(task.num_rows for task in tasks) == (listing().tasks[entry].rows or 40)
    for task in tasks:
        _require_contract(task)
        assert task.lock == tasks_of([task.name], home=tmp_path)[0].lock
        assert task.licence == "CC0-1.0"


@pytest.mark.shared
@pytest.mark.parametrize("name", GIVEN)
def test_published_files_render_under_the_harness_definition(
    name: str, shared_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    task = tasks_of([name], shared_folder / "data", home=tmp_path)[0]
    assert task.num_rows == GIVEN[name]
    _require_contract(task, 300)
    assert task.lock == tasks_of([name], shared_folder / "data", limit=3, home=tmp_path)[0].lock


@pytest.mark.parametrize("entry", [name for name, one in listing().tasks.items() if not one.tasks])
def test_every_definition_is_found_and_names_the_split_that_is_evaluated(entry: str) -> None:
    pytest.importorskip("lm_eval")
    dataset = listing().datasets[str(listing().tasks[entry].dataset)]
    found = members(entry)
    assert found
    for _, definition in found.values():
        evaluated = definition.get("test_split") or definition.get("validation_split")
        assert dataset.package is not None or evaluated in dataset.splits


def test_rows_of_the_package_are_those_that_the_script_makes() -> None:
    made = files()
    assert {path for path, data in made.items() if (FOLDER / path).read_bytes() != data} == set()
    assert sum(file.stat().st_size for file in ASSETS.glob("tiny/**/*") if file.is_file()) <= MAX_BYTES


def test_rows_of_tiny_are_as_many_as_the_design_says_and_never_twice(tmp_path: Path) -> None:
    counts: dict[str, int] = {}
    for task in tasks_of(["tiny"], home=tmp_path):
        rows = [str(sorted(row.items())) for row in task.rows[task.split]]
        assert len(set(rows)) == len(rows) or task.name == "tiny_choice"
        counts[task.group] = counts.get(task.group, 0) + task.num_rows
    assert counts == {
        "tiny_text": 300, "tiny_arithmetic": 60, "tiny_cloze": 60, "tiny_choice": 40, "tiny_code": 20,
        "tiny_refusal": 20,
    }  # fmt: skip


def test_no_task_file_of_the_package_writes_a_template_that_the_harness_would_render_otherwise(
    tmp_path: Path,
) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.utils import apply_template

    for task in tasks_of(["tiny", "tools"], home=tmp_path):
        row = task.rows[task.split][0]
        assert render(task.config, row).prompt == str(apply_template(task.config["doc_to_text"], row))


def test_every_solution_of_tiny_code_passes_its_tests_and_an_empty_one_does_not(tmp_path: Path) -> None:
    task = tasks_of(["tiny_code"], home=tmp_path)[0]
    process = task.config["process_results"]
    for row in task.rows["test"]:
        assert process(row, [row["solution"]]) == {"pass@1": 1.0}
    assert process(task.rows["test"][0], ["    pass\n"]) == {"pass@1": 0.0}


def test_calls_are_graded_by_their_form_alone(tmp_path: Path) -> None:
    task = tasks_of(["tools_calls"], home=tmp_path)[0]
    process, row = task.config["process_results"], task.rows["test"][0]
    assert process(row, [f"Sure: {row['call']}"]) == {"valid": 1.0}
    assert process(row, [row["call"].replace("Quito", "Atlantis")]) == {"valid": 1.0}
    assert process(row, [row["call"].replace("get_weather", "weather")]) == {"valid": 0.0}
    assert process(row, ["It is warm."]) == {"valid": 0.0}


def test_translations_are_graded_by_sentence_chrf() -> None:
    pytest.importorskip("sacrebleu")
    process = grading.process_results("chrf", lambda row: row["to_text"])
    assert process({"to_text": "Das ist ein Haus."}, ["Das ist ein Haus."])["chrf"] == pytest.approx(100)
    assert process({"to_text": "Das ist ein Haus."}, ["xyz"])["chrf"] < 10


def test_ifeval_is_refused_before_its_metric_reaches_for_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("gym_fed.evaluation.suites.tasks._nltk_folders", lambda: [tmp_path])
    with pytest.raises(GymError, match="punkt_tab") as caught:
        tasks_of(["ifeval"], home=tmp_path)
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY
    assert "lm_eval.tasks.ifeval" not in sys.modules
