"""Records of evaluations: what is written is read again to the bit, and nothing else is taken for one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from huggingface_hub import parse_eval_result_entries

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.records.document import HubDataset, eval_results_yaml, record_id, samples_path
from gym_fed.evaluation.records.reader import find_record, named_record, read_record
from gym_fed.evaluation.records.writer import write_record
from gym_fed.evaluation.results import EvalResults, Figure
from tests.support.evaluations import answer_task, choice_task, results_of

SCHEMAS = Path(__file__).parents[1] / "golden" / "every_eval_ever"


@pytest.fixture
def results() -> EvalResults:
    odd = answer_task("arithmetic", ["4", "\u2028 <b>five</b>", "", "\U0001f600"])
    first, *others = odd.samples
    odd = replace(odd, samples=(replace(first, margins=(1e-300, 0.1), cut=3), *others))
    choices = choice_task("wet", [True, False, True])
    beyond = replace(choices.samples[0], logprobs=(-0.1, -math.inf))
    choices = replace(choices, samples=(beyond, *choices.samples[1:]))
    return results_of(odd, choices)


def test_a_record_is_read_as_it_was_written(results: EvalResults, tmp_path: Path) -> None:
    path = write_record(results, tmp_path)
    assert read_record(path) == results
    assert find_record(results.identity, tmp_path) == results


@pytest.mark.parametrize(("schema", "suffix"), [("eval", ".json"), ("instance_level_eval", "_samples.jsonl")])
def test_what_is_written_is_valid_by_the_schema_of_every_eval_ever(
    schema: str, suffix: str, results: EvalResults, tmp_path: Path
) -> None:
    rules = json.loads((SCHEMAS / f"{schema}.schema.json").read_text())
    assert rules["version"] == "0.3.0"
    path = write_record(results, tmp_path)
    text = path.with_name(f"{path.stem}{suffix}").read_text()
    rows = [json.loads(line) for line in text.splitlines()] if suffix.endswith("l") else [json.loads(text)]
    check = jsonschema.Draft7Validator(rules)
    assert rows
    assert [error.message for row in rows for error in check.iter_errors(row)] == []
    assert not check.is_valid({**rows[0], "schema_version": 3})


def test_a_record_of_another_identity_is_not_found(results: EvalResults, tmp_path: Path) -> None:
    write_record(results, tmp_path)
    assert find_record({**results.identity, "delta": "c" * 64}, tmp_path) is None


def test_two_runs_with_equal_results_write_equal_samples(results: EvalResults, tmp_path: Path) -> None:
    first = write_record(results, tmp_path / "a")
    second = write_record(replace(results, seconds=9.0), tmp_path / "b")
    assert samples_path(first).read_bytes() == samples_path(second).read_bytes()


def test_a_second_record_of_one_identity_replaces_the_first(results: EvalResults, tmp_path: Path) -> None:
    write_record(results, tmp_path)
    renamed = replace(results, model="me/other")
    path = write_record(renamed, tmp_path)
    assert sorted(tmp_path.rglob("*.json*")) == [path, samples_path(path)]
    assert find_record(results.identity, tmp_path) == renamed


def test_a_record_is_found_by_the_beginning_of_its_id(results: EvalResults, tmp_path: Path) -> None:
    path = write_record(results, tmp_path)
    assert named_record(path.stem[:6], tmp_path) == path
    with pytest.raises(GymError, match="no record ffff") as caught:
        named_record("ffff" * 4, tmp_path)
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND


@pytest.mark.parametrize("model", ["../../etc/passwd", "me/mine", "runs/a/b", "", "C:\\models\\x", "a" * 500])
def test_a_record_stays_in_its_folder_whatever_the_model_is_called(model: str, tmp_path: Path) -> None:
    path = write_record(results_of(choice_task("t", [True]), model=model or "."), tmp_path / "evals")
    assert path.resolve().is_relative_to(tmp_path / "evals" / "data")
    assert len(path.relative_to(tmp_path / "evals").parts) == 5


def test_a_figure_that_is_no_number_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    task = choice_task("t", [True])
    with pytest.raises(GymError, match="t: acc: nan is not a finite number"):
        write_record(results_of(replace(task, figures={"acc": Figure(math.nan, None, 1)})), tmp_path)
    assert not list(tmp_path.rglob("*.json"))


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.update(schema_version="9.9"), "schema_version"),
        (lambda d: d.update(more=1), "more: Extra inputs"),
        (lambda d: d["detailed_evaluation_results"].update(file_path="../../etc/passwd"), "file_path"),
        (
            lambda d: d["detailed_evaluation_results"].update(
                file_path="data/tiny/local/gym-nano/00000000-0000-4000-8000-000000000000_samples.jsonl"
            ),
            "belong to another record",
        ),
        (lambda d: d["detailed_evaluation_results"].update(total_rows=1), "more than the 1 line"),
        (lambda d: d["detailed_evaluation_results"].update(checksum="0" * 64), "truncated or changed"),
        (lambda d: d["evaluation_results"].append(d["evaluation_results"][0]), "twice"),
        (lambda d: d["evaluation_results"].pop(0), "which is not in the document"),
        (lambda d: d["evaluation_results"][0]["score_details"].update(score="1"), "score_details.score"),
        (lambda d: d["model_info"]["additional_details"].update({"identity.model": "f"}), "its identity"),
        (lambda d: d["eval_library"]["additional_details"].update(facts="[" * 9000), "facts"),
        (lambda d: d["eval_library"]["additional_details"].update(seconds="nan"), "not a number"),
    ],
)
def test_a_document_that_was_altered_is_refused_with_the_place(
    change: Change, problem: str, results: EvalResults, tmp_path: Path
) -> None:
    path = write_record(results, tmp_path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(GymError, match=problem) as caught:
        read_record(path)
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert str(path.parent) in caught.value.message


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda line: line[:-20] + "\n", "line 1"),
        (lambda line: line.replace('"cut": "3"', '"cut": "4"'), "truncated or changed"),
        (lambda line: line.replace("[1e-300, 0.1]", "[NaN]"), "not a number"),
        (lambda line: line.replace("[1e-300, 0.1]", "[" * 5000), "metadata"),
        (lambda line: line.replace('"sample_id": "0"', '"sample_id": "7"'), "comes after"),
        (lambda line: line.replace('"evaluation_id": "tiny', '"evaluation_id": "huge'), "another run"),
        (lambda line: "[]\n", "line 1"),
        (lambda line: "", "truncated or changed"),
        (lambda line: '"' + "x" * (17 << 20) + '"\n', "longer than"),
    ],
)
def test_samples_that_were_altered_are_refused_with_the_line(
    change: Callable[[str], str], problem: str, results: EvalResults, tmp_path: Path
) -> None:
    path = write_record(results, tmp_path)
    file = samples_path(path)
    first, *others = file.read_text().splitlines(keepends=True)
    file.write_text(change(first) + "".join(others))
    with pytest.raises(GymError, match=problem) as caught:
        read_record(path)
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_a_record_whose_samples_are_gone_says_which_file_is_missing(
    results: EvalResults, tmp_path: Path
) -> None:
    path = write_record(results, tmp_path)
    samples_path(path).unlink()
    with pytest.raises(GymError, match=r"_samples\.jsonl"):
        find_record(results.identity, tmp_path)


def test_the_id_of_a_record_does_not_depend_on_the_order_of_its_identity() -> None:
    assert record_id({"a": "1", "b": "2"}) == record_id({"b": "2", "a": "1"}) != record_id({"a": "1"})


def test_half_a_character_in_a_row_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    task = answer_task("t", ["4"])
    torn = replace(task, samples=(replace(task.samples[0], prompt="half \ud83d"),))
    (sample,) = read_record(write_record(results_of(torn), tmp_path)).tasks["t"].samples
    assert sample == replace(torn.samples[0], prompt="half \ufffd")


def test_the_file_for_the_hub_has_the_tasks_that_the_hub_has_rows_of(results: EvalResults) -> None:
    text = eval_results_yaml(results, {"wet": HubDataset("me/wet", revision="abc")}, date="2026-01-02")
    (entry,) = parse_eval_result_entries(yaml.safe_load(text))
    assert (entry.dataset_id, entry.task_id, entry.dataset_revision) == ("me/wet", "default", "abc")
    assert entry.value == pytest.approx(2 / 3)
    assert entry.notes == "acc, 0-shot, n=3, standard error 0.0500; gym-fed"
