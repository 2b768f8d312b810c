"""Sampling defaults of the model's authors and of serving.yaml, and the end tokens of a model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gym_fed.config.serving import SamplingConfig, ServingConfig, StoredAnswersConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.base import end_ids, load_base
from gym_fed.serving.openai.catalogue import LOCAL, Catalogue
from gym_fed.serving.openai.responses import RESPONSES
from gym_fed.serving.openai.service import CHAT, COMPLETIONS, OpenAIService
from gym_fed.serving.openai.stored_answers import StoredAnswers
from gym_fed.serving.setup import open_serving, sampling_defaults
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.serving.test_base_loaded import saved

QWEN3 = {
    **{"bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "pad_token_id": 151643},
    **{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"},
}
"""As Qwen/Qwen3-8B has it."""


def folder(tmp_path: Path, written: dict[str, Any]) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    return tmp_path


@pytest.mark.parametrize(
    ("written", "config", "found"),
    [
        (QWEN3, {}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        (QWEN3, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 20, "top_p": 0.95}),
        ({"do_sample": False, "temperature": 0.7}, {}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.7}, {"temperature": 0.7}),
        ({"repetition_penalty": 1.1, "top_p": None}, {}, {"repetition_penalty": 1.1}),
        ({"eos_token_id": 2}, {}, {}),
    ],
)
def test_the_configs_come_first_and_then_the_files(
    tmp_path: Path, written: dict[str, Any], config: dict[str, Any], found: dict[str, Any]
) -> None:
    assert sampling_defaults(folder(tmp_path, written), SamplingConfig(**config)) == found


def test_without_a_file_there_is_what_the_config_has(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path, SamplingConfig(top_p=0.5)) == {"top_p": 0.5}


def test_a_value_that_no_request_may_have_is_refused_unless_the_config_has_another(tmp_path: Path) -> None:
    place = folder(tmp_path, {"temperature": 7})
    with pytest.raises(GymError, match=r"generation_config\.json: temperature: ") as caught:
        sampling_defaults(place, SamplingConfig())
    assert caught.value.code is ErrorCode.MODEL_INVALID
    assert "--set sampling.temperature=" in str(caught.value.hint)
    assert sampling_defaults(place, SamplingConfig(temperature=0.5)) == {"temperature": 0.5}


def adapter_on(base: Path, place: Path) -> Path:
    place.mkdir()
    named = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    (place / "adapter_config.json").write_text(json.dumps(named))
    return place


def test_an_adapters_folder_has_its_bases_file_unless_it_has_its_own(tmp_path: Path) -> None:
    (base := tmp_path / "base").mkdir()
    (base / "config.json").write_text("{}")
    first = adapter_on(base, tmp_path / "first")
    second = adapter_on(first, tmp_path / "second")
    assert sampling_defaults(second, SamplingConfig()) == {}
    folder(base, {"top_k": 20})
    assert sampling_defaults(second, SamplingConfig()) == {"top_k": 20}
    folder(first, {"top_k": 30})
    assert sampling_defaults(second, SamplingConfig()) == {"top_k": 30}
    folder(first, {"top_k": "many"})
    with pytest.raises(GymError, match=f"^{first / 'generation_config.json'}: top_k: "):
        sampling_defaults(second, SamplingConfig())


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, RESPONSES])
def test_a_request_is_filled_in_and_what_it_says_stands(url: str) -> None:
    from gym_fed.base.models import load_tokenizer

    engine = ScriptedEngine()
    service = OpenAIService(
        engine,  # type: ignore[arg-type]
        Catalogue("nano"),
        load_tokenizer("gym-nano"),
        vocab_size=262,
        fingerprint="fp_1",
        max_at_once=20,
        stored=StoredAnswers(StoredAnswersConfig()),
        sampling_defaults={"temperature": 0.6, "top_p": 0.9, "top_k": 20},
    )
    asked: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}]},
        COMPLETIONS: {"prompt": "hi"},
        RESPONSES: {"input": "hi"},
    }
    said = service.handle(url, {"model": "nano", "temperature": 0, **asked[url]}, LOCAL)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.9, 20)
    if url == RESPONSES:
        assert (said["temperature"], said["top_p"]) == (0, 0.9)


def test_a_server_of_gym_nano_takes_the_likeliest_token_as_its_file_says() -> None:
    with open_serving(ServingConfig(base="gym-nano", variants=None)) as serving:
        assert serving.service.sampling_defaults == {"temperature": 0.0}
        body = {
            "model": "gym-nano",
            "messages": [{"role": "user", "content": "sort: hbdac"}],
            "max_tokens": 12,
        }
        answers = {
            serving.service.handle(CHAT, body, LOCAL)["choices"][0]["message"]["content"] for _ in range(3)
        }
    assert len(answers) == 1


WRONG = [{"a": 1}, ["x", 5], [[1], 2], -1, [3, -2], True, 1.5, "2", 512, [5, 10**30]]


def with_ids(folder: Path, file: str, ids: Any) -> str:
    path = saved(folder) / file
    path.write_text(
        json.dumps((json.loads(path.read_text()) if path.exists() else {}) | {"eos_token_id": ids})
    )
    return str(folder)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "transformers"])
@pytest.mark.parametrize("ids", WRONG, ids=str)
def test_ids_of_generation_config_that_are_none_of_the_model_are_refused_by_their_file(
    tmp_path: Path, ids: Any, plain: bool
) -> None:
    folder = with_ids(tmp_path, "generation_config.json", ids)
    with pytest.raises(GymError, match=r"generation_config\.json: eos_token_id") as caught:
        load_base(folder, [], "float32", plain=plain)
    assert caught.value.code is ErrorCode.MODEL_INVALID
    assert caught.value.hint


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "transformers"])
@pytest.mark.parametrize("ids", WRONG, ids=str)
def test_ids_of_config_that_are_none_of_the_model_are_refused(tmp_path: Path, ids: Any, plain: bool) -> None:
    folder = with_ids(tmp_path, "config.json", ids)
    with pytest.raises(GymError, match=r"config\.json: .*eos_token_id") as caught:
        load_base(folder, [], "float32", plain=plain)
    assert caught.value.code is ErrorCode.MODEL_INVALID


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "transformers"])
@pytest.mark.parametrize(("ids", "wanted"), [(None, set()), (5, {5}), ([5, 511], {5, 511})])
def test_ids_of_both_files_and_of_the_tokenizer_end_an_answer(
    tmp_path: Path, ids: Any, wanted: set[int], plain: bool
) -> None:
    folder = with_ids(tmp_path, "generation_config.json", ids)
    model, tokenizer, _ = load_base(folder, [], "float32", plain=plain)
    assert end_ids(model, tokenizer) == wanted | {2, tokenizer.eos_token_id}  # 2 is config.json's


def test_a_model_of_an_unknown_vocabulary_takes_any_id() -> None:
    model = SimpleNamespace(config=SimpleNamespace(eos_token_id=[10**6]), generation_config=None)
    assert end_ids(model, SimpleNamespace(eos_token_id=None)) == {10**6}
