"""What vLLM's, llama.cpp's and other servers' options get from `gym api`: the words to write here instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from gym_fed.cli.api.other_servers import OPTIONS
from gym_fed.cli.main import app
from gym_fed.config.serving import ServingConfig

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"


def _refusal(*words: str) -> str:
    result = CliRunner().invoke(app, ["api", *words])
    assert result.exception is not None
    return f"{result.output}\n{result.exception}\n{getattr(result.exception, 'hint', '')}"


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--max-model-len", "4096"], "--set engine.max_context="),
        (["--max_model_len=4096"], "--set engine.max_context="),
        (["-c", "4096"], "--set engine.max_context="),
        (["-np", "4"], "--set engine.max_concurrent="),
        (["--served-model-name", "x"], "--set served_name="),
        (["--api-key", "secret"], "gym api keys add"),
        (["serve", "--tool-call-parser", "hermes"], "--set tool_format="),
        (["--base", "x", "--generation-config", "vllm"], "--set sampling.temperature="),
    ],
)
def test_an_option_of_another_server_is_refused_by_what_is_here_instead(
    words: list[str], instead: str
) -> None:
    assert instead in _refusal(*words)


def test_all_options_of_a_pasted_command_line_are_named_at_once() -> None:
    said = _refusal("--max-model-len", "4096", "--port", "0", "--gpu-memory-utilization", "0.9")
    assert "--max-model-len: " in said
    assert "--gpu-memory-utilization: " in said
    assert "--port: " not in said


def test_an_option_that_nobody_has_is_refused_as_before() -> None:
    said = _refusal("--nosuch", "--max-model-len-of-nobody", "3").lower()
    assert "no such option" in said
    assert "gym api has no option" not in said


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_what_is_named_instead_is_a_key_or_an_option_of_ours(option: str) -> None:
    serve = get_command(app).commands["api"].commands["serve"]  # type: ignore[attr-defined]
    ours = {name for param in serve.params for name in (*param.opts, *param.secondary_opts)}
    assert option not in ours
    for name in re.findall(r"(?<![\w-])--[a-z-]+", OPTIONS[option]):
        assert name in ours
    for path in re.findall(r"--set ([a-z_.]+)=", OPTIONS[option]):
        schema: Any = ServingConfig
        for key in path.split("."):
            assert key in schema.model_fields, path
            members = (schema.model_fields[key].annotation, *_members(schema.model_fields[key].annotation))
            schema = next((one for one in members if hasattr(one, "model_fields")), ServingConfig)


def _members(annotation: object) -> tuple[object, ...]:
    return getattr(annotation, "__args__", ())


def test_the_page_names_options_as_the_errors_do() -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("## From another server") :].split("\n## ", 1)[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `-")]
    assert rows
    for options, ours in rows:
        for option in re.findall(r"`(-[^`]+)`", options):
            shown = re.findall(r"`--set ([a-z_.]+)=", ours)
            assert option in OPTIONS, option
            assert not shown or any(f"--set {path}=" in OPTIONS[option] for path in shown), option
