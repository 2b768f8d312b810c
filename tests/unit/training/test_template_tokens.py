"""Tokens of the chat template that the tokenizer lacks, and tokens that the embeddings lack: refused, or added."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.chat_templates.choice import suggested_templates
from gym_fed.data.encoding import IGNORED, encode_one
from gym_fed.evaluation.generation import answer
from gym_fed.evaluation.graders.base import Grader, Sample
from gym_fed.training.model.template_tokens import require_embedded, template_tokenizer
from gym_fed.training.trainer import Trainer
from tests.support.conversations import byte_tokenizer

ROWS = [{"prompt": "ab", "completion": "ba"}] * 4
SIZES = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def plain_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose tokenizer has bytes, <s> and </s>, and no chat template."""
    return made(tmp_path_factory.mktemp("plain"), tied=False)


def made(folder: Path, *, tied: bool, rows: int = 258) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = byte_tokenizer(None)
    assert len(tokenizer) == 258
    settings = LlamaConfig(
        vocab_size=rows,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        **SIZES,
    )
    LlamaForCausalLM(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config(base: Path, folder: Path, **keys: Any) -> TrainingConfig:
    fixed: dict[str, Any] = {"finetuning": "full", "max_steps": 1, "max_length": 256, "device": "cpu"}
    return TrainingConfig(model=str(base), output_dir=folder, **{**fixed, **keys})


@pytest.mark.parametrize(
    "template",
    [
        *("chatml", "qwen3", "llama3", "gemma", "phi", "granite3", "cohere"),
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|stop|>{% endfor %}",
    ],
)
def test_a_template_whose_end_token_is_no_token_is_refused_before_the_weights_are_read(
    plain_base: Path, tmp_path: Path, template: str
) -> None:
    (plain_base / "model.safetensors").rename(tmp_path / "away")
    try:
        if template == "cohere":  # it ends an answer with the tokenizer's own token
            with pytest.raises(GymError, match="model"):
                Trainer(config(plain_base, tmp_path / "run", chat_template=template)).train(ROWS)
            return
        with pytest.raises(
            GymError, match=r"ends an answer with <.*>, which is not a token of the tokenizer"
        ) as caught:
            Trainer(config(plain_base, tmp_path / "run", chat_template=template)).train(ROWS)
    finally:
        (tmp_path / "away").rename(plain_base / "model.safetensors")
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "chat_template_tokens: add" in caught.value.hint
    assert "whose end token the tokenizer has: zephyr, vicuna or default" in caught.value.hint
    assert not (tmp_path / "run").exists()


def test_conversations_without_a_template_are_refused_before_the_weights_are_read_by_templates_that_work(
    plain_base: Path, tmp_path: Path
) -> None:
    rows = [{"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]}] * 4
    (plain_base / "model.safetensors").rename(tmp_path / "away")
    try:
        with pytest.raises(GymError, match="no chat template") as caught:
            Trainer(config(plain_base, tmp_path / "run")).train(rows)
    finally:
        (tmp_path / "away").rename(plain_base / "model.safetensors")
    assert caught.value.hint.startswith("set chat_template to zephyr, vicuna or default, or to a Jinja file;")
    advised = Trainer(config(plain_base, tmp_path / "run", chat_template="zephyr")).train(rows)
    assert advised.steps == 1


def test_a_template_is_suggested_only_if_the_tokenizer_has_its_end_token(plain_base: Path) -> None:
    tokenizer = load_tokenizer(str(plain_base))
    assert suggested_templates(tokenizer) == "zephyr, vicuna or default"
    tokenizer.eos_token = None
    assert suggested_templates(tokenizer) == ""
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    assert suggested_templates(tokenizer) == "chatml"
    assert tokenizer.eos_token is None, "a template that is tried changes nothing"


@pytest.mark.parametrize("template", ["default", "vicuna", "zephyr", "llama2", "none"])
def test_templates_that_end_with_the_tokenizers_own_token_are_trained(
    plain_base: Path, tmp_path: Path, template: str
) -> None:
    trained = Trainer(config(plain_base, tmp_path / "run", chat_template=template)).train(ROWS)
    row = encode_one(trained.tokenizer, ROWS[0])
    learned = [label for label in row["labels"] if label != IGNORED]
    assert learned[-1] == trained.tokenizer.eos_token_id == load_tokenizer(str(plain_base)).eos_token_id


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("spare", [0, 6])
def test_tokens_that_are_added_have_rows_that_begin_as_the_mean_and_are_saved(
    tmp_path: Path, tied: bool, spare: int
) -> None:
    base = made(tmp_path / "base", tied=tied, rows=258 + spare)
    before = load_model(str(base)).model
    settings = config(
        base, tmp_path / "run", chat_template="chatml", chat_template_tokens="add", learning_rate=1e-12
    )
    Trainer(settings).train(ROWS)
    after = load_model(str(tmp_path / "run"))
    assert after.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"]) in ([258, 259], [259, 258])
    assert after.tokenizer.eos_token == "<|im_end|>"
    for old, new in (
        (before.get_input_embeddings(), after.model.get_input_embeddings()),
        (before.get_output_embeddings(), after.model.get_output_embeddings()),
    ):
        assert len(new.weight) == max(260, 258 + spare)
        assert torch.allclose(new.weight[:258], old.weight[:258], atol=1e-6)
        assert torch.allclose(new.weight[258:260], old.weight[:258].mean(dim=0).expand(2, -1), atol=1e-6)
    assert after.model.config.vocab_size == max(260, 258 + spare)


def test_a_model_with_added_tokens_learns_to_stop(plain_base: Path, tmp_path: Path) -> None:
    settings = config(
        plain_base,
        tmp_path / "run",
        chat_template="chatml",
        chat_template_tokens="add",
        learning_rate=0.02,
        max_steps=60,
    )
    Trainer(settings).train(ROWS)
    trained = load_model(str(tmp_path / "run"))
    assert answer(trained.model, trained.tokenizer, "ab", max_new_tokens=16) == "ba"


def test_an_interrupted_run_with_added_tokens_ends_with_the_same_weights(
    plain_base: Path, tmp_path: Path
) -> None:
    def settings(name: str) -> TrainingConfig:
        return config(
            plain_base,
            tmp_path / name,
            chat_template="chatml",
            chat_template_tokens="add",
            max_steps=4,
            save_steps=2,
        )

    whole = Trainer(settings("whole")).train(ROWS).model.state_dict()
    steps = iter([False, False, True])
    with pytest.raises(GymError) as caught:
        Trainer(settings("parts"), should_stop=lambda: next(steps, True)).train(ROWS)
    assert caught.value.code is ErrorCode.INTERRUPTED
    resumed = Trainer(settings("parts")).train(ROWS).model.state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("finetuning", ["lora", "freeze"])
def test_tokens_are_not_added_where_their_rows_would_not_be_trained(
    plain_base: Path, tmp_path: Path, finetuning: str
) -> None:
    keys = {"chat_template": "chatml", "chat_template_tokens": "add", "finetuning": finetuning}
    with pytest.raises(GymError, match=f"finetuning: {finetuning} does not train or save") as caught:
        Trainer(config(plain_base, tmp_path / "run", **keys)).train(ROWS)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "finetuning: full" in caught.value.hint


def test_a_tokenizer_that_has_the_tokens_is_left_as_it_is(plain_base: Path, tmp_path: Path) -> None:
    own = byte_tokenizer(None, "<|im_start|>", "<|im_end|>")
    settings = config(plain_base, tmp_path / "run", chat_template="chatml", chat_template_tokens="add")
    assert template_tokenizer(own, settings).get_vocab() == own.get_vocab()
    assert own.chat_template is None


def test_a_row_with_a_token_that_has_no_embedding_is_refused_and_an_unused_token_is_not(
    plain_base: Path, tmp_path: Path
) -> None:
    loaded = load_model(str(plain_base))
    loaded.tokenizer.add_tokens(["<more>", "<most>"])
    settings = config(plain_base, tmp_path / "run")
    rows = [*ROWS[:1], {"text": "a<most>b"}]
    trainer = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer)
    with pytest.raises(GymError, match=r"row 2 has token id 259, .* rows 0 to 257") as caught:
        trainer.train(rows)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert not (tmp_path / "run").exists()
    unused = config(plain_base, tmp_path / "unused")
    assert Trainer(unused, model=loaded.model, tokenizer=loaded.tokenizer).train(ROWS).steps == 1
    grown = config(plain_base, tmp_path / "run", chat_template_tokens="add")
    assert (
        Trainer(grown, model=loaded.model, tokenizer=loaded.tokenizer).train([{"text": "a<most>b"}] * 4).steps
        == 1
    )
    assert load_model(str(tmp_path / "run")).model.config.vocab_size == 260


@pytest.mark.parametrize("column", ["input_ids", "completion_ids", "KL_completion_ids", "rejected_input_ids"])
def test_the_token_after_the_last_row_of_embeddings_is_refused_and_the_last_is_not(
    plain_base: Path, column: str
) -> None:
    model = load_model(str(plain_base)).model
    require_embedded(model, [{column: [3, 257]}, {column: []}], None)
    with pytest.raises(GymError, match=r"row 1 has token id 258, .* rows 0 to 257"):
        require_embedded(model, None, [{column: [258, 3]}])


def test_columns_for_rewards_whose_names_end_in_ids_are_no_tokens(plain_base: Path, tmp_path: Path) -> None:
    class Products(Grader):
        """Reads the rows' own columns."""

        name = "products"

        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []

        def grade(self, samples: Sequence[Sample]) -> list[float]:
            self.rows += [dict(sample.row) for sample in samples]
            return [float(len(sample.completion)) for sample in samples]

    own = {"user_ids": "u-17", "product_ids": [4711], "completion_ids": [4711], "case_ids": 5}
    settings = config(
        plain_base,
        tmp_path / "run",
        algorithm="grpo",
        grpo={"max_completion_length": 4, "num_generations": 2},
        per_device_train_batch_size=2,
    )
    grader = Products()
    rows = [{"prompt": text, **own} for text in ("ab", "ba")]
    assert Trainer(settings, graders=[grader]).train(rows).steps == 1
    assert grader.rows
    assert all(row == own for row in grader.rows)


def test_embeddings_that_zero_3_has_split_count_with_their_whole_shape(plain_base: Path) -> None:
    model = load_model(str(plain_base)).model
    weight = model.get_input_embeddings().weight
    weight.ds_shape, weight.data = weight.shape, torch.empty(0)  # as DeepSpeed leaves it

    require_embedded(model, [{"input_ids": [257]}])
    with pytest.raises(GymError, match="rows 0 to 257"):
        require_embedded(model, [{"input_ids": [258]}])
