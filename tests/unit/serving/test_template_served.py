"""The options `chat_template` and `--chat-template` replace the model's own template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gym_fed.cli.api.settings import serving_config
from gym_fed.cli.main import app
from gym_fed.config.serving import ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.chat.local_writer import open_plain
from gym_fed.serving.chat.session import ChatSession
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.setup import open_serving

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
CHATML = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
OPENCHAT = "GPT4 Correct User: hi<|im_end|>GPT4 Correct Assistant:"


@pytest.mark.parametrize(("name", "text"), [(None, CHATML), ("openchat", OPENCHAT)])
def test_a_named_template_writes_the_prompt(name: str | None, text: str, tiny_base: Path) -> None:
    config = ServingConfig(base=str(tiny_base), served_name="tiny", chat_template=name, device="cpu")
    with open_serving(config) as serving:
        usage = serving.service.handle("/v1/chat/completions", BODY, LOCAL)["usage"]
        assert usage["prompt_tokens"] == len(serving.tokenizer(text)["input_ids"])


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_gym_chat_and_batch_answer_by_the_template_that_is_named(tmp_path: Path) -> None:
    asked = ("chat", "gym-nano", "--prompt", "copy: hello", "--max-tokens", "8", "--device", "cpu")
    assert run(*asked).strip() == "hello"
    assert run(*asked, "--chat-template", "vicuna").strip() != "hello"  # gym-nano never saw it
    row = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    tokens = {}
    for name in ("chatml", "openchat"):
        (tmp_path / "in.jsonl").write_text(json.dumps({**row, "body": {**BODY, "model": "gym-nano"}}))
        said = tmp_path / f"{name}.jsonl"
        run("batch", str(tmp_path / "in.jsonl"), str(said), "--chat-template", name)
        tokens[name] = json.loads(said.read_text())["response"]["body"]["usage"]["prompt_tokens"]
    assert tokens == {"chatml": 6, "openchat": 45}


@pytest.mark.parametrize("command", [("chat", "absent-model", "--prompt", "hi"), ("api", "--base", "absent")])
def test_an_unknown_template_is_refused_with_near_names_before_a_model_is_looked_for(
    command: tuple[str, ...],
) -> None:
    with pytest.raises(
        GymError, match=r"'qwen33' is not a file, a Jinja template or a known name .nearest: qwen3"
    ):
        run(*command, "--chat-template", "qwen33")
    with pytest.raises(GymError) as error:
        open_serving(ServingConfig(base="absent-model", chat_template="qwen33"))
    assert error.value.code is ErrorCode.CONFIG_INVALID


def test_a_model_where_a_config_belongs_is_refused_by_the_flag_that_takes_it(tiny_base: Path) -> None:
    for model in ("gym-nano", str(tiny_base), "Qwen/Qwen3-0.6B"):
        with pytest.raises(GymError) as error:
            run("api", model)
        assert f"gym api --base {model}" in error.value.hint
    with pytest.raises(GymError, match=r"no config file at serving\.yaml") as error:
        run("api", "serving.yaml")
    assert "--base" not in error.value.hint


def test_a_template_does_not_go_with_a_server_which_has_its_own() -> None:
    with pytest.raises(GymError, match="--chat-template cannot be combined with --api"):
        run("chat", "--api", "http://127.0.0.1:9", "--prompt", "hi", "--chat-template", "chatml")


def test_files_name_it_ours_and_llamafactorys(tmp_path: Path) -> None:
    def of(values: dict[str, Any]) -> str | None:
        (tmp_path / "file.yaml").write_text(yaml.safe_dump(values))
        return serving_config(tmp_path / "file.yaml", []).chat_template

    assert of({"base": "gym-nano", "chat_template": "zephyr"}) == "zephyr"
    assert of({"model_name_or_path": "gym-nano", "template": "zephyr"}) == "zephyr"


def test_generation_of_transformers_ends_at_the_templates_end_token_too() -> None:
    writer = open_plain("gym-nano", device="cpu", chat_template="chatml")
    writer._service._model.generation_config.eos_token_id = 5  # type: ignore[attr-defined]
    conversation = ChatSession(writer, sampling={"max_tokens": 20, "temperature": 0.0})
    assert "".join(conversation.say("copy: hello")) == "hello"
    assert conversation.finish_reason == "stop"
