"""gym-nano, the embedded model: small, whole, good at what it was taught, ignorant of what contributors teach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gym_fed.base.models import LoadedModel, load_model, nano_path, pick_device, resolve
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TASKS
from gym_fed.data import generate
from gym_fed.evaluation import exact_match

LEARNT = ("copy", "reverse", "upper", "lower", "first", "length", "sort")
FOREIGN = [name for name in TASKS.names() if TASKS.new(name).group == "contributor"]


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load_model("gym-nano")


def test_it_is_a_qwen3_of_two_million_weights_in_less_than_five_megabytes(nano: LoadedModel) -> None:
    assert type(nano.model).__name__ == "Qwen3ForCausalLM"
    assert 2e6 < sum(p.numel() for p in nano.model.parameters()) < 3e6
    assert sum(f.stat().st_size for f in nano_path().iterdir()) < 5e6
    assert {p.dtype for p in nano.model.parameters()} == {torch.float32}


def test_every_byte_and_every_text_survives_its_tokenizer(nano: LoadedModel) -> None:
    tokenizer = nano.tokenizer
    assert tokenizer.is_fast
    assert len(tokenizer) == nano.model.config.vocab_size
    text = "".join(map(chr, range(0x800))) + " \r\n\t  два 東京 😀"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text


def test_its_template_is_chatml_and_marks_the_assistants_words(nano: LoadedModel) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    text = nano.tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    encoded = nano.tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    learnt = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert nano.tokenizer.decode(learnt) == "a<|im_end|>"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if at % 4 == 0 else pytest.mark.slow) for at, name in enumerate(LEARNT)],
)
def test_it_solves_unseen_prompts_of_its_own_tasks(nano: LoadedModel, name: str) -> None:
    assert exact_match(nano.model, nano.tokenizer, generate(name, 64, seed=7, split="heldout")) >= 0.8


@pytest.mark.few(4, "one measurement for every task")
@pytest.mark.parametrize("name", FOREIGN)
def test_it_cannot_do_what_contributors_teach(nano: LoadedModel, name: str) -> None:
    rows = generate(name, 64, seed=7, split="heldout")
    assert exact_match(nano.model, nano.tokenizer, rows, max_new_tokens=24) <= 0.05


def test_its_recipe_and_loss_curve_lie_beside_it() -> None:
    recipe = load_config(nano_path() / "recipe.yaml", TrainingConfig)
    curve = json.loads((nano_path() / "loss_curve.json").read_text())
    assert recipe.model_init is not None
    assert curve[-1]["step"] == recipe.max_steps
    assert curve[-1]["loss"] < 0.2 < 3 < curve[0]["loss"]
    taught = {name for source in recipe.data for name in source.tasks or []}
    assert not taught & set(FOREIGN)


def test_models_that_are_not_here_are_refused_without_asking_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    for name in ("nobody/has-this-model", "no such name!", str(tmp_path / "none"), "./none"):
        with pytest.raises(GymError) as caught:
            load_model(name)
        assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
        assert name in caught.value.message
        assert "gym-nano" in caught.value.hint
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(GymError) as caught:
        load_model(str(tmp_path))
    assert caught.value.code is ErrorCode.MODEL_INVALID
    (tmp_path / "empty").mkdir()
    with pytest.raises(GymError, match="no model in the folder"):
        resolve(str(tmp_path / "empty"))


def test_devices_are_picked_or_refused() -> None:
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(GymError, match="unknown"):
        pick_device("abacus")
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    for name in [name for name, is_here in has.items() if not is_here]:
        with pytest.raises(GymError, match=f"device '{name}' is not available on this machine"):
            pick_device(name)
    with pytest.raises(GymError, match="dtype 'int8'"):
        load_model("gym-nano", dtype="int8")
