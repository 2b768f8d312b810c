"""`gym data` on one's own files: what the model sees, conversions without loss, mixtures, duplicates, sharing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import load_rows

ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
NO = {"role": "assistant", "content": "no"}
CHAT = {"messages": [ASK, SAY]}
PAIR = {"prompt": [ASK], "chosen": [SAY], "rejected": [NO]}


def gym(*words: object) -> Result:
    return CliRunner().invoke(app, ["data", *(str(word) for word in words)])


def figures(*words: object) -> Any:
    done = gym(*words, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def error_of(done: Result) -> GymError:
    assert isinstance(done.exception, GymError), done.output
    return done.exception


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_show_prints_what_is_learnt_and_what_is_only_read(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", CHAT, {"messages": [ASK, SAY, ASK, {**SAY, "content": "x" * 99}]})
    done = gym("show", file, "-n", 1)
    assert done.exit_code == 0
    assert "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n>>>ho<|im_end|><<<" in done.stdout
    found = figures("show", file, "--max-length", 20)
    assert (found["rows"], found["sequences_cut"], found["nothing_to_learn"]) == (2, 1, 0)
    assert found["tokens_max"] > 99
    first, second = found["rows_shown"]
    assert first["place"] == f"{file}:1"
    assert "".join(s["text"] for s in first["sequences"][0]["segments"] if s["learnt"]) == "ho<|im_end|>"
    assert second["sequences"][0]["tokens_cut"] == second["sequences"][0]["tokens"] - 20


def test_show_prints_both_answers_of_a_pair_and_only_the_answer_as_learnt(tmp_path: Path) -> None:
    history = {**PAIR, "prompt": [ASK, SAY, ASK]}
    judged = {"prompt": [ASK], "completion": [NO], "label": False}
    pair = figures("show", write(tmp_path / "a.jsonl", history))["rows_shown"][0]["sequences"]
    assert [sequence["name"] for sequence in pair] == ["chosen", "rejected"]
    for sequence, answer in zip(pair, ("ho", "no"), strict=True):
        learnt = [s["text"] for s in sequence["segments"] if s["learnt"]]
        # Pairs are compared by all that the template writes of an answer, its line end too.
        assert learnt == [f"{answer}<|im_end|>\n"]
    (one,) = figures("show", write(tmp_path / "b.jsonl", judged))["rows_shown"][0]["sequences"]
    assert one["name"] == "disliked"
    (asked,) = figures("show", write(tmp_path / "c.jsonl", {"prompt": [ASK]}))["rows_shown"][0]["sequences"]
    assert asked["segments"][0]["text"].endswith("<|im_start|>assistant\n")


def test_show_takes_a_config_as_the_trainer_does(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *[{"text": "words " * 10}] * 4)
    config = tmp_path / "c.yaml"
    config.write_text(
        f"algorithm: pretrain\nmodel: gym-nano\nmax_length: 32\ndata: [{{path: {file}}}]\noutput_dir: run\n"
    )
    found = figures("show", config)
    assert found["tokens_max"] == 32
    assert found["share_learnt"] > 0.9
    assert found["rows_shown"][0]["place"] == "packed row 1"
    assert figures("show", config, "--set", "max_length=24")["tokens_max"] == 24
    assert "--set applies only to training configs" in error_of(gym("show", file, "--set", "seed=1")).message
    config.write_text(f"algorithm: dpo\nmodel: gym-nano\ndata: [{{path: {file}}}]\noutput_dir: run\n")
    assert "preference rows are needed" in error_of(gym("show", config)).message


def test_show_takes_a_config_of_llamafactory_as_the_trainer_does(tmp_path: Path) -> None:
    write(tmp_path / "a.json", [{"instruction": "say b", "output": "b"}])
    (tmp_path / "dataset_info.json").write_text('{"d": {"file_name": "a.json"}}')
    config = tmp_path / "c.yaml"
    settings = (
        "model_name_or_path: gym-nano\nstage: sft\ndo_train: true\nfinetuning_type: full\n"
        f"dataset: d\ndataset_dir: {tmp_path}\noutput_dir: run\n"
    )
    config.write_text(settings)
    (row,) = figures("show", config)["rows_shown"]
    assert [part["text"] for part in row["sequences"][0]["segments"] if part["learnt"]] == ["b<|im_end|>"]
    config.write_text(f"{settings}shift_attn_kind: new\n")
    assert "shift_attn_kind" in error_of(gym("show", config)).message
    assert figures("show", config, "--ignore-unsupported")["rows"] == 1


def test_show_counts_and_names_broken_pictures(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    for name in ("whole.jpg", "cut.jpg", "cut.png"):
        Image.fromarray(noise).save(tmp_path / name)
        if name.startswith("cut"):
            data = (tmp_path / name).read_bytes()
            (tmp_path / name).write_bytes(data[: len(data) // 2])
    (tmp_path / "text.png").write_text("no picture")
    rows = [
        {"messages": [{**ASK, "content": "<image>what?"}, SAY], "images": [name]}
        for name in ("whole.jpg", "cut.jpg", "cut.png", "text.png")
    ]
    file = write(tmp_path / "a.jsonl", *rows)
    found = figures("show", file)["pictures"]
    assert (found["pictures"], found["broken"]) == (4, 3)
    for problem, (line, name) in zip(
        found["first"], enumerate(("cut.jpg", "cut.png", "text.png"), 2), strict=True
    ):
        assert f"a.jsonl:{line}: images: " in problem
        assert name in problem
    assert "3 of 4 images cannot be read" in gym("show", file).stderr


def test_show_names_the_row_that_the_template_leaves_half_out(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    error = error_of(gym("show", write(tmp_path / "a.jsonl", CHAT, {**CHAT, "tools": tools})))
    assert error.message.startswith(f"{tmp_path}/a.jsonl:2 has tools")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz"])
@pytest.mark.parametrize("to", ["messages", "sharegpt", "alpaca", "completion"])
def test_a_conversation_survives_every_format_and_file(tmp_path: Path, to: str, suffix: str) -> None:
    system = {"messages": [{"role": "system", "content": "s"}, ASK, SAY, ASK, NO]}
    file = write(tmp_path / "in.jsonl", system, system)
    target = tmp_path / f"out{suffix}"
    assert figures("convert", file, target, "--to", to)["num_rows"] == 2
    assert load_rows(target) == [system, system]


def test_calls_of_tools_survive_openai_and_sharegpt(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    row = {
        "messages": [
            ASK,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "3"},
            SAY,
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
    }
    file = write(tmp_path / "in.jsonl", row)
    for to in ("messages", "sharegpt"):
        target = tmp_path / f"{to}.jsonl"
        figures("convert", file, target, "--to", to)
        assert load_rows(target) == [row]
    assert "function_call" in (tmp_path / "sharegpt.jsonl").read_text()
    assert (
        "does not alternate user and assistant"
        in error_of(gym("convert", file, tmp_path / "x.jsonl", "--to", "alpaca")).message
    )


@pytest.mark.parametrize(
    ("row", "to", "problem"),
    [
        (CHAT, "text", "speakers"),
        ({"text": "words"}, "messages", "is not a conversation"),
        (PAIR, "kto", "is a preference row"),
        (PAIR, "messages", "is a preference row"),
        (CHAT, "preference", "is a supervised row"),
        (
            {"messages": [ASK, {**SAY, "content": "words", "tool_calls": [{"function": {"name": "f"}}]}]},
            "sharegpt",
            "would lose 'content' of message 2",
        ),
    ],
)
def test_a_conversion_that_would_lose_something_is_refused_by_its_row(
    tmp_path: Path, row: Any, to: str, problem: str
) -> None:
    file = write(tmp_path / "in.jsonl", row)
    error = error_of(gym("convert", file, tmp_path / "out.jsonl", "--to", to))
    assert error.message.startswith(f"{file}:1: ")
    assert problem in error.message
    assert [f.name for f in tmp_path.iterdir()] == ["in.jsonl"], "nothing is left half written"


def test_with_loss_allowed_pairs_become_judgements(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", PAIR)
    assert figures("convert", file, tmp_path / "out.jsonl", "--to", "kto", "--allow-loss")["num_rows"] == 2
    assert [row["label"] for row in load_rows(tmp_path / "out.jsonl")] == [True, False]


def test_nothing_is_overwritten_unasked_and_no_odd_file_written(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", CHAT)
    taken = write(tmp_path / "taken.jsonl", "mine")
    for words in (
        ("convert", file, taken, "--to", "messages"),
        ("mix", file, "-o", taken),
        ("dedup", file, "-o", taken),
    ):
        assert error_of(gym(*words)).code is ErrorCode.FILE_EXISTS
        assert taken.read_text() == '"mine"\n'
    assert figures("dedup", file, "-o", taken, "--overwrite")["num_rows"] == 1
    assert error_of(gym("mix", file, "-o", tmp_path / "out.xml")).code is ErrorCode.USAGE
    refused = gym("convert", file, tmp_path / "o.jsonl", "--to", "auto")
    assert (refused.exit_code, "'auto' is not one of" in refused.output) == (2, True)


def test_a_text_that_csv_would_read_as_a_conversation_is_refused_and_other_json_comes_back(
    tmp_path: Path,
) -> None:
    text = '[{"role": "user", "content": "x"}]'
    file = write(tmp_path / "in.jsonl", {"prompt": text, "answer": "a"})
    error = error_of(gym("convert", file, tmp_path / "out.csv", "--to", "prompt"))
    assert "'prompt' is text that CSV would read as JSON" in error.message
    assert not (tmp_path / "out.csv").exists()
    rows = [{"prompt": "[1, 2]", "answer": "[1, 2]"}, {"prompt": '{"a": 1}', "answer": "b"}]
    figures("convert", write(tmp_path / "fine.jsonl", *rows), tmp_path / "fine.csv", "--to", "prompt")
    assert load_rows(tmp_path / "fine.csv") == rows


def test_generated_rows_replace_a_file_only_with_the_option(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for words, number in (((), 3), (("--overwrite",), 5)):
        assert gym("generate", file, "--task", "copy", "--num", number, *words).exit_code == 0
        assert len(file.read_text().splitlines()) == number
    assert error_of(gym("generate", file, "--task", "copy")).code is ErrorCode.FILE_EXISTS


def test_mix_follows_the_weights_and_the_seed(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *({"text": f"a {i}"} for i in range(900)))
    b = write(tmp_path / "b.jsonl", *({"text": f"b {i}"} for i in range(900)))

    def mixed(name: str, seed: int) -> tuple[str, Any]:
        target = tmp_path / name
        found = figures("mix", f"{a}:0.7", f"{b}:0.3", "-o", target, "--num", 1000, "--seed", seed)
        return target.read_text(), found

    text, found = mixed("1.jsonl", 1)
    assert 640 < found["rows_of_sources"][str(a)] < 760
    assert text == mixed("2.jsonl", 1)[0] != mixed("3.jsonl", 2)[0]
    done = gym("mix", a, b, "-o", tmp_path / "4.jsonl", "--num", 5000)
    assert "fewer rows than --num 5000" in done.output
    assert "not a weight" in error_of(gym("mix", f"{a}:much", "-o", tmp_path / "5.jsonl")).message


def test_dedup_keeps_rows_as_written_and_says_which_went(tmp_path: Path) -> None:
    first = {
        "instruction": "Name the planets of the sun, in order.",
        "input": "",
        "output": "Mercury, Venus, Earth",
    }
    near = {**first, "output": "Mercury, Venus, Earth."}
    other = {"instruction": "Sum", "input": "1 2", "output": "3"}
    file = write(tmp_path / "in.jsonl", first, other, near, first)
    found = figures("dedup", file, "-o", tmp_path / "exact.jsonl")
    assert found["dropped"] == {"exact duplicate": 1}
    assert found["duplicates"] == [{"place": f"{file}:4", "earlier": f"{file}:1", "similarity": 1.0}]
    done = gym("dedup", file, "-o", tmp_path / "near.jsonl", "--near", 0.8)
    assert done.exit_code == 0
    kept = [json.loads(line) for line in (tmp_path / "near.jsonl").read_text().splitlines()]
    assert kept == [first, other]
    assert f"{file}:3 is" in done.output
    assert "Mercury, Venus, Earth." in done.output
    assert "drops nothing" in error_of(gym("dedup", file, "-o", tmp_path / "x.jsonl", "--no-exact")).message


def test_datasets_are_pushed_listed_and_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.jsonl", CHAT)
    monkeypatch.setenv("GYM_DATASETS", str(tmp_path / "store"))
    assert "licence: missing" in error_of(gym("push", "me/chats", file)).message
    assert figures("push", "me/chats", file, "--licence", "MIT")["version"] == 1
    assert [m["name"] for m in figures("list")] == ["me/chats"]
    assert "MIT" in gym("list").stdout
    assert figures("pull", "me/chats", tmp_path / "here")["licence"] == "MIT"
    assert load_rows(tmp_path / "here") == [CHAT]


def test_help_of_no_command_loads_torch() -> None:
    commands = ["show", "convert", "mix", "dedup", "push", "pull", "list"]
    code = (
        "import sys; from typer.testing import CliRunner; from gym_fed.cli.main import app\n"
        f"for name in {commands!r}:\n"
        "    assert CliRunner().invoke(app, ['data', name, '--help']).exit_code == 0, name\n"
        "assert not {'torch', 'transformers', 'datasets', 'pyarrow', 'numpy'} & set(sys.modules), 'heavy'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
