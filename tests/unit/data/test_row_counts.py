"""No row vanishes: what is learned, cut and dropped is counted, said before the work, and kept with the run."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.cli.main import app
from gym_fed.cli.train.progress import report_rows
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data import DataPipeline, load_rows
from gym_fed.data.encoding import encode_rows
from gym_fed.data.row_counts import IGNORED, RowCounts, counts_of
from gym_fed.training.run.job import Job
from gym_fed.training.run.reproducibility import RunWarning
from gym_fed.training.trainer import Trainer

LONG = "a question of many words, " * 8


def turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def config(folder: Path, **changes: Any) -> TrainingConfig:
    values = {
        "output_dir": folder,
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "max_length": 64,
        "device": "cpu",
        "num_threads": 1,
        "save_final": False,
    }
    return TrainingConfig(**{**values, **changes})


@pytest.fixture(scope="module")
def gsm8k(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 rows of GSM8K as conversations."""
    rows = load_rows(
        shared_folder / "data/gsm8k/train.jsonl", columns={"prompt": "question", "completion": "answer"}
    )
    file = tmp_path_factory.mktemp("gsm8k") / "chats.jsonl"
    lines = [json.dumps({"messages": turns(row["prompt"], row["completion"])}) for row in rows[:400]]
    file.write_text("\n".join(lines))
    return file


def test_every_row_is_learned_or_dropped_and_every_label_learned_or_cut() -> None:
    tokenizer = load_tokenizer("gym-nano")
    rows = [
        {"messages": turns("hi", "yes")},
        {"messages": turns("hi", "x" * 90)},
        {"messages": turns(LONG, "no")},
    ]
    whole = encode_rows(tokenizer, rows, max_length=10_000)
    found = encode_rows(tokenizer, rows, max_length=64).counts
    labels = sum(label != IGNORED for row in whole for label in row["labels"])
    assert (found.rows, found.learned, found.cut, found.dropped) == (3, 2, 2, 1)
    assert found.tokens + found.tokens_cut == labels
    assert list(found.lengths) == [len(row["input_ids"]) for row in whole]


@pytest.mark.parametrize("packing", [False, True])
def test_the_first_token_of_a_row_as_it_is_trained_is_no_learned_one(packing: bool) -> None:
    """It is labelled where texts are learned whole, and nothing stands before it to predict it from."""
    tokenizer = load_tokenizer("gym-nano")
    rows = [{"text": "abcd"}, {"text": "efghijklmnop"}, {"text": "q" * 30}]
    found = encode_rows(tokenizer, rows, max_length=16, packing=packing)
    assert found.counts.tokens == sum(len(row["labels"]) - 1 for row in found)
    assert found.counts.learned == 3


def test_sums_of_counts_count_both() -> None:
    one, other = RowCounts.whole(3), RowCounts(rows=2, learned=1, cut=1, dropped=1, tokens=4, tokens_cut=5)
    assert (one + other).as_dict() == {
        "rows": 5, "learned": 4, "cut": 1, "dropped": 1, "tokens": 4, "tokens_cut": 5
    }  # fmt: skip
    assert counts_of([{}, {}], 3) == RowCounts(
        rows=3, learned=2, dropped=1
    )  # a bare list of another's algorithm


@pytest.mark.parametrize(
    ("dropped", "tokens_cut", "warned"), [(10, 0, False), (11, 0, True), (0, 50, False), (0, 51, True)]
)
def test_a_warning_comes_above_a_tenth_of_the_rows_and_half_of_the_tokens(
    dropped: int, tokens_cut: int, warned: bool
) -> None:
    counts = RowCounts(100, 100 - dropped, dropped, dropped, tokens=100 - tokens_cut, tokens_cut=tokens_cut)
    assert (counts.warning(64) is not None) is warned


def test_the_remedy_is_a_length_that_95_of_100_rows_fit_into() -> None:
    counts = RowCounts()
    for length in range(1, 101):
        counts.count(length, cut=length > 8, tokens=int(length <= 8), tokens_cut=0)
    assert counts.length_of_most() == 95
    assert "max_length: 95 would fit 95% of the rows" in str(counts.warning(8))
    unanswered = RowCounts(rows=4, dropped=4)
    assert "gym data show" in str(unanswered.warning(8))  # a longer max_length would not help


@pytest.mark.parametrize(
    ("algorithm", "learned", "cut", "dropped", "tokens"),
    [
        ("dpo", 2, 2, 1, 3 + 4 + 50 + 4),
        ("simpo", 2, 2, 1, 3 + 4 + 50 + 4),
        ("reward_model", 1, 2, 2, 3 + 4),
        ("kto", 4, 3, 2, 3 + 4 + 50 + 4),
    ],
)
def test_what_becomes_of_preferences_is_counted(
    algorithm: str, learned: int, cut: int, dropped: int, tokens: int, tmp_path: Path
) -> None:
    from gym_fed.data.rows import as_kind

    tokenizer, method = load_tokenizer("gym-nano"), ALGORITHMS.new(algorithm)
    rows = [pair("0123456789:", "AB", "BCD"), pair("0123456789.", "x" * 70, "yes"), pair(LONG, "AB", "BCD")]
    given = as_kind(rows, method.row_kind)
    settings = config(tmp_path, algorithm=algorithm, max_length=61)
    found = counts_of(method.encode(settings, tokenizer, given), len(given))
    assert (found.rows, found.learned, found.cut, found.dropped) == (len(given), learned, cut, dropped)
    assert found.tokens == tokens


def test_unlearning_counts_the_rows_of_both_kinds(tmp_path: Path) -> None:
    rows = [{"messages": turns("hi", "yes"), "forget": True}, {"messages": turns("ho", "no")}]
    rows += [{"messages": turns(LONG, "no"), "forget": forget} for forget in (True, False, False)]
    settings = config(tmp_path, algorithm="gradient_difference")
    encoded = ALGORITHMS.new("gradient_difference").encode(settings, load_tokenizer("gym-nano"), rows)
    counts = counts_of(encoded, len(rows))
    assert (counts.rows, counts.learned, counts.dropped) == (5, 2, 3)


def test_a_run_hears_of_its_rows_before_the_first_step_and_keeps_the_counts(
    tiny_base: Path, tmp_path: Path
) -> None:
    loaded = load_model(str(tiny_base))
    rows = [{"messages": turns("hi", "yes")}] * 3 + [{"messages": turns(LONG, "no")}] * 2
    heard: list[Any] = []
    result = Trainer(
        config(tmp_path / "run", save_final=True),
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        on_rows=lambda name, counts: heard.append((name, counts.learned, counts.dropped)),
        on_step=lambda *args: heard.append("step"),
    ).train(rows, rows[1:])
    assert heard == [("data", 3, 2), ("eval_data", 2, 2), "step"]
    assert result.num_examples == 3
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert (run["rows"]["rows"], run["rows"]["learned"], run["eval_rows"]["learned"]) == (5, 3, 2)
    assert json.loads((tmp_path / "run/result.json").read_text())["rows"] == run["rows"]


def test_a_run_that_nobody_listens_to_warns_of_lost_rows(tiny_base: Path, tmp_path: Path) -> None:
    loaded = load_model(str(tiny_base))
    rows = [{"messages": turns("hi", "yes")}] * 3 + [{"messages": turns(LONG, "no")}] * 2
    with pytest.warns(RunWarning, match="2 of 5 rows are dropped, with no tokens to train on"):
        Trainer(config(tmp_path / "run"), model=loaded.model, tokenizer=loaded.tokenizer).train(rows)


@pytest.mark.shared
def test_gsm8k_at_a_short_length_is_trained_on_as_many_rows_as_are_said(
    gsm8k: Path, tiny_base: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(tiny_base))
    starts = [
        len(
            tokenizer.apply_chat_template(row["messages"][:1], tokenize=True, add_generation_prompt=True)[
                "input_ids"
            ]
        )
        for row in load_rows(gsm8k)
    ]
    expected = sum(start < 128 for start in starts)  # the answer begins within max_length
    assert 0 < expected < 80
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {tiny_base}\ndata: [{{path: {gsm8k}}}]\noutput_dir: {tmp_path / 'run'}\nmax_length: 128\n"
        "max_steps: 1\nper_device_train_batch_size: 2\ndevice: cpu\nnum_threads: 1\n"
    )
    done = CliRunner().invoke(app, ["train", str(file), "--json", "--no-check"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert (rows["rows"], rows["learned"], rows["dropped"]) == (400, expected, 400 - expected)
    assert json.loads(done.stdout)["num_examples"] == expected
    said = " ".join(done.stderr.split())
    assert f"data: {expected} of 400 rows are trained on, {400 - expected} dropped" in said
    assert said.index("warning: data:") < said.index("step 1/1")
    remedy = int(said.partition("max_length: ")[2].split()[0])
    whole = encode_rows(tokenizer, load_rows(gsm8k), max_length=remedy)
    assert 380 <= sum(length <= remedy for length in whole.counts.lengths) < 400


def test_a_pipelines_rows_are_counted_from_the_cache_as_well(tiny_base: Path, tmp_path: Path) -> None:
    loaded = load_model(str(tiny_base))
    rows = [{"messages": turns("hi", "yes")}] * 3 + [{"messages": turns(LONG, "no")}] * 2
    pipeline = DataPipeline([rows], tokenizer=loaded.tokenizer, sequence_length=64).cache(tmp_path / "cache")
    for run in ("fresh", "cached"):
        heard: dict[str, Any] = {}
        Trainer(
            config(tmp_path / run),
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            on_rows=lambda name, counts, heard=heard: heard.update({name: (counts.learned, counts.dropped)}),
        ).train(pipeline)
        assert heard == {"pipeline": (3, 2), "data": (3, 0)}, run
        assert pipeline.is_cached()


def test_a_mixture_says_which_source_ended_it(tmp_path: Path) -> None:
    for name, number in (("short", 2), ("long", 50)):
        lines = [json.dumps({"text": f"{name} {i}"}) for i in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = [str(tmp_path / f"{name}.jsonl") for name in ("short", "long")]
    out = ["-o", str(tmp_path / "mixed.jsonl"), "--overwrite"]
    done = CliRunner().invoke(app, ["data", "mix", *sources, *out])
    said = " ".join(done.output.split())
    assert f"{sources[0]} has ended, but other sources may have rows left" in said
    rule = ["--stopping", "all_exhausted_without_replacement", "--json"]
    whole = json.loads(CliRunner().invoke(app, ["data", "mix", *sources, *out, *rule]).stdout)
    assert (whole["num_rows"], whole["ended"]) == (52, None)


def test_prompts_that_fill_no_generation_are_said(tmp_path: Path) -> None:
    settings = config(
        tmp_path, algorithm="grpo", per_device_train_batch_size=4, grpo={"num_generations": 2}, max_length=64
    )
    prompts = [{"prompt": f"{i}?"} for i in range(5)]
    job = Job(settings, None, None, prompts, None, tmp_path, [])
    with pytest.warns(RunWarning, match="each epoch skips 1 of 5 prompts"):
        ALGORITHMS.new("grpo").arguments(job)  # type: ignore[attr-defined]  # of those that learn from rewards
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunWarning)
        ALGORITHMS.new("grpo").arguments(Job(settings, None, None, prompts[:4], None, tmp_path, []))  # type: ignore[attr-defined]


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "reward_model"])
def test_rows_of_which_none_fits_are_refused_with_the_length_that_would_do(
    tmp_path: Path, algorithm: str
) -> None:
    row = {"messages": turns(LONG, "no")} if algorithm == "sft" else pair(LONG, "yes", "no")
    with pytest.raises(GymError, match="within max_length=64") as caught:
        ALGORITHMS.new(algorithm).encode(
            config(tmp_path, algorithm=algorithm), load_tokenizer("gym-nano"), [row] * 3
        )
    assert "would fit 95% of the rows" in caught.value.hint


def test_rows_whose_answers_are_all_not_learned_are_refused_by_that_and_not_by_their_length() -> None:
    rows = [{"messages": [*turns("hi", "no")[:1], {"role": "assistant", "content": "no", "weight": 0}]}]
    with pytest.raises(GymError, match="excluded from training") as caught:
        encode_rows(load_tokenizer("gym-nano"), rows, max_length=64)
    assert "max_length" not in caught.value.message + caught.value.hint
    assert "train: false" in caught.value.hint


def test_a_single_row_is_counted_in_the_singular() -> None:
    counts = RowCounts()
    counts.count(5, cut=False, tokens=3, tokens_cut=0)

    assert counts.describe(256) == "the row is trained on: 3 labelled tokens"


def test_rows_that_are_only_measured_are_not_called_learned() -> None:
    assert RowCounts(rows=9, learned=9, tokens=4).describe(64, "measured") == (
        "all 9 rows are measured: 4 labelled tokens"
    )


def test_a_run_says_that_its_held_out_rows_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_rows(64)
    for name in ("data", "eval_data"):
        report(name, RowCounts(rows=9, learned=9, tokens=4))
    said = capsys.readouterr().err
    assert "\ndata: all 9 rows are trained on" in f"\n{said}"
    assert "eval_data: all 9 rows are measured" in said
