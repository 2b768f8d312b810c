"""`gym eval MODEL`: figures, what is cached, many variants in one pass, a comparison, and what is refused."""

from __future__ import annotations

import errno
import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.models import nano_path
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.records.document import record_id, samples_path
from gym_fed.evaluation.running import RunningFile
from gym_fed.evaluation.scoring.scorer import Loglikelihood
from tests.support.adapters import run as train
from tests.support.adapters import sibling
from tests.support.eval_command import evaluated, refused, run
from tests.support.nano_store import nano_store

NAMES = ("France", "Norway", "Canada", "Brazil", "Mexico", "Poland")
OWN_TASK = """
task: first
dataset_kwargs: {data_files: {test: test.jsonl, train: train.jsonl}}
test_split: test
fewshot_split: train
num_fewshot: 1
output_type: multiple_choice
doc_to_text: "The first letters of {{country}} are"
doc_to_choice: "{{cities}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
WORDS = ("--tasks", "tiny_capital,tiny_choice", "--limit", "6")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))


def test_a_model_is_evaluated_and_the_same_command_reads_the_record() -> None:
    first = run("gym-nano", *WORDS)
    assert "1.000 ± 0.000" in first.stdout  # gym-nano knows capitals
    assert "chat template: applied to tiny_text; not to tiny_choice" in first.stderr
    again = run("gym-nano", *WORDS)
    assert again.stdout == first.stdout
    (record,) = Path("evals").rglob("*-*.json")
    assert f"cached: gym-nano was not run again: {record}" in again.stderr
    assert evaluated("gym-nano", *WORDS)["runs"][0]["cached"]
    assert not evaluated("gym-nano", *WORDS, "--fresh")["runs"][0]["cached"]


def test_a_group_has_the_mean_over_the_rows_of_its_tasks() -> None:
    run = evaluated("gym-nano", "--tasks", "tiny_capital,tiny_double,tiny_choice", "--limit", "6")["runs"][0]
    (group,) = run["groups"].values()
    assert group["figures"]["exact_match"]["value"] == 0.5  # it knows all capitals, and cannot double
    assert group["figures"]["exact_match"]["stderr"] == pytest.approx((0.25 / 11) ** 0.5)
    assert group["figures"]["exact_match"]["num_samples"] == 12
    assert list(run["groups"]) == ["tiny_text (2 tasks)"]


def test_two_runs_of_one_key_give_the_same_bytes_of_samples() -> None:
    found = [evaluated("gym-nano", *WORDS, "--output", folder)["runs"][0] for folder in ("a", "b")]
    one, other = (samples_path(Path(run["file"])).read_bytes() for run in found)
    assert one == other
    assert one.count(b"\n") == 12


def test_variants_of_one_base_are_evaluated_in_one_pass_and_known_ones_are_left_out() -> None:
    nano_store(Path("store"), ["ann", "bob"])
    words = (*WORDS, "--variants", "store")
    evaluated("gym-nano", *words, "--variant", "ann")
    runs = evaluated("gym-nano", *words)["runs"]
    assert [(run["model"], run["cached"]) for run in runs] == [
        ("gym-nano", False),
        ("gym-nano:ann", True),
        ("gym-nano:bob", False),
    ]
    assert {run["facts"]["models_in_pass"] for run in runs if not run["cached"]} == {2}
    alone = evaluated("gym-nano", *WORDS, "--output", "alone")["runs"][0]
    assert runs[0]["tasks"] == alone["tasks"]
    shown = run("gym-nano", *words).stdout
    assert all(f" {name} " in shown for name in ("gym-nano", "gym-nano:ann", "gym-nano:bob"))


def test_a_delta_file_is_what_its_variant_is() -> None:
    nano_store(Path("store"), ["ann"])
    (variant,) = evaluated("gym-nano", *WORDS, "--variants", "store", "--variant", "ann")["runs"]
    delta = evaluated("store/ann.gymdelta", *WORDS, "--base", "gym-nano", "--fresh")["runs"][0]
    assert (delta["id"], delta["tasks"]) == (variant["id"], variant["tasks"])


@pytest.mark.parametrize("other", ["a model", pytest.param("a record", marks=pytest.mark.slow)])
def test_two_models_are_compared_row_by_row(other: str) -> None:
    nano_store(Path("store"), ["ann"])
    words = (*WORDS, "--variants", "store", "--variant", "ann")
    other = evaluated("gym-nano", *WORDS)["runs"][0]["id"][:8] if other == "a record" else "gym-nano"
    found = evaluated("gym-nano", *words, "--compare", other)
    assert [run["model"] for run in found["runs"]] == ["gym-nano:ann", "gym-nano"]
    (compared,) = found["comparisons"]
    paired = compared["tasks"]["tiny_capital"]["metrics"]["exact_match"]
    assert paired["num_samples"] == 6
    changed, base = (run["tasks"]["tiny_capital"]["figures"]["exact_match"]["value"] for run in found["runs"])
    assert base == 1.0
    assert paired["difference"] == pytest.approx(changed - base)
    assert paired["difference"] < -0.5  # random signs forget most capitals
    assert paired["upper"] < 0
    assert (paired["first_only"], paired["second_only"]) == (0, round(6 * (base - changed)))
    assert f"{paired['difference']:.4f}" in run("gym-nano", *words, "--compare", other).stdout


def test_the_template_is_what_the_option_says_for_all_tasks() -> None:
    applied = evaluated("gym-nano", *WORDS, "--apply-chat-template")["runs"][0]
    plain = evaluated("gym-nano", *WORDS, "--no-chat-template")["runs"][0]
    usual = evaluated("gym-nano", *WORDS)["runs"][0]
    assert len({run["id"] for run in (applied, plain, usual)}) == 3
    values = [
        run["tasks"]["tiny_capital"]["figures"]["exact_match"]["value"] for run in (applied, plain, usual)
    ]
    assert values == [1.0, 0.0, 1.0]
    assert usual["tasks"]["tiny_choice"] == plain["tasks"]["tiny_choice"]


def test_an_unknown_task_is_refused_with_the_nearest_names() -> None:
    error = refused("gym-nano", "--tasks", "tiny_captial")
    assert error.code is ErrorCode.USAGE
    assert "tiny_capital" in error.hint


def test_a_missing_set_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    shutil.copytree(nano_path(), tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no weights")
    error = refused("broken", "--tasks", "hellaswag")
    assert error.code is ErrorCode.UNAVAILABLE
    assert "gym eval fetch hellaswag" in error.hint
    assert refused("broken", "--tasks", "tiny_capital").code is ErrorCode.MODEL_INVALID


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gym-nano",), "no rows or suites to evaluate on"),
        (("--suite", "tiny"), "MODEL is missing"),
        (("model.onnx", "--suite", "tiny"), "ONNX models cannot be evaluated"),
        (("gym-nano", "--suite", "tiny", "--base", "gym-nano"), "--base applies only to a .gymdelta"),
        (
            ("m", "--suite", "tiny", "--api", "http://127.0.0.1:1", "--variant", "a"),
            "cannot be combined with --api",
        ),
        (
            ("m", "--suite", "tiny", "--api", "http://127.0.0.1:1", "--dtype", "bfloat16"),
            "--dtype cannot be combined",
        ),
        (("gym-nano", "--suite", "tiny", "--api-key-env", "KEY"), "needs --api"),
    ],
)
def test_what_does_not_go_together_is_refused(words: tuple[str, ...], said: str) -> None:
    assert said in refused(*words).message


def test_a_first_word_that_is_no_command_is_the_model() -> None:
    assert "--num-fewshot" in run("run", "--help").stdout
    assert "tiny_arithmetic" in run("list").stdout
    assert "replay" in run("--help").stdout


def test_a_run_an_adapter_and_the_model_that_they_make_are_one(tmp_path: Path) -> None:
    base = sibling("Qwen3", tmp_path / "base")
    train(tmp_path / "trained", model=str(base))
    words = ("--tasks", "tiny_capital,tiny_choice", "--limit", "2")
    found = [
        evaluated(*model, *words)["runs"][0]
        for model in (("trained",), ("base", "--adapter", "trained"), ("base",))
    ]
    assert found[0]["id"] == found[1]["id"] != found[2]["id"]
    assert [one["cached"] for one in found] == [False, True, False]


def test_a_variant_is_named_behind_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    nano_store(Path("store"), ["ann"])
    monkeypatch.setenv("GYM_VARIANTS", "store")
    (run,) = evaluated("gym-nano:ann", *WORDS)["runs"]
    assert (run["model"], run["identity"]["delta"] != "none") == ("gym-nano:ann", True)


def test_a_sample_is_replayed_with_its_examples_and_template(tmp_path: Path) -> None:
    rows = [{"country": name, "cities": [name[:3], name[::-1]], "answer": 0} for name in NAMES]
    for split in ("test", "train"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "first.yaml").write_text(OWN_TASK)
    words = ("--tasks", "first.yaml,tiny_capital", "--num-fewshot", "2", "--limit", "4")
    assert "--num-fewshot 2: not supported by tiny_capital" in run("gym-nano", *words).stderr
    (run_,) = evaluated("gym-nano", *words)["runs"]
    assert run_["tasks"]["first"]["num_fewshot"] == 2
    for task, file in (("first", ["--task-file", "first.yaml"]), ("tiny_capital", [])):
        replayed = evaluated("replay", run_["id"][:8], "--task", task, "--sample", "3", *file)
        assert (replayed["same"], replayed["identity_differs"]) == (True, {})
    prompt = evaluated("show", run_["id"][:8], "--samples", "4")["tasks"]["first"]["samples"][3]["prompt"]
    assert prompt.count("The first letters of") == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtype", "float8"], "dtype 'float8' is not supported"),
        (["--compare", "nosuch"], "--compare: no record in evals has this id, and as a model: nosuch"),
        (["--variant", "ann"], "no variant store at"),
        (["--variants", "store", "--variant", "nosuch"], "no variant 'nosuch'"),
        (["--tasks", "mine.yaml"], "no task file at"),
        (["--tasks", "rows.jsonl"], "no known format has the columns 'q', 'a'"),
        (["--tasks", "asked.jsonl"], "asked.jsonl: row 1 does not end with an answer"),
        (["--output", "rows.jsonl"], "rows.jsonl is a file, not a folder"),
    ],
)
def test_what_is_wrong_beside_the_model_is_refused_before_it_is_loaded(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("gym_fed.evaluation.evaluator.open_models", lambda request: pytest.fail("loaded"))
    nano_store(Path("store"), ["bob"])
    Path("rows.jsonl").write_text('{"q": "Who?", "a": "I"}\n')
    Path("asked.jsonl").write_text('{"prompt": "Who?"}\n')
    error = refused("gym-nano", "--tasks", "tiny_capital", *words)
    assert message in error.message
    if "rows.jsonl" in words and "--tasks" in words:
        assert "--data FILE --columns" in error.hint, "--tasks has no such option"


def test_a_second_process_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lock is one of the open file, so that another open file stands for another process."""
    words = ("gym-nano", *WORDS)

    def loads(request: Any) -> Any:
        monkeypatch.setattr("gym_fed.evaluation.evaluator.open_models", lambda request: pytest.fail("loaded"))
        error = refused(*words)
        assert error.code is ErrorCode.BUSY
        assert "wait until it ends" in error.hint
        assert "--output" in error.hint
        raise GymError(ErrorCode.MODEL_INVALID, "the first one ends")

    monkeypatch.setattr("gym_fed.evaluation.evaluator.open_models", loads)
    assert refused(*words).code is ErrorCode.MODEL_INVALID
    assert not list(Path("evals/.running").iterdir()), "the lock is given back"


class FullDisk(StringIO):
    """A file of a disk that has no room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_names_the_file_that_outcomes_go_to(tmp_path: Path) -> None:
    identity = {"model": "a"}
    path = tmp_path / ".running" / f"{record_id(identity)}.jsonl"
    with RunningFile(tmp_path, {"base": identity}) as running:
        running._files["base"] = FullDisk()
        with pytest.raises(GymError) as caught:
            running.add(("task", 0, 0, 0), {"base": Loglikelihood(-1.0, True, 0)})
    assert caught.value.code is ErrorCode.DISK_FULL
    assert str(path) in caught.value.message
