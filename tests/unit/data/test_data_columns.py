"""``--columns prompt=question,completion=answer``: one parser for every command, and refusals that name the columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gym_client.agent.data import load_data
from gym_client.cli.join_options import JoinOptions, remember, remembered
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from typer.testing import CliRunner, Result

from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import load_rows
from gym_fed.data.reading import parse_columns

WORDS = "prompt=question, completion=answer"


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i}?", "answer": f"{i}!"}) + "\n" for i in range(9)))
    return file


def gym(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_pairs_are_parsed() -> None:
    assert parse_columns(WORDS) == {"prompt": "question", "completion": "answer"}
    assert parse_columns(None) == parse_columns("") == {}


@pytest.mark.parametrize(
    "text", ["prompt", "prompt=", "=question", "prompt=a,", "prompt=a,prompt=b", "a=x,b=x"]
)
def test_what_is_no_list_of_pairs_is_refused(text: str) -> None:
    with pytest.raises(GymError, match="--columns") as caught:
        parse_columns(text)
    assert caught.value.code is ErrorCode.USAGE


def test_a_column_that_is_not_there_is_refused_with_those_that_are(asked: Path) -> None:
    with pytest.raises(GymError, match=r"asked\.jsonl:1: has no column 'query'") as caught:
        load_rows(asked, columns={"prompt": "query"})
    assert "question, answer" in caught.value.hint


def test_show_and_convert_read_renamed_columns(asked: Path, tmp_path: Path) -> None:
    done = gym("data", "show", asked, "--columns", WORDS, "--max-length", 64, "--json")
    assert json.loads(done.stdout)["learned"]["learned"] == 9
    out = tmp_path / "out.jsonl"
    assert gym("data", "convert", asked, out, "--to", "completion", "--columns", WORDS).exit_code == 0
    assert dict(load_rows(out)[0]) == {"prompt": "0?", "completion": "0!"}
    config = tmp_path / "run.yaml"
    config.write_text("model: gym-nano")
    done = gym("data", "show", config, "--columns", WORDS)
    assert isinstance(done.exception, GymError)
    assert "--columns applies only to data files" in done.exception.message


def test_a_variants_rows_may_have_columns_of_their_own(asked: Path) -> None:
    from gym_fed.personalization.rows import read_rows

    rows = read_rows(str(asked), columns=parse_columns(WORDS))
    assert {"prompt": "0?", "completion": "0!"} in [*rows.train, *rows.held_out]
    done = gym(
        "variant", "create", "--data", asked, "--user", "ana", "--columns", "prompt=query", "--unsigned"
    )
    assert isinstance(done.exception, GymError)
    assert "has no column 'query'" in done.exception.message


def test_a_contributors_columns_are_read_and_remembered_with_their_file(asked: Path, tmp_path: Path) -> None:
    assert dict(load_data(str(asked), columns=WORDS).rows[0]) == {"prompt": "0?", "completion": "0!"}
    with pytest.raises(GymError, match="the built-in example"):
        load_data(None, columns=WORDS)
    home = Home.open(tmp_path / "home")
    first = JoinOptions(data=asked, columns=WORDS)
    remember(home, remembered(home, first)[0], first, Address.parse("127.0.0.1:1"))
    assert remembered(home, JoinOptions())[0].columns == WORDS
    assert remembered(home, JoinOptions(data=asked))[0].columns is None  # of another file, perhaps


def test_a_file_with_other_names_is_refused_with_the_option_that_reads_them(asked: Path) -> None:
    with pytest.raises(GymError, match="no known format") as caught:
        load_rows(asked)
    assert "--columns prompt=question,completion=answer" in caught.value.hint


def test_a_question_and_its_answer_become_a_conversation_by_the_columns_that_the_refusal_names(
    asked: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    refused = gym("data", "convert", asked, out, "--to", "messages", "--columns", WORDS)
    assert isinstance(refused.exception, GymError)
    assert "--columns instruction=QUESTION,output=ANSWER" in refused.exception.hint
    columns = "instruction=question,output=answer"
    assert gym("data", "convert", asked, out, "--to", "messages", "--columns", columns).exit_code == 0
    assert [m["content"] for m in load_rows(out)[0]["messages"]] == ["0?", "0!"]


def test_show_says_of_prompts_alone_that_nothing_of_them_is_learned(asked: Path) -> None:
    done = gym("data", "show", asked, "--columns", "prompt=question", "-n", 0)
    assert "all rows are prompts" in done.output
    assert "rows are trained on" not in done.output
