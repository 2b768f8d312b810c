"""Chat templates as programs without transformers render them."""

from __future__ import annotations

from importlib.resources import files
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gym_fed.export.gguf.metadata import metadata_of
from gym_fed.export.readers.program import rendered
from gym_fed.export.source import Source

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PUBLISHED = files("trl") / "chat_templates"
AS_JSON = "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ tools is none }}{% endfor %}"


def published(name: str) -> str:
    return (PUBLISHED / f"{name}.jinja").read_text("utf-8")


@pytest.mark.parametrize("name", ["cohere2", "gptoss", "llama3_1", "qwen3_training", ""])
def test_a_message_is_rendered_as_transformers_does(name: str) -> None:
    template = published(name) if name else AS_JSON
    message = {"role": "user", "content": "<Über> 'a' & b"}
    wanted, _ = render_jinja_template(
        [[message]], chat_template=template, add_generation_prompt=True, **SPECIAL
    )
    assert rendered(template, message["content"], SPECIAL) == wanted[0]


def test_of_templates_by_name_a_gguf_file_is_compared_on_the_default_without_marks() -> None:
    tokenizer = MagicMock(bos_token_id=1, eos_token_id=2, pad_token_id=None, unk_token_id=0)
    tokenizer.tokenizer = tokenizer
    tokenizer.return_value = {"input_ids": [1, 5]}
    tokenizer.chat_template = {"default": "a{% generation %}b{% endgeneration %}", "tool_use": "c"}
    model = SimpleNamespace(generation_config=None)
    found = metadata_of(Source("named", model, tokenizer, None), 0)["tokenizer.chat_template"]
    assert found.startswith("a")
    assert "generation" not in found
