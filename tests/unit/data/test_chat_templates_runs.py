"""Chat templates from the config to the saved run: Qwen3's on two turns, weights, history, reasoning, others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.cli.main import app
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.chat_templates.choice import use_chat_template
from gym_fed.data.chat_templates.rendering import trl_templates
from gym_fed.data.encoding import IGNORED, encode_one, encode_rows
from gym_fed.data.rows import PlacedDict
from gym_fed.training.rows.answers import encode_answers
from gym_fed.training.rows.encode_part import rows_to_encode
from gym_fed.training.trainer import Trainer
from tests.support.conversations import CONVERSATIONS, answer, byte_tokenizer, system, user

TWO = CONVERSATIONS["two turns"]
THINKING = CONVERSATIONS["reasoning, two turns"]
FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{{ m.content if loop.last else m.content[:1] }}</a>"
    "{% else %}<u>{{ m.content }}</u>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def source(name: str) -> str:
    return (trl_templates() / f"{name}.jinja").read_text(encoding="utf-8")


def learned(tokenizer: Any, row: dict[str, Any], **options: Any) -> str:
    labels = encode_one(tokenizer, row, **options)["labels"]
    return str(tokenizer.decode([label for label in labels if label != IGNORED]))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights and Qwen3's chat template."""
    from gym_fed.config.train.training import ModelInit
    from gym_fed.training.model.loading import init_model

    folder = tmp_path_factory.mktemp("qwen3")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32, "head_dim": 8}
    settings = ModelInit(tokenizer="gym-nano", num_attention_heads=2, num_key_value_heads=1, **sizes)
    model, _ = init_model(settings, seed=0, dtype="float32")
    tokenizer = byte_tokenizer(source("qwen3"), eos="<|im_end|>")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def written(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def config(model: Path, rows: Path, **changes: Any) -> TrainingConfig:
    values = {
        "model": str(model),
        "data": [{"path": str(rows)}],
        "output_dir": str(rows.parent / "run"),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "device": "cpu",
        "num_threads": 1,
        "logging_steps": 1,
    }
    return TrainingConfig.model_validate({**values, **changes})


def test_qwen3_is_trained_on_two_turns_and_keeps_its_own_template(model_folder: Path, tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", TWO, THINKING, CONVERSATIONS["tools and reasoning, two turns"])
    result = Trainer(config(model_folder, rows, max_length=2000)).train()
    assert result.steps == 2
    assert load_tokenizer(str(tmp_path / "run")).chat_template == source("qwen3")


def test_dpo_on_two_turns_of_qwen3_compares_the_answers_alone(model_folder: Path, tmp_path: Path) -> None:
    row = {
        "prompt": THINKING["messages"][:3],
        "chosen": [answer("Six.", "twice three")],
        "rejected": [answer("Seven.")],
    }
    tokenizer = load_tokenizer(str(model_folder))
    (ids,) = encode_answers(tokenizer, [row], ("chosen", "rejected"))
    assert tokenizer.decode(ids["prompt_ids"]).endswith("3 + 3?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(ids["chosen_ids"]) == "<think>\ntwice three\n</think>\n\nSix.<|im_end|>\n"
    assert tokenizer.decode(ids["rejected_ids"]) == "<think>\n\n</think>\n\nSeven.<|im_end|>\n"
    (dropped,) = encode_answers(tokenizer, [row], ("chosen", "rejected"), reasoning="drop")
    assert "twice" not in tokenizer.decode(dropped["chosen_ids"])
    rows = written(tmp_path / "pairs.jsonl", row, row)
    assert Trainer(config(model_folder, rows, algorithm="dpo", dpo={}, max_length=400)).train().steps == 2


def test_a_template_of_the_config_is_trained_with_and_saved(model_folder: Path, tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", TWO, TWO)
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        encoding="utf-8",
    )
    trainer = Trainer(config(model_folder, rows, chat_template=str(file), finetuning="lora"))
    trainer.train()
    for folder in (tmp_path / "run",):
        tokenizer = load_model(str(folder)).tokenizer
        assert tokenizer.chat_template == file.read_text(encoding="utf-8")
        assert tokenizer.apply_chat_template(TWO["messages"][:1], tokenize=False) == "[user]Name a colour."


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("chatmll", "or a known name"),
        ("{% for m in messages %}{{ m.content }}", "cannot render a conversation"),
        ("{{ messages[0].content }}", "omits messages"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ messages.__class__.__mro__ }}", "cannot render a conversation"),
    ],
)
def test_a_template_that_writes_no_conversation_is_refused_before_anything_is_loaded(
    tmp_path: Path, value: str, words: str
) -> None:
    from gym_fed.training.run.checks import check_config

    settings = config(tmp_path / "no-model", tmp_path / "rows.jsonl", chat_template=value)
    with pytest.raises(GymError, match=words) as caught:
        check_config(settings)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "chat_template" in caught.value.message


def test_a_name_keeps_the_tokenizer_s_own_template_where_both_write_the_same() -> None:
    qwen3 = byte_tokenizer(source("qwen3"))
    assert use_chat_template(qwen3, "qwen3") is qwen3
    other = use_chat_template(qwen3, "qwen3_nothink")
    assert other.chat_template != qwen3.chat_template
    assert "<think>" not in other.apply_chat_template(TWO["messages"], tokenize=False)


@pytest.mark.parametrize("name", ["qwen3", "phi3", "llama3_1", "gptoss", "lfm2_2_5"])
def test_a_message_of_weight_0_is_read_and_not_learned(name: str) -> None:
    tokenizer = byte_tokenizer(source(name))
    first, said, second, again = TWO["messages"]
    row = {"messages": [first, {**said, "weight": 0}, second, {**again, "weight": 1}]}
    assert encode_one(tokenizer, row)["input_ids"] == encode_one(tokenizer, TWO)["input_ids"]
    assert "Teal" not in learned(tokenizer, row)
    assert "Ochre." in learned(tokenizer, row)
    everything = learned(tokenizer, row, assistant_only=False)
    assert "Teal" not in everything
    assert "Another one?" in everything
    assert "Ochre." in everything


def test_a_row_without_any_learned_message_is_counted_as_dropped() -> None:
    tokenizer = byte_tokenizer(source("qwen3"))
    silent = {"messages": [user("a"), {**answer("b"), "weight": 0}]}
    assert encode_rows(tokenizer, [silent, TWO], max_length=400).counts.dropped == 1


def test_weights_that_are_neither_0_nor_1_and_those_of_learned_prompts_are_refused() -> None:
    tokenizer = byte_tokenizer(source("qwen3"))
    half = PlacedDict.of({"messages": [user("a"), {**answer("b"), "weight": 0.5}]}, "rows.jsonl:7")
    with pytest.raises(GymError, match=r"rows.jsonl:7: a message has weight 0.5"):
        encode_one(tokenizer, half)
    asked = {"messages": [{**user("a"), "weight": 0}, answer("b")]}
    assert learned(tokenizer, asked) == "<think>\n\n</think>\n\nb<|im_end|>"
    with pytest.raises(GymError, match="user role has weight 0"):
        encode_one(tokenizer, asked, assistant_only=False)


def test_mask_history_learns_the_last_answer_alone_even_where_earlier_turns_are_rewritten() -> None:
    assert (
        learned(byte_tokenizer(source("glm4moe")), TWO, mask_history=True)
        == "\n<think></think>\nOchre.<|user|>"
    )
    forgetful = byte_tokenizer(FORGETFUL, "</a>")
    placed = PlacedDict.of(TWO, "rows.jsonl:3")
    with pytest.raises(GymError, match=r"rows.jsonl:3: .* rewrites earlier turns") as caught:
        encode_one(forgetful, placed)
    assert "mask_history: true" in caught.value.hint
    assert learned(forgetful, TWO, mask_history=True) == "Ochre.</a>"


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
@pytest.mark.parametrize("name", ["qwen3", "gptoss", "deepseek_r1_distill", "glm4moe", "lfm2_2_5"])
def test_reasoning_is_learned_under_either_name_and_left_out_when_dropped(name: str, key: str) -> None:
    tokenizer = byte_tokenizer(source(name))
    row = {"messages": [user("3+3?"), {"role": "assistant", "content": "Six.", key: "twice three"}]}
    assert "twice three" in learned(tokenizer, row)
    dropped = encode_one(tokenizer, row, reasoning="drop")
    assert dropped == encode_one(tokenizer, {"messages": [user("3+3?"), answer("Six.")]})


def test_an_empty_thought_is_learned_unless_reasoning_is_off() -> None:
    tokenizer = byte_tokenizer(source("qwen3"))
    row = {"messages": [user("3+3?"), answer("Six.")]}
    assert learned(tokenizer, row, reasoning="drop").startswith("<think>\n\n</think>\n\nSix.")
    assert learned(tokenizer, row, reasoning="off").startswith("Six.")
    thoughtful = {"messages": [user("3+3?"), {**answer("Six."), "reasoning_content": "twice three"}]}
    assert encode_one(tokenizer, thoughtful, reasoning="off") == encode_one(tokenizer, row, reasoning="off")
    with pytest.raises(ValidationError, match="reasoning: off applies to pretrain and sft; dpo accepts"):
        TrainingConfig(algorithm="dpo", reasoning="off")


def test_conversations_without_a_system_message_begin_with_the_one_of_the_config() -> None:
    own = [{"role": "system", "content": "mine"}, *TWO["messages"]]
    rows = [TWO, {"messages": own}, {"text": "a text"}]
    config, tokenizer = TrainingConfig(default_system="Be brief."), load_tokenizer("gym-nano")
    found = rows_to_encode(config, tokenizer, rows)
    assert found[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert found[0]["messages"][1:] == TWO["messages"]
    assert found[1:] == rows[1:]
    pair = {"prompt": TWO["messages"][:1], "chosen": TWO["messages"][1:2], "rejected": TWO["messages"][1:2]}
    (found_pair,) = rows_to_encode(config, tokenizer, [pair])
    (found_strings,) = rows_to_encode(config, tokenizer, [{"prompt": "Hi", "completion": "Ho"}])
    assert [message["role"] for message in found_strings["messages"]] == ["system", "user", "assistant"]
    assert [message["role"] for message in found_pair["prompt"]] == ["system", "user"]
    assert "system" not in {message["role"] for message in TWO["messages"]}


def test_dropped_reasoning_is_reported_once(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = written(tmp_path / "rows.jsonl", THINKING, TWO)
    Trainer(config(model_folder, rows, reasoning="drop", max_length=400)).train()
    assert capsys.readouterr().err.count("reasoning: drop: 1 of 2 rows are trained on without it") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"mask_history": True, "train_on_prompt": True},
        {"mask_history": True, "assistant_only_loss": False},
        {"mask_history": True, "packing": True},
        {"train_on_prompt": True, "assistant_only_loss": True},
        {"mask_history": True, "algorithm": "pretrain"},
        {"chat_template": ""},
        {"reasoning": "keep"},
    ],
)
def test_keys_that_contradict_each_other_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        config(tmp_path, tmp_path / "rows.jsonl", **changes)


def test_train_on_prompt_is_no_assistant_only_loss(tmp_path: Path) -> None:
    assert config(tmp_path, tmp_path / "r", train_on_prompt=True).assistant_only_loss is False


def test_validate_names_the_row_that_the_template_refuses_and_takes_what_can_run(
    model_folder: Path, tmp_path: Path
) -> None:
    refused = [{"messages": [user("a"), answer("b")]}, {"messages": [system("s"), user("a"), answer("b")]}]
    settings = tmp_path / "c.yaml"
    text = f"model: {model_folder}\noutput_dir: {tmp_path / 'run'}\ndata: [{{path: {tmp_path / 'rows.jsonl'}}}]\n"
    written(tmp_path / "rows.jsonl", *refused)
    gemma = tmp_path / "gemma.jinja"
    turns = source("gemma").replace("<start_of_turn>", "<|im_start|>").replace("<end_of_turn>", "<|im_end|>")
    gemma.write_text(turns, encoding="utf-8")
    settings.write_text(text + f"chat_template: {gemma}\n", encoding="utf-8")
    found = CliRunner().invoke(app, ["configs", "validate", str(settings)])
    assert found.exit_code != 0
    assert isinstance(found.exception, GymError | SystemExit)
    assert "rows.jsonl" in str(found.exception) + found.output
    settings.write_text(text, encoding="utf-8")
    fine = CliRunner().invoke(app, ["configs", "validate", str(settings)])
    assert (fine.exit_code, fine.exception) == (0, None)


def test_a_conversation_has_one_first_token() -> None:
    tokenizer = byte_tokenizer(source("llama3"), bos="<|begin_of_text|>")
    ids = encode_one(tokenizer, TWO)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.slow  # a process that imports torch and transformers
def test_rows_are_encoded_without_importing_trl() -> None:
    code = (
        "import sys; from gym_fed.data import encode_rows; from gym_fed.base.models import load_tokenizer; "
        "from gym_fed.data.chat_templates.rendering import training_template, trl_templates; "
        "source = (trl_templates() / 'qwen3.jinja').read_text(); assert training_template(source); "
        "rows = [{'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]}]; "
        "encode_rows(load_tokenizer('gym-nano'), rows, max_length=64); assert 'trl' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("given", [{"chat_template": "chatml"}, {"reasoning": "drop"}])
def test_a_variant_takes_no_template_of_its_own(tmp_path: Path, given: dict[str, Any]) -> None:
    from gym_fed.personalization.recipe import BaseSize, training_config

    rows: Any = SimpleNamespace(kind="supervised", train=[TWO])
    with pytest.raises(GymError, match=next(iter(given))) as caught:
        training_config("lora", rows, tmp_path, "gym-nano", given, BaseSize(256, 1_000_000))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_a_row_that_the_template_refuses_is_named_before_joining() -> None:
    from gym_client.agent.data import Data
    from gym_client.cli.offer import learned as learned_of

    from gym_fed.config.hub.task import TrainingRecipe

    rows: list[dict[str, Any]] = [TWO, PlacedDict.of(TWO, "rows.jsonl:2")]
    forgetful = byte_tokenizer(FORGETFUL, "</a>")
    with pytest.raises(GymError, match=r"row 1: .* rewrites earlier turns"):
        learned_of(Data(rows, "rows", "digest"), TrainingRecipe(), forgetful)
    qwen3 = byte_tokenizer(source("qwen3"))
    assert learned_of(Data(rows, "rows", "digest"), TrainingRecipe(max_length=400), qwen3).learned == 2
