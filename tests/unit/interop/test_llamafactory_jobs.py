"""LLaMA-Factory's files that predict, merge or answer, each through the command that does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gym_fed.cli.api.settings import serving_config
from gym_fed.cli.chat import inference_file
from gym_fed.cli.main import app
from gym_fed.config.training_file import load_export, load_inference, load_predict_config
from gym_fed.core.errors import GymError
from gym_fed.interop.llamafactory.translate import translate
from gym_fed.interop.llamafactory.translation import job_of

MODEL = {"model_name_or_path": "gym-nano", "template": "chatml", "trust_remote_code": True}
PREDICTS = {
    **MODEL,
    **{"stage": "sft", "do_predict": True, "finetuning_type": "lora", "adapter_name_or_path": "saves/lora"},
    **{"eval_dataset": "rivers,hills", "cutoff_len": 99, "max_samples": 3, "predict_with_generate": True},
    **{
        "report_to": "none",
        "ddp_timeout": 180,
        "output_dir": "saves/said",
        "per_device_eval_batch_size": 2,
        "overwrite_cache": True,
        "gradient_accumulation_steps": 2,
    },
}
MERGES = {**MODEL, "export_dir": "saves/whole", "export_size": 2, "export_device": "cpu"}
ANSWERS = {**MODEL, "infer_backend": "huggingface"}


def written(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


@pytest.mark.parametrize(
    ("values", "job"),
    [
        (PREDICTS, "predict"),
        (MERGES, "export"),
        (ANSWERS, "inference"),
        ({**MODEL, "stage": "sft", "do_train": True, "do_predict": True}, "train"),
        ({**MODEL, "stage": "sft", "do_eval": True}, "evaluate"),
        ({**MODEL, "stage": "sft", "tokenized_path": "saves/rows"}, "preprocess"),
        ({"model": "gym-nano", "peft_config": {"name": "lora", "export_dir": "x"}}, "export"),
        ({"model": "gym-nano", "train_dataset": "x.yaml", "micro_batch_size": 1}, "train"),
    ],
)
def test_a_file_is_for_the_job_that_its_keys_show(values: dict[str, Any], job: str) -> None:
    assert job_of(values) == job


def test_a_file_that_predicts_is_read_with_the_drawing_of_there(tmp_path: Path) -> None:
    config, _ = load_predict_config(written(tmp_path, PREDICTS))
    assert (config.model, config.adapter, config.output_dir) == (
        "gym-nano",
        ["saves/lora"],
        Path("saves/said"),
    )
    assert [(source.dataset, source.num_examples) for source in config.eval_data] == [
        ("rivers", 3),
        ("hills", 3),
    ]
    assert (config.max_length, config.batch_size, config.max_new_tokens, config.seed) == (99, 2, 1024, 42)
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (True, 0.95, 0.7, 50)
    greedy, _ = load_predict_config(written(tmp_path, {**PREDICTS, "do_sample": False}), ["max_new_tokens=5"])
    assert (greedy.do_sample, greedy.temperature, greedy.max_new_tokens) == (False, 1.0, 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset": "rivers"}, r"theirs.yaml:\d+:1: dataset: no counterpart: predictions are made on"),
        ({"max_new_tokns": 3}, "did you mean 'max_new_tokens'"),
    ],
)
def test_what_a_prediction_cannot_follow_is_named_with_its_line(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(GymError, match=words):
        load_predict_config(written(tmp_path, {**PREDICTS, **changes}))


def test_a_file_that_merges_names_model_adapters_folder_and_sizes(tmp_path: Path) -> None:
    values, notes = load_export(written(tmp_path, {**MERGES, "adapter_name_or_path": "saves/a,saves/b"}))
    assert values == {
        **{"model": "gym-nano", "adapter": ["saves/a", "saves/b"], "output": "saves/whole"},
        "shard_size": "2GB",
    }
    assert any("export_device" in note for note in notes)
    section = {
        "name": "lora",
        "adapter_name_or_path": "saves/a",
        "export_dir": "whole",
        "infer_dtype": "float16",
    }
    values, _ = load_export(written(tmp_path, {"model": "gym-nano", "peft_config": section}))
    assert (values["adapter"], values["output"], values["dtype"]) == (["saves/a"], "whole", "float16")


def test_a_file_that_merges_and_quantises_becomes_gptq_with_its_rows(tmp_path: Path) -> None:
    quantised = {"export_quantization_bit": 4, "export_quantization_dataset": "data/c4_demo.jsonl"}
    values, notes = load_export(written(tmp_path, {**MERGES, **quantised, "export_quantization_maxlen": 512}))
    found = (values["format"], values["quantization"], values["data"])
    assert found == ("gptq", "w4", "data/c4_demo.jsonl")
    assert any("calibration uses 32 samples of 128 tokens" in note for note in notes)
    values, notes = load_export(written(tmp_path, {**MERGES, **quantised, "infer_dtype": "bfloat16"}))
    assert "dtype" not in values
    assert any("unpacked weights are float16" in note for note in notes)
    values, notes = load_export(
        written(tmp_path, {**MERGES, "export_quantization_dataset": "data/c4_demo.jsonl"})
    )
    assert "format" not in values
    assert any("used only with export_quantization_bit" in note for note in notes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"export_quantization_bit": 3},
            "export_quantization_bit: no counterpart: GPTQ export supports only 4 and 8 bits",
        ),
        ({"export_hub_model_id": "me/mine"}, "export_hub_model_id: no counterpart: nothing is uploaded"),
        (
            {"quantization_bit": 4},
            "quantization_bit: no counterpart: adapters are not merged into quantised bases",
        ),
        ({"export_legacy_format": True}, "export_legacy_format: no counterpart"),
    ],
)
def test_what_merging_cannot_do_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(GymError, match=words):
        load_export(written(tmp_path, {**MERGES, **changes}))


def test_a_file_that_answers_draws_as_there_and_names_what_stands_in_for_another_engine(
    tmp_path: Path,
) -> None:
    values, notes = load_inference(written(tmp_path, {**ANSWERS, "infer_backend": "vllm", "vllm_maxlen": 99}))
    assert values["sampling"] == {"max_tokens": 1024, "temperature": 0.95, "top_p": 0.7, "top_k": 50}
    assert any("vllm is not used; gym-fed's own engine generates the answers" in note for note in notes)
    values, _ = load_inference(written(tmp_path, {**ANSWERS, "do_sample": False, "max_new_tokens": 7}))
    assert values["sampling"] == {"max_tokens": 7, "temperature": 0.0}
    assert serving_config(written(tmp_path, ANSWERS), ["port=0"]).base == "gym-nano"


def test_several_adapters_are_to_be_merged_before_they_answer(tmp_path: Path) -> None:
    file = written(tmp_path, {**ANSWERS, "adapter_name_or_path": "saves/a,saves/b"})
    with pytest.raises(GymError, match="2 adapters cannot be combined") as caught:
        inference_file.read(file)
    assert "gym export" in caught.value.hint


def test_each_command_does_its_file(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"rivers": {"file_name": "rivers.json"}}))
    rows = [{"instruction": f"river {i}", "input": "", "output": "wet"} for i in range(3)]
    (tmp_path / "data/rivers.json").write_text(json.dumps(rows))
    base = {"model_name_or_path": str(tiny_base)}
    ours = {**PREDICTS, **base, "eval_dataset": "rivers", "max_new_tokens": 3, "adapter_name_or_path": None}
    said = run("train", str(written(tmp_path, ours)), "--set", "device=cpu", "--json")
    assert json.loads(said)["predict_samples"] == 3
    assert len((tmp_path / "saves/said/generated_predictions.jsonl").read_text().splitlines()) == 3
    run("export", str(written(tmp_path, {**MERGES, **base})), "--skip-check")
    assert (tmp_path / "saves/whole/config.json").is_file()
    answer = run(
        "chat", str(written(tmp_path, {**ANSWERS, **base, "max_new_tokens": 2})), "--prompt", "hi", "--json"
    )
    assert json.loads(answer)["finish_reason"] in ("length", "stop")


def test_the_command_line_overrides_the_sampling_of_a_file_where_both_name_a_key(
    tmp_path: Path, tiny_base: Path
) -> None:
    values = {**ANSWERS, "model_name_or_path": str(tiny_base), "max_new_tokens": 2}
    words = ("chat", str(written(tmp_path, values)), "--prompt", "hi", "--json", "--seed", "1")
    short, long = (json.loads(run(*words, *more))["answer"] for more in ((), ("--max-tokens", "24")))
    assert len(short) <= 2 < len(long)


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_adapter_that_is_trained_on_keeps_its_own_rank_and_layers() -> None:
    given = {
        "model_name_or_path": "gym-nano",
        "stage": "sft",
        "do_train": True,
        "adapter_name_or_path": "saved",
    }
    shape = {"lora_rank": 16, "lora_target": "all", "lora_dropout": 0.1}
    done = translate({**given, **shape})
    assert done.values["lora"] == {"lora_dropout": 0.1}
    assert set(done.notes) >= {"lora_rank", "lora_target"}
    assert translate({**given, **shape, "create_new_adapter": True}).values["lora"]["r"] == 16
