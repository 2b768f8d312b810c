"""`gym predict`: answers to rows, what becomes of each row, resuming, and the figures."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.config.predict import PredictConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.evaluation.generation import generate_batch
from gym_fed.evaluation.predictions import bleu_4, longest_common, predict, similarity, words


def write(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    good = [{"messages": row["messages"]} for row in generate("double", 5)]
    unanswered = {"messages": [*good[4]["messages"], {"role": "user", "content": "and now?"}]}
    long = {"messages": [{"role": "user", "content": "x y " * 200}, {"role": "assistant", "content": "y"}]}
    return write(tmp_path / "rows.jsonl", [good[0], unanswered, *good[1:], long])


def config(tmp_path: Path, rows: Path, **changes: Any) -> PredictConfig:
    values: dict[str, Any] = {
        "model": "gym-nano",
        "eval_data": [{"path": str(rows), "format": "messages"}],
        "output_dir": tmp_path / "out",
        "max_new_tokens": 8,
        "max_length": 128,
        "batch_size": 2,
        "device": "cpu",
        "num_threads": 1,
    }
    return PredictConfig(**{**values, **changes})


def lines(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "generated_predictions.jsonl").read_text().splitlines()]


def test_columns_of_other_names_are_named_on_the_command_line(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [{"q": "double 2", "a": "4"}])
    file = tmp_path / "predict.yaml"
    file.write_text(
        f"model: gym-nano\neval_data: [{{path: {tmp_path}/rows.jsonl}}]\nmax_new_tokens: 1\n"
        f"output_dir: {tmp_path}/out\n"
    )
    done = CliRunner().invoke(app, ["predict", str(file), "--columns", "prompt=q,completion=a", "--json"])
    assert done.exit_code == 0, done.output
    assert [line["label"] for line in lines(tmp_path / "out")] == ["4"]


def test_answers_are_the_models_own_and_every_row_is_accounted_for(tmp_path: Path, rows: Path) -> None:
    file = tmp_path / "predict.yaml"
    file.write_text(
        f"model: gym-nano\neval_data: [{{path: {rows}, format: messages}}]\nmax_new_tokens: 8\n"
        f"max_length: 128\noutput_dir: {tmp_path}/out\n"
    )
    done = CliRunner().invoke(app, ["predict", str(file), "--json"])
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "out/predict_results.json").read_text())
    assert json.loads(done.stdout) == results
    assert (results["predict_rows"], results["predict_samples"]) == (7, 5)
    assert results["predict_dropped"] == {"without an answer": 1, "prompt longer than max_length": 1}
    loaded = load_model("gym-nano")
    chats = [row["messages"] for row in generate("double", 5)]
    own = generate_batch(loaded.model, loaded.tokenizer, [chat[:-1] for chat in chats], max_new_tokens=8)
    found = lines(tmp_path / "out")
    assert [line["predict"] for line in found] == own
    assert [line["label"] for line in found] == [chat[-1]["content"] for chat in chats]
    assert all(chat[0]["content"] in line["prompt"] for chat, line in zip(chats, found, strict=True))
    for name in ("rouge-1", "rouge-2", "rouge-l", "bleu-4"):
        mean = sum(similarity(line["predict"], line["label"])[name] for line in found) / 5
        assert results[f"predict_{name}"] == pytest.approx(mean)


def test_a_stopped_run_of_drawn_answers_goes_on_and_ends_as_one_that_was_not(
    tmp_path: Path, rows: Path
) -> None:
    drawn = {"do_sample": True, "temperature": 2.0, "seed": 3}
    predict(config(tmp_path, rows, output_dir=tmp_path / "whole", **drawn))
    answered: list[int] = []
    with pytest.raises(GymError, match="answered 2 of 5 rows") as caught:
        predict(config(tmp_path, rows, **drawn), should_stop=lambda: True)
    assert caught.value.code is ErrorCode.INTERRUPTED
    with (tmp_path / "out/generated_predictions.jsonl").open("a") as file:
        file.write('{"prompt": "of a batch that a kill cut short", "predict": "", "label": ""}\n{"pro')
    predict(config(tmp_path, rows, **drawn), on_answers=lambda done, total: answered.append(done))
    assert answered == [4, 5]
    assert lines(tmp_path / "out") == lines(tmp_path / "whole")
    assert len({line["predict"] for line in lines(tmp_path / "whole")}) > 1


def test_adapters_answer_on_their_base(tmp_path: Path, rows: Path) -> None:
    model = load_model("gym-nano").model
    adapted = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights=False)
    )
    adapted.save_pretrained(str(tmp_path / "adapter"))
    predict(config(tmp_path, rows, adapter=str(tmp_path / "adapter"), output_dir=tmp_path / "adapted"))
    predict(config(tmp_path, rows))
    assert lines(tmp_path / "adapted") != lines(tmp_path / "out")
    tokenizer = load_model("gym-nano").tokenizer
    chats = [row["messages"][:-1] for row in generate("double", 5)]
    own = generate_batch(adapted.eval(), tokenizer, chats, max_new_tokens=8)
    assert [line["predict"] for line in lines(tmp_path / "adapted")] == own
    with pytest.raises(GymError, match="contains no adapter"):
        predict(config(tmp_path, rows, adapter=[str(tmp_path)], output_dir=tmp_path / "none"))


def test_a_folder_of_another_run_is_refused(tmp_path: Path, rows: Path) -> None:
    with pytest.raises(GymError, match="stopped"):
        predict(config(tmp_path, rows), should_stop=lambda: True)
    with pytest.raises(GymError, match="unfinished predictions with a different max_new_tokens"):
        predict(config(tmp_path, rows, max_new_tokens=9))
    rows.write_text(rows.read_text().replace("double", "treble"))
    with pytest.raises(GymError, match="unfinished predictions on different rows"):
        predict(config(tmp_path, rows))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("kept")
    with pytest.raises(GymError, match="is not empty, but contains no predictions"):
        predict(config(tmp_path, rows, output_dir=tmp_path / "mine"))


def test_answers_are_not_appended_to_a_file_that_a_link_leads_to(tmp_path: Path, rows: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/generated_predictions.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(GymError, match=r"generated_predictions.jsonl is a link") as caught:
        predict(config(tmp_path, rows))
    assert caught.value.code is ErrorCode.FILE_EXISTS
    assert not (tmp_path / "mine").exists()


def test_rows_without_any_that_can_be_answered_and_keys_that_are_not_read_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "texts.jsonl", [{"text": "once upon a time"}])
    with pytest.raises(GymError, match="no answer can be generated for 1 row: 1 without an answer"):
        predict(config(tmp_path, file, eval_data=[{"path": str(file)}]))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="temperature applies only with do_sample: true"):
        config(tmp_path, file, temperature=0.5)


def test_words_are_those_of_jieba_for_texts_without_chinese() -> None:
    assert words("It's 3.5% off!") == ["It", "'", "s", "3.5%", "off", "!"]
    assert words("a-b c_d e...") == ["a", "-", "b", "c", "_", "d", "e", "..."]
    assert words("one\n\ntwo") == ["one", "", "two"]
    assert words("你好 a") == ["你", "好", "a"]
    assert words(" \n ") == []


def test_rouge_follows_its_definition() -> None:
    ours, theirs = "the cat sat on the mat", "the cat lay on a mat"
    found = similarity(ours, theirs)
    # Sets of words: {the cat sat on mat} and {the cat lay on a mat}, 4 in common.
    precision, recall = 4 / 5, 4 / 6
    assert found["rouge-1"] == pytest.approx(100 * 2 * precision * recall / (precision + recall), abs=1e-3)
    # Pairs: (the cat) of 5 on both sides.
    assert found["rouge-2"] == pytest.approx(20.0, abs=1e-3)
    # The cat on mat, of 6 words on both sides.
    assert found["rouge-l"] == pytest.approx(100 * 4 / 6, abs=1e-3)
    a, b = ours.split(), theirs.split()
    subsequences = ([x for x in c] for n in range(7) for c in combinations(a, n))
    longest = max(len(s) for s in subsequences if any(list(c) == s for c in combinations(b, len(s))))
    assert longest_common(a, b) == longest
    assert similarity("", "word") == {"rouge-1": 0.0, "rouge-2": 0.0, "rouge-l": 0.0, "bleu-4": 0.0}


def test_bleu_follows_its_definition() -> None:
    assert bleu_4("abcdefgh", "abcdefgh") == pytest.approx(1.0)
    assert bleu_4("xyz", "abc") == 0.0
    # "abcd" against "abxcd": 4 of 4, 2 of 3 (ab, cd), then nothing of 2 and of 1: a half and a quarter of a match.
    smoothed = [4 / 4, 2 / 3, 1 / 2 / 2, 1 / 4 / 1]
    brevity = math.exp(1 - 5 / 4)
    assert bleu_4("abcd", "abxcd") == pytest.approx(brevity * math.prod(smoothed) ** 0.25)
    # Matches are clipped by the reference: one "a" of three.
    assert bleu_4("aaa", "abc") < bleu_4("abb", "abc")


def test_bleu_is_that_of_nltk_which_llama_factory_uses() -> None:
    nltk = pytest.importorskip("nltk.translate.bleu_score", reason="nltk is not installed")
    draw = random.Random(0)
    smoothing = nltk.SmoothingFunction().method3
    for _ in range(300):
        ours, theirs = ("".join(draw.choices("abcd e你", k=draw.randrange(14))) for _ in range(2))
        wanted = nltk.sentence_bleu([list(theirs)], list(ours), smoothing_function=smoothing)
        assert bleu_4(ours, theirs) == pytest.approx(wanted, abs=1e-9), (ours, theirs)
