"""A tokenizer whose regex engine panics gives an error that names it, wherever a text is encoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.models import load_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.encoding import encode_rows, prompt_ids
from gym_fed.evaluation.row_scores import _num_tokens
from gym_fed.export.formats._few_bits import calibration_of
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.openai.catalogue import LOCAL, Catalogue
from gym_fed.serving.openai.service import CHAT, COMPLETIONS, OpenAIService
from gym_fed.serving.plain_tokenizer import PlainTokenizer, plain_tokenizer
from tests.support.toy_engine import ToyModel

BAD = ("%" + "a" * 60 + "!") * 20
PATTERN = "(?<=%)(a|a|aa)+$"
"""Slow only after a percent sign, which the texts that are tried before the load do not have at this place."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("slow")
    load_tokenizer("gym-nano").save_pretrained(found)
    file = found / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pre_tokenizer": split}))
    (found / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    return found


@pytest.fixture(scope="module", params=["plain", "transformers"])
def tokenizer(request: pytest.FixtureRequest, folder: Path) -> Any:
    if request.param == "transformers":
        return load_tokenizer(str(folder))
    found = plain_tokenizer(folder, "LlamaForCausalLM")
    assert isinstance(found, PlainTokenizer)
    return found


def require_named(folder: Path, act: Callable[[], Any]) -> None:
    with pytest.raises(GymError, match="its tokenizer failed on a text") as refused:
        act()
    assert str(folder) in refused.value.message
    assert refused.value.code is ErrorCode.MODEL_INVALID


def test_a_request_gets_an_error_and_the_next_one_its_answer(folder: Path, tokenizer: Any) -> None:
    with Engine(ToyModel(4096), tokenizer) as engine:
        service = OpenAIService(
            engine,
            Catalogue("toy", None, "sha256:1"),
            tokenizer,
            vocab_size=262,
            fingerprint="f",
            max_at_once=4,
        )
        for text in (BAD, BAD):
            require_named(folder, partial(service.handle, COMPLETIONS, body(prompt=text), LOCAL))
            chat = body(messages=[{"role": "user", "content": text}])
            require_named(folder, partial(service.handle, CHAT, chat, LOCAL))
        assert service.handle(COMPLETIONS, body(prompt="b"), LOCAL)["usage"]["completion_tokens"] == 3


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "max_tokens": 3, "min_tokens": 3, **fields}


def test_a_plain_tokenizer_names_its_folder(folder: Path) -> None:
    plain = plain_tokenizer(folder, "LlamaForCausalLM")
    assert plain is not None
    for act in (plain.encode, plain, plain._encode_without_added_tokens):
        require_named(folder, partial(act, BAD))
    assert plain.encode("b", add_special_tokens=False) == [ord("b")]


def test_rows_that_are_encoded_for_training_meet_it_too(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    rows: list[dict[str, Any]] = [
        {"text": BAD},
        {"prompt": BAD, "completion": "b"},
        {"messages": [{"role": "user", "content": BAD}, {"role": "assistant", "content": "b"}]},
    ]
    for row in rows:
        require_named(folder, partial(encode_rows, tokenizer, [row], max_length=4096))
    require_named(folder, partial(prompt_ids, tokenizer, BAD))


def test_every_call_of_a_loaded_tokenizer_gives_the_error(folder: Path) -> None:
    """Evaluation, training and export call transformers' tokenizer in many places."""
    tokenizer = load_tokenizer(str(folder))
    for call in (tokenizer, tokenizer.encode, lambda text: tokenizer([text, text]), tokenizer.tokenize):
        require_named(folder, partial(call, BAD))
    turns = [{"role": "user", "content": BAD}]
    require_named(folder, partial(tokenizer.apply_chat_template, turns, tokenize=True))


def test_rows_that_calibrate_an_export_give_the_error(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    require_named(folder, partial(calibration_of, tokenizer, 128, [{"text": BAD}], "rows"))


def test_an_answer_of_an_evaluation_gives_the_error(folder: Path) -> None:
    require_named(folder, partial(_num_tokens, load_tokenizer(str(folder)), BAD))
