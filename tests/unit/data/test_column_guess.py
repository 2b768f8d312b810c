"""Columns of other names: what is guessed, how the guess is shown, asked and refused, and the option that names it."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.column_guess import columns_option, columns_text, guess_columns
from gym_fed.data.column_question import agreed_columns
from gym_fed.data.reading import load_rows, parse_columns

LONG = "Open the settings, choose Reset, and wait for the lamp to turn green."


@pytest.fixture(autouse=True)
def _nothing_is_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYM_AGREED_COLUMNS", raising=False)


def table(file: Path, *names: str, rows: int = 8) -> Path:
    """A CSV whose first columns are a question and an answer, and whose others are codes."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(names)
        for number in range(rows):
            writer.writerow([f"How is item {number} reset?", f"{LONG} {number}", *["x1"] * (len(names) - 2)])
    return file


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        *(("Customer question", "Our answer"), ("question", "answer"), ("Q", "A"), ("QUESTION", "ANSWER")),
        *(("Instruction", "Response"), ("Input", "Output"), ("Prompt", "Completion"), ("query", "reply")),
        *(("Text", "Label"), ("human", "assistant"), ("User", "Bot"), ("problem", "solution")),
        *(
            ("user_prompt", "model_response"),
            ("customer-query", "agent-reply"),
            ("userQuestion", "botAnswer"),
        ),
        *(("questions", "answers"), ("prompts", "responses"), ("Queries", "Replies"), ("inputs", "outputs")),
        *(("userQuestions", "Model Responses"), ("Customers", "Agents"), ("tasks", "solutions")),
        *(("question_text", "gold answer"), ("Customer", "Agent"), ("human", "gpt"), ("sentence", "label")),
    ],
)
def test_common_names_are_recognised_in_any_spelling_and_order(question: str, answer: str) -> None:
    row = {question: "How?", answer: "So."}
    for sample in (row, dict(reversed(row.items())), {"id": "7", "category": "help", **row}):
        guess = guess_columns([sample])
        assert guess is not None
        assert guess.columns == {"prompt": question, "completion": answer}
        assert not guess.by_length
        assert set(guess.unread) == set(sample) - set(row)


def test_the_longest_texts_are_the_answer_where_no_name_says_it() -> None:
    rows = [
        {"id": f"A-{n}", "thema": "Wie geht das?", "eintrag": LONG, "datum": "2026-01-01"} for n in range(5)
    ]
    guess = guess_columns(rows)
    assert guess is not None
    assert (guess.columns, guess.by_length) == ({"prompt": "thema", "completion": "eintrag"}, True)
    asked = guess_columns([{"question": "How is it reset?", "notes": LONG, "short": "one two"}])
    assert asked is not None
    assert asked.columns == {"prompt": "question", "completion": "notes"}
    single = guess_columns([{"id": "1", "story": LONG}])
    assert single is not None
    assert single.columns == {"text": "story"}
    assert guess_columns([{"id": 1, "price": 2.5}]) is None
    assert guess_columns([{"id": "A1", "code": "B2"}]) is None


@pytest.mark.parametrize(
    ("names", "question", "answer"),
    [
        (("context", "question", "answers"), "question", "answers"),
        (("questions", "answers"), "questions", "answers"),
        (("prompts", "responses"), "prompts", "responses"),
        (("contexts", "questions", "answer"), "questions", "answer"),
        (("QUERIES", "Best Replies"), "QUERIES", "Best Replies"),
        (("categories", "sentences"), "sentences", "categories"),
        (("instruction", "inputs", "note"), "instruction", "note"),
        (("context", "question", "note"), "question", "note"),
        (("passages", "headline"), "passages", "headline"),
        (("outputs", "remark", "answers"), "remark", "answers"),
    ],
)
def test_names_outweigh_the_length_of_texts(names: tuple[str, ...], question: str, answer: str) -> None:
    """Each column is longer than the next."""
    row = {name: f"{LONG} " * (len(names) - at) for at, name in enumerate(names)}
    for sample in (row, dict(reversed(row.items()))):
        guess = guess_columns([sample])
        assert guess is not None
        assert guess.columns == {"prompt": question, "completion": answer}


@pytest.mark.parametrize("answers", [{"text": ["Lima"], "answer_start": [3]}, ["Lima"], 7])
def test_no_other_column_is_guessed_for_answers_that_are_not_texts(answers: object) -> None:
    assert (
        guess_columns([{"title": "On Peru", "context": LONG, "question": "How?", "answers": answers}]) is None
    )


def test_questions_alone_are_not_guessed_to_be_answers() -> None:
    assert guess_columns([{"instruction": "Name it.", "inputs": LONG}]) is None


def test_words_that_only_look_like_plurals_say_nothing() -> None:
    guess = guess_columns([{"as": "How is it reset?", "news": LONG}])
    assert guess is not None
    assert (guess.columns, guess.by_length) == ({"prompt": "as", "completion": "news"}, True)


def test_columns_of_pairs_and_of_turns_are_recognised() -> None:
    pair = guess_columns([{"Question": "How?", "Preferred answer": "So.", "Rejected answer": "No."}])
    assert pair is not None
    assert pair.columns == {"prompt": "Question", "chosen": "Preferred answer", "rejected": "Rejected answer"}
    assert guess_columns([{"Question": "How?", "Answer": "So."}], "preference") is None
    for turns, ours in (
        ([{"role": "user", "content": "a"}], "messages"),
        ([{"from": "human", "value": "a"}], "conversations"),
    ):
        found = guess_columns([{"id": 1, "dialog": turns}])
        assert found is not None
        assert found.columns == {ours: "dialog"}


@given(st.dictionaries(st.sampled_from(["prompt", "completion", "text"]), st.text(min_size=1), min_size=1))
def test_the_option_survives_the_shell_and_the_parser(columns: dict[str, str]) -> None:
    if len(set(columns.values())) < len(columns):
        return
    assert parse_columns(columns_text(columns)) == columns
    option, text = shlex.split(columns_option(columns))
    assert (option, parse_columns(text)) == ("--columns", columns)


@pytest.mark.parametrize(
    "text", ["{", '{"prompt": 1}', "{}", '{"a": "x", "a": "y"}', '{"a": "x", "b": "x"}', '["a"]']
)
def test_columns_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(GymError) as caught:
        parse_columns(text)
    assert caught.value.code is ErrorCode.USAGE


@pytest.mark.parametrize(
    "names",
    [
        ("Customer question", "Our answer", "category"),
        ("Question, asked", " Answer"),
        ("a=b question", "The answer=it"),
    ],
)
def test_the_refusal_without_a_terminal_is_followed_by_a_command_that_works(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    file = table(tmp_path / "q.csv", *names)
    with pytest.raises(GymError, match=r"q\.csv:2: no known format has the columns") as caught:
        load_rows(file)
    assert caught.value.code is ErrorCode.DATA_INVALID
    flags = ["train", "--model", "gym-nano", "--data", str(file), "--max-steps", "1"]
    flags += ["--output-dir", str(tmp_path / "run")]
    refused = CliRunner().invoke(app, flags)
    assert refused.exit_code != 0
    assert isinstance(refused.exception, GymError)
    hint = refused.exception.hint
    assert hint == caught.value.hint
    option, text = shlex.split(hint.partition("add: ")[2])
    result = CliRunner().invoke(app, ["data", "show", str(file), option, text])
    assert result.exit_code == 0, result.output
    rows = load_rows(file, columns=parse_columns(text))
    assert rows[0] == {"prompt": "How is item 0 reset?", "completion": f"{LONG} 0"}


def test_yes_accepts_the_guess_and_prints_it(tmp_path: Path) -> None:
    file = table(tmp_path / "q.csv", "Customer question", "Our answer", "category")
    words = ["train", "--no-check", "--model", "gym-nano", "--data", str(file), "--max-steps", "1", "--yes"]
    result = CliRunner().invoke(app, [*words, "--output-dir", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    for words in (
        'prompt     <- "Customer question": How is item 0 reset?',
        'completion <- "Our answer": Open the settings',
    ):
        assert words in result.stderr
    assert "not read:     category" in result.stderr


def test_a_table_of_semicolons_is_trained_as_its_columns_and_the_delimiter_is_said_once(
    tmp_path: Path,
) -> None:
    file = tmp_path / "semi.csv"
    file.write_text(
        "\ufeff" + "question;answer\n" + "Hallo, wie geht es?;Gut, danke.\n" * 8, encoding="utf-8"
    )
    words = ["train", "--no-check", "--model", "gym-nano", "--data", str(file), "--max-steps", "1", "--yes"]
    result = CliRunner().invoke(app, [*words, "--output-dir", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert result.stderr.replace("\n", "").count("semi.csv: columns are separated by ';'") == 1
    assert 'prompt     <- "question": Hallo, wie geht es?' in result.stderr
    assert 'completion <- "answer": Gut, danke.' in result.stderr


def test_texts_beside_a_column_text_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "mbpp.jsonl"
    row = {"task_id": 1, "text": "Write a function that adds.", "code": "def add(a, b):\n    return a + b"}
    file.write_text((json.dumps({**row, "setup": ""}) + "\n") * 5)
    with pytest.raises(GymError, match=r"mbpp\.jsonl:1: .* column 'code' also has text") as caught:
        agreed_columns(file, kind="supervised")
    assert "add --columns text=text" in caught.value.hint
    assert caught.value.hint.endswith("add: --columns prompt=text,completion=code")
    named = {"prompt": "text", "completion": "code"}
    assert agreed_columns(file, kind="supervised", yes=True) == named
    for columns in (named, {"text": "text"}):
        assert agreed_columns(file, columns=columns, kind="supervised") == columns
        assert load_rows(file, columns=columns)
    assert agreed_columns(file, "text", kind="supervised") == {}


@pytest.mark.parametrize(
    "beside",
    [
        {"label": "positive"},
        {"url": "https://example.org/a/long/path/to/a/page.html", "timestamp": "2019-04-25T12:57:54Z"},
        {"meta": '{"source": "a long description", "date": "2019"}', "size": 7},
        {"note": None},
    ],
)
def test_labels_links_and_metadata_beside_a_column_text_need_no_question(
    tmp_path: Path, beside: dict[str, object]
) -> None:
    file = tmp_path / "raw.jsonl"
    file.write_text((json.dumps({"text": LONG, **beside}) + "\n") * 5)
    assert agreed_columns(file, kind="supervised") == {}


def in_terminal(words: list[str], typed: str, folder: Path) -> tuple[int, str]:
    """Run gym on a terminal of its own and type at its question; exit code and all that it shows."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "200", "TERM": "xterm", "GYM_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "gym_fed.cli.main", *words]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    )
    os.close(theirs)
    shown, typed_at_all = io.BytesIO(), False
    while True:
        try:
            block = os.read(ours, 4096)
        except OSError:  # the other side has ended
            break
        if not block:
            break
        shown.write(block)
        if not typed_at_all and b"[Y/n]" in shown.getvalue():
            os.write(ours, typed.encode())
            typed_at_all = True
    os.close(ours)
    return process.wait(), shown.getvalue().decode()


def test_on_a_terminal_the_guess_is_shown_with_a_row_and_enter_accepts_it(tmp_path: Path) -> None:
    file = table(tmp_path / "q.csv", "Customer question", "Our answer", "category")
    out = tmp_path / "out.jsonl"
    code, shown = in_terminal(["data", "convert", str(file), str(out), "--to", "completion"], "\n", tmp_path)
    assert code == 0, shown
    assert "Use these columns? [Y/n]" in shown
    assert '"Our answer": Open the settings' in shown
    assert json.loads(out.read_text().splitlines()[0]) == {
        "prompt": "How is item 0 reset?",
        "completion": f"{LONG} 0",
    }


def test_a_guess_that_is_declined_reads_nothing(tmp_path: Path) -> None:
    file = table(tmp_path / "q.csv", "Customer question", "Our answer")
    out = tmp_path / "out.jsonl"
    code, shown = in_terminal(["data", "convert", str(file), str(out), "--to", "completion"], "n\n", tmp_path)
    assert code != 0
    assert "specify them: --columns 'prompt=Customer question,completion=Our answer'" in shown
    assert not out.exists()


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "completion": "b"},
        {"instruction": "a", "input": "", "output": "b"},
        {"instruction": "a", "context": "c", "response": "b", "category": "d"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"text": "a", "label": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ],
)
def test_layouts_that_are_known_are_read_without_a_question(tmp_path: Path, row: dict[str, object]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert agreed_columns(file, kind="supervised") == {}
    assert load_rows(file)


def test_dollys_columns_are_read_as_alpacas(tmp_path: Path) -> None:
    file = tmp_path / "dolly.jsonl"
    file.write_text(
        json.dumps(
            {"instruction": "Name it.", "context": "A red fruit.", "response": "Apple.", "category": "qa"}
        )
        + "\n"
    )
    (row,) = load_rows(file)
    assert row == {
        "messages": [
            {"role": "user", "content": "Name it.\nA red fruit."},
            {"role": "assistant", "content": "Apple."},
        ]
    }
    assert row.unread == ("category",)  # type: ignore[attr-defined]


def test_a_prompt_beside_an_answer_of_another_name_is_refused_with_the_option(tmp_path: Path) -> None:
    file = table(tmp_path / "q.csv", "prompt", "response")
    assert agreed_columns(file, kind="prompt") == {}
    with pytest.raises(GymError, match="no known format") as caught:
        agreed_columns(file, kind="supervised")
    assert "--columns prompt=prompt,completion=response" in caught.value.hint
    from gym_fed.data.rows import as_kind

    with pytest.raises(GymError, match="is a prompt row") as caught:
        as_kind(load_rows(file), "supervised")
    assert "--columns prompt=prompt,completion=response" in caught.value.hint


@pytest.mark.parametrize("given", ["prompt=Customer question", "completion=Our answer"])
def test_the_option_after_some_columns_were_named_keeps_them_and_works_when_copied(
    tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gym_fed.training.trainer.Trainer", lambda *_, **__: pytest.fail("a trainer was made")
    )
    file = table(tmp_path / "q.csv", "Customer question", "Our answer", "category")
    words = ["train", "--model", "gym-nano", "--data", str(file), "--output-dir", str(tmp_path / "run")]
    refused = CliRunner().invoke(app, [*words, "--columns", given])
    assert isinstance(refused.exception, GymError)
    assert refused.exception.message.startswith(
        f"{file}:2: --columns '{given}' does not specify enough columns"
    )
    _, text = shlex.split(refused.exception.hint.partition("add: ")[2])
    assert text == "prompt=Customer question,completion=Our answer"
    assert agreed_columns(file, columns=parse_columns(text), kind="supervised") == parse_columns(text)
    assert load_rows(file, columns=parse_columns(text))[0]["completion"] == f"{LONG} 0"
    accepted = agreed_columns(file, columns=parse_columns(given), kind="supervised", yes=True)
    assert accepted == parse_columns(text)


def test_rows_of_which_some_columns_were_named_are_refused_by_the_names_in_the_file(tmp_path: Path) -> None:
    from gym_fed.data.rows import as_kind

    file = table(tmp_path / "q.csv", "Customer question", "Our answer")
    hint = "--columns 'prompt=Customer question,completion=Our answer'"
    with pytest.raises(GymError, match="is a prompt row") as caught:
        as_kind(load_rows(file, columns={"prompt": "Customer question"}), "supervised")
    assert hint in caught.value.hint
    with pytest.raises(GymError, match="no known format") as caught:
        load_rows(file, columns={"completion": "Our answer"})
    assert hint in caught.value.hint


def test_a_named_column_that_is_missing_is_refused_before_the_question(tmp_path: Path) -> None:
    file = table(tmp_path / "q.csv", "Customer question", "Our answer")
    with pytest.raises(GymError, match=r"q\.csv:2: has no column 'ask'"):
        agreed_columns(file, columns={"prompt": "ask"}, kind="supervised")


def test_variant_create_and_predict_take_the_guess_too(tmp_path: Path) -> None:
    file = table(tmp_path / "q.csv", "Customer question", "Our answer")
    words = [
        "variant",
        "create",
        "--data",
        str(file),
        "--user",
        "ida",
        "--unsigned",
        "--store",
        str(tmp_path / "store"),
    ]
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, GymError)
    assert "--columns 'prompt=Customer question,completion=Our answer'" in refused.exception.hint
    config = tmp_path / "predict.yaml"
    config.write_text(
        f"model: gym-nano\neval_data: [{{path: {file}}}]\noutput_dir: {tmp_path / 'answers'}\nmax_new_tokens: 1\n"
    )
    refused = CliRunner().invoke(app, ["predict", str(config)])
    assert isinstance(refused.exception, GymError)
    assert "--columns 'prompt=Customer question,completion=Our answer'" in refused.exception.hint
    done = CliRunner().invoke(app, ["predict", str(config), "--yes"])
    assert done.exit_code == 0, done.output


def test_a_contributor_is_asked_before_the_hub_is_contacted(tmp_path: Path) -> None:
    from gym_client.cli.main import app as client

    file = table(tmp_path / "q.csv", "Customer question", "Our answer")
    words = [
        "join",
        "--server",
        "127.0.0.1:1",
        "--no-wait",
        "--data",
        str(file),
        "--home",
        str(tmp_path / "home"),
    ]
    refused = CliRunner().invoke(client, words)
    assert isinstance(refused.exception, GymError)
    assert refused.exception.code is ErrorCode.DATA_INVALID
    assert "--columns 'prompt=Customer question,completion=Our answer'" in refused.exception.hint
    accepted = CliRunner().invoke(client, [*words, "--yes"])
    assert '"Our answer": Open the settings' in accepted.stderr
    assert isinstance(accepted.exception, GymError)
    assert accepted.exception.code is not ErrorCode.DATA_INVALID, "the rows are read, and no hub is there"
