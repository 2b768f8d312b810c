"""`gym eval MODEL --data FILE`: the user's own rows, before and after, and what is refused before a model is loaded."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.cli.main import app
from gym_fed.core import progress
from gym_fed.core.errors import ErrorCode
from gym_fed.data import generate
from gym_fed.evaluation import own_evaluation
from gym_fed.evaluation.loss import row_losses
from gym_fed.evaluation.own_set import Rendering, read_own_rows, render
from gym_fed.evaluation.retention import retention_items
from tests.support.adapters import run as train_adapter
from tests.support.eval_command import evaluated, refused, run
from tests.support.nano_store import nano_store

WORDS = [
    "stone", "river", "cloud", "tiger", "lamp", "wheel", "paper", "green", "light", "mouse", "apple", "bread",
    "chair", "dance", "eagle", "flame", "grape", "house", "island", "jewel", "knife", "lemon", "music", "night",
    "ocean", "plant", "queen", "robot", "sheep", "table",
]  # fmt: skip
COLUMNS = ("--columns", "prompt=question,completion=answer")


def write_csv(
    file: Path, rows: list[tuple[str, ...]], names: tuple[str, ...] = ("question", "answer")
) -> None:
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(names)
        writer.writerows(rows)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``mine.csv`` and ``run``, in which gym-nano has learned its rows by `gym train`."""
    folder = tmp_path_factory.mktemp("trained")
    write_csv(folder / "mine.csv", [(f"Say {word} twice.", f"{word} {word}") for word in WORDS])
    words = ["train", "--model", "gym-nano", "--data", str(folder / "mine.csv"), *COLUMNS]
    settings = ["--output-dir", str(folder / "run"), "--max-steps", "40", "--no-check", "--device", "cpu"]
    done = CliRunner().invoke(app, [*words, *settings])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def check_fewer_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_evaluation, "retention_items", lambda tokenizer: retention_items(tokenizer)[:24])


def test_a_run_is_compared_with_its_base_on_the_users_rows(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_fewer_items(monkeypatch)
    learned = [(f"Say {word} twice.", f"{word} {word}") for word in WORDS[:9]]
    other = [(f"Say {word} twice.", f"{word} {word}!") for word in WORDS[9:15]]
    write_csv(Path("mine.csv"), learned + other)
    words = (str(trained / "run"), "--data", "mine.csv", *COLUMNS, "--limit", "12")
    pattern = 'regex:{pattern: "^[a-z]+ [a-z]+$"}'
    found = evaluated(*words, "--grader", "exact", "--grader", pattern)
    assert found["reference"] == "gym-nano"
    assert found["reference_is_base"] is True
    metrics = found["metrics"]
    assert set(metrics) == {"loss", "exact_match", "exact", "regex"}
    assert {metric["num_rows"] for metric in metrics.values()} == {12}
    loss = metrics["loss"]
    assert loss["change"] < -4 * loss["change_stderr"] < 0
    assert loss["change"] == pytest.approx(loss["value"] - loss["before"])
    exact = metrics["exact_match"]
    assert exact["before"] == 0.0
    assert exact["change"] > 2 * exact["change_stderr"] > 0
    assert {key: exact[key] for key in ("value", "change_stderr")} == {
        key: metrics["exact"][key] for key in ("value", "change_stderr")
    }
    right = [sample["after"]["answer"] == sample["reference"] for sample in found["samples"]]
    assert sum(right) / 12 == exact["value"]
    assert not any(right[9:]), "the run has learned other answers to these"
    assert found["samples"][0]["place"].endswith("mine.csv:2")
    assert found["retention"]["num_items"] == 24
    assert found["retention"]["is_lost"] is any("general knowledge" in each for each in found["warnings"])


def test_rows_that_the_run_has_learned_are_counted(trained: Path, tmp_path: Path) -> None:
    fresh = [("Say zebra twice.", "zebra zebra"), (f"Say {WORDS[0]} twice.", f"{WORDS[0]} {WORDS[0]}")]
    write_csv(tmp_path / "own.csv", fresh)
    run_and_rows = (str(trained / "run"), "--data", "own.csv", *COLUMNS, "--no-check")
    assert any(
        note.startswith("1 of 2 rows are in the training data of this run")
        for note in evaluated(*run_and_rows)["notes"]
    )
    write_csv(tmp_path / "own.csv", fresh[:1])
    assert not any("in the training data of this run" in note for note in evaluated(*run_and_rows)["notes"])


def test_the_loss_on_own_rows_is_that_of_training(trained: Path) -> None:
    found = evaluated(
        str(trained / "run"), "--data", str(trained / "mine.csv"), *COLUMNS, "--limit", "5", "--no-check"
    )
    loaded = load_model(str(trained / "run"))
    rows = [{"prompt": f"Say {word} twice.", "completion": f"{word} {word}"} for word in WORDS[:5]]
    losses = row_losses(loaded.model, loaded.tokenizer, rows, max_length=256)
    assert [sample["after"]["loss"] for sample in found["samples"]] == pytest.approx(losses, abs=1e-4)
    assert found["retention"] is None


def test_the_table_shows_before_after_and_the_change_with_errors_and_what_is_computed(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.02)
    check_fewer_items(monkeypatch)
    done = run(str(trained / "run"), "--data", str(trained / "mine.csv"), *COLUMNS, "--limit", "6")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["metric", "n", "before", "after", "change"]
    assert lines[1][:5] == ["loss,", "nats", "per", "token", "6"]
    assert done.stdout.count("±") == 7, "three figures of two metrics, and what was kept"
    assert "6 rows of " in done.stderr
    assert "0 cut to 256 tokens, 0 with nothing to predict" in done.stderr
    assert re.search(r"^loading .* \(\d+ s\)$", done.stderr, re.MULTILINE), done.stderr
    assert re.search(r"computing retention: [1-9]\d* of 48 \(", done.stderr), done.stderr


def test_rows_that_are_cut_are_counted_at_the_runs_own_length(tmp_path: Path) -> None:
    train_adapter(tmp_path / "adapter", model="gym-nano")
    rows = [("Say this.", "word " * 60), ("Say that.", "short")]
    write_csv(Path("mine.csv"), rows)
    found = evaluated("adapter", "--data", "mine.csv", *COLUMNS, "--no-check")
    assert found["reference"] == "gym-nano"
    assert found["rows"]["max_length"] == 48
    assert found["rows"]["cut"] == 1
    assert found["metrics"]["loss"]["num_rows"] == 2
    assert found["metrics"]["exact_match"]["num_rows"] == 1, "the long answer is not compared as a whole"


def test_a_variant_is_compared_with_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fewer_items(monkeypatch)
    nano_store(Path("store"), ["ann"])
    monkeypatch.setenv("GYM_VARIANTS", "store")
    write_csv(Path("mine.csv"), [("What is the capital of France?", "Paris"), ("Copy: abc", "abc")])
    found = evaluated("gym-nano:ann", "--data", "mine.csv", *COLUMNS)
    loss = found["metrics"]["loss"]
    assert loss["before"] != loss["value"]
    assert found["retention"]["before"] != found["retention"]["after"]
    assert found["reference"] == "gym-nano"
    alone = evaluated("gym-nano", "--data", "mine.csv", *COLUMNS, "--no-check")
    assert alone["metrics"]["loss"]["value"] == pytest.approx(loss["before"], abs=1e-5)
    assert alone["metrics"]["loss"]["change"] is None
    assert alone["notes"] == ["not compared: the base of the model is unknown; pass one with --compare MODEL"]


def test_another_model_takes_the_place_of_the_base(trained: Path) -> None:
    words = ("--data", str(trained / "mine.csv"), *COLUMNS, "--limit", "4", "--no-check")
    found = evaluated("gym-nano", *words, "--compare", str(trained / "run"))
    assert found["reference_is_base"] is False
    assert found["metrics"]["loss"]["change"] > 0
    assert any("worse on these rows" in warning for warning in found["warnings"])


@pytest.mark.shared
def test_a_model_without_a_chat_template_is_evaluated_on_pairs_and_on_texts(shared_folder: Path) -> None:
    pairs = [
        {"prompt": "Once upon", "completion": " a time"},
        {
            "prompt": "The sun",
            "completion": " is warm and the birds sing in the trees all day long until night",
        },
    ]
    texts = [{"text": "Once upon a time there was a little girl who liked to play in the park."}]
    name = str(shared_folder / "models/stories260K")
    loaded = load_model(name)
    for file, rows in (("pairs.jsonl", pairs), ("texts.jsonl", texts)):
        Path(file).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        found = evaluated(name, "--data", file, "--compare", name)
        losses = row_losses(loaded.model, loaded.tokenizer, rows, max_length=512)
        assert [sample["after"]["loss"] for sample in found["samples"]] == pytest.approx(losses, abs=1e-4)
        assert found["metrics"]["loss"]["change"] == 0
        if rows is texts:
            assert "exact_match" not in found["metrics"]
            assert found["samples"][0]["after"]["answer"] is None
        else:
            assert found["metrics"]["exact_match"]["num_rows"] == 1
            assert found["samples"][0]["after"]["answer"].strip().startswith("a time")
            assert found["samples"][1]["after"]["answer"] is None


def test_rows_of_prompts_alone_are_graded_and_their_columns_are_read() -> None:
    (known,) = generate("capital", 1)
    rows = [
        {"prompt": known["messages"][:1], "wanted": known["messages"][1]["content"]},
        {"prompt": [{"role": "user", "content": "Hi"}], "wanted": "x"},
    ]
    Path("mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = evaluated("gym-nano", "--data", "mine.jsonl", "--grader", "exact:{column: wanted}", "--no-check")
    assert list(found["metrics"]) == ["exact"]
    assert [sample["after"]["exact"] for sample in found["samples"]] == [1.0, 0.0]


def test_columns_beside_prompt_and_answer_reach_the_graders() -> None:
    (known,) = generate("capital", 1)
    asked, answered = (message["content"] for message in known["messages"])
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"It is {answered}."}]
    Path("mine.jsonl").write_text(json.dumps({"messages": messages, "short": answered}))
    found = evaluated("gym-nano", "--data", "mine.jsonl", "--grader", "exact:{column: short}", "--no-check")
    assert found["metrics"]["exact"]["value"] == 1.0
    assert found["metrics"]["exact_match"]["value"] == 0.0


def test_answers_that_do_not_end_are_a_warning_that_names_the_option(trained: Path) -> None:
    words = (str(trained / "run"), "--data", str(trained / "mine.csv"), *COLUMNS, "--limit", "3")
    found = evaluated(*words, "--no-check", "--max-tokens", "1")
    assert "3 of 3 answers did not end within 1 token: raise --max-tokens" in " ".join(found["warnings"])


@pytest.mark.parametrize(
    ("words", "code", "message", "hint"),
    [
        (
            ["mine.csv", "--columns", "prompt=q,completion=b"],
            "data-invalid",
            "mine.csv:2: has no column",
            "use one of its columns: q, a",
        ),
        (
            ["asked.jsonl"],
            "data-invalid",
            "asked.jsonl:1 has no answer; its columns are prompt",
            "--columns",
        ),
        (["empty.csv"], "data-invalid", "empty.csv contains no rows", "at least one row"),
        (["nosuch.csv"], "file-not-found", "no data file at nosuch.csv", "use the path"),
        (["."], "usage", "--data . is a folder", "--suite"),
        (
            ["said.jsonl", "--grader", "nosuch"],
            "config-invalid",
            "--grader nosuch: unknown grader 'nosuch'",
            "",
        ),
        (["said.jsonl", "--grader", "regex:{patern: x}"], "config-invalid", "did you mean 'pattern'", ""),
        (["said.jsonl", "--grader", "regex:x"], "usage", "settings are not a mapping", "NAME:{key: value}"),
        (
            ["said.jsonl", "--grader", "exact", "--grader", "exact"],
            "usage",
            "are called 'exact'",
            "name: second",
        ),
        (
            ["said.jsonl", "--grader", "code_tests"],
            "data-invalid",
            "said.jsonl:1: grader code_tests reads",
            "tests=",
        ),
        (
            ["said.jsonl", "--grader", "numeric"],
            "data-invalid",
            "said.jsonl:1: grader numeric",
            "use a number",
        ),
        (
            ["text.jsonl", "--grader", "exact"],
            "data-invalid",
            "text.jsonl:1 is a supervised row",
            "use a prompt",
        ),
        (["said.jsonl", "--num-fewshot", "2"], "usage", "--num-fewshot needs --suite", "leave it out"),
        (
            ["said.jsonl", "--suite", "tiny", "--grader", "exact"],
            "usage",
            "--grader needs --data FILE",
            "leave",
        ),
        (["said.jsonl", "--variant", "ann,bob"], "usage", "one variant at a time", "--variant NAME"),
    ],
)
def test_wrong_input_is_refused_before_a_model_is_loaded(
    words: list[str], code: str, message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gym_fed.evaluation.own_evaluation.dense_model", lambda *_: pytest.fail("a model was loaded")
    )
    write_csv(Path("mine.csv"), [("Who?", "I")], ("q", "a"))
    Path("empty.csv").touch()
    Path("asked.jsonl").write_text('{"prompt": "Who?"}\n')
    Path("said.jsonl").write_text('{"prompt": "Who?", "completion": "I"}\n')
    Path("text.jsonl").write_text('{"text": "Who?"}\n')
    error = refused("gym-nano", "--data", *words)
    assert error.code.value == code
    assert message in error.message
    assert hint in error.hint


def test_other_names_of_columns_are_guessed_and_the_complete_option_is_named() -> None:
    write_csv(Path("mine.csv"), [("Who?", "It is I.")], ("Customer question", "Our answer"))
    error = refused("gym-nano", "--data", "mine.csv")
    assert error.code is ErrorCode.DATA_INVALID
    assert "--columns 'prompt=Customer question,completion=Our answer'" in error.hint
    found = evaluated("gym-nano", "--data", "mine.csv", "--yes", "--no-check")
    assert found["samples"][0]["reference"] == "It is I."


def test_a_runs_system_message_and_chat_turns_are_part_of_the_prompt() -> None:
    tokenizer = load_tokenizer("gym-nano")
    write_csv(Path("mine.csv"), [("Who?", "I")])
    rows = read_own_rows("mine.csv", {"prompt": "question", "completion": "answer"})
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    wanted = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    _, prompts = render(tokenizer, rows, Rendering(default_system="Be brief."), 256)
    assert prompts == [list(wanted)]


def test_neither_rows_nor_a_suite_is_refused_with_both_options() -> None:
    error = refused("gym-nano")
    assert error.code is ErrorCode.USAGE
    assert "--data FILE" in error.hint
    assert "--suite" in error.hint


def test_a_base_that_is_gone_is_named_and_the_run_is_evaluated_alone(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for file in (trained / "run").iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("model: gym-nano", "model: away/gone"))
    found = evaluated("./run", "--data", str(trained / "mine.csv"), *COLUMNS, "--limit", "3", "--no-check")
    assert found["reference"] is None
    assert "was made from away/gone, which is not on this machine" in found["notes"][0]
    assert "--compare" in found["notes"][0]


def test_turns_that_the_run_has_learned_in_another_way_are_named(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    config["data"][0] |= {"roles_to_train": ["user", "assistant"], "train_on_eos": "last"}
    file.write_text(yaml.safe_dump(config))
    found = evaluated("./run", "--data", str(trained / "mine.csv"), *COLUMNS, "--limit", "3", "--no-check")
    assert any(
        "set roles_to_train and train_on_eos; this evaluation's loss covers" in note
        for note in found["notes"]
    )
