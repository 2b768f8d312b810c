"""One BOS and one end token, also for text that was templated beforehand, under post-processors that add a BOS."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data.chat_templates.choice import use_chat_template
from gym_fed.data.chat_templates.rendering import trl_templates
from gym_fed.data.encoding import encode_rows, prompt_ids
from gym_fed.serving.openai.prompts import Prompts
from gym_fed.serving.plain_tokenizer import plain_tokenizer
from gym_fed.training.algorithms.distillation.sequence_distillation import _prompt_ids
from gym_fed.training.algorithms.rewards._rollouts import GrpoRollouts, RlooRollouts
from gym_fed.training.rows.run_rows import encode_run, rows_of_run
from tests.support.conversations import byte_tokenizer

FAMILIES = {"llama3": ("<|begin_of_text|>", "<|eot_id|>"), "gemma": ("<bos>", "<eos>")}
ASKED = [{"role": "user", "content": "Hello?"}]


@pytest.fixture(params=sorted(FAMILIES))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """A tokenizer with the family's chat template, whose post-processor adds the BOS, as the family's own does."""
    bos, eos = FAMILIES[request.param]
    template = (trl_templates() / f"{request.param}.jinja").read_text(encoding="utf-8")
    made = byte_tokenizer(template, bos=bos, eos=eos)
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, made.bos_token_id)]
    )
    assert made("a")["input_ids"][0] == made.bos_token_id, "the fixture adds a BOS"
    return made


def templated(tokenizer: Any) -> str:
    text = str(tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True))
    assert text.startswith(tokenizer.bos_token)
    return text


def bos_count(tokenizer: Any, ids: list[int]) -> int:
    return ids.count(tokenizer.bos_token_id)


@pytest.mark.parametrize(
    "row",
    [
        lambda text: {"text": f"{text}Hi."},
        lambda text: {"prompt": text, "completion": "Hi."},
        lambda text: {"messages": [*ASKED, {"role": "assistant", "content": "Hi."}]},
    ],
)
@pytest.mark.parametrize("packing", [False, True])
def test_a_row_that_begins_with_the_bos_is_learned_with_one(tokenizer: Any, row: Any, packing: bool) -> None:
    (found,) = encode_rows(tokenizer, [row(templated(tokenizer))], max_length=500, packing=packing)
    assert found["input_ids"][0] == tokenizer.bos_token_id
    assert bos_count(tokenizer, found["input_ids"]) == 1


@pytest.mark.parametrize(
    "algorithm", ["sft", "pretrain", "dpo", "kto", "orpo", "simpo", "tdpo", "reward_model"]
)
def test_every_algorithm_gives_templated_text_one_bos(tokenizer: Any, algorithm: str) -> None:
    text = templated(tokenizer)
    supervised = algorithm in ("sft", "pretrain")
    row = (
        {"prompt": text, "completion": "Hi."}
        if supervised
        else {"prompt": text, "chosen": "Hi.", "rejected": "Ho."}
    )
    config = TrainingConfig(algorithm=algorithm, max_length=500, packing=False if supervised else None)
    data, _ = rows_of_run(config, [row] * 2, None)
    for one in encode_run(config, ALGORITHMS.new(algorithm), tokenizer, data, None).encoded:
        joined = [ids for key, ids in one.items() if key in ("input_ids", "prompt_ids", "prompt_input_ids")]
        joined = joined or [one["chosen_ids"], one["rejected_ids"]]
        assert [bos_count(tokenizer, ids) for ids in joined] == [1] * len(joined)


def test_a_text_that_was_templated_twice_keeps_one_bos(tokenizer: Any) -> None:
    assert bos_count(tokenizer, prompt_ids(tokenizer, tokenizer.bos_token + templated(tokenizer))) == 1


def test_a_text_without_bos_gets_the_tokenizers_own(tokenizer: Any) -> None:
    assert prompt_ids(tokenizer, "Hello")[0] == tokenizer.bos_token_id


def test_prompts_of_chat_evaluation_and_teachers_have_one_bos(tokenizer: Any) -> None:
    for prompt in (templated(tokenizer), ASKED):
        assert bos_count(tokenizer, prompt_ids(tokenizer, prompt)) == 1
        assert bos_count(tokenizer, _prompt_ids(tokenizer, {"prompt": prompt})) == 1


@pytest.mark.parametrize("rollouts", [GrpoRollouts, RlooRollouts])
def test_prompts_that_are_answered_in_training_have_one_bos(tokenizer: Any, rollouts: Any) -> None:
    trainer = object.__new__(rollouts)
    trainer.processing_class, trainer.tools, trainer.chat_template_kwargs = tokenizer, [], {}
    trainer.chat_template, trainer.environment_factories, trainer._is_vlm = None, None, False
    for prompt in (templated(tokenizer), ASKED):
        ids, *_ = trainer._tokenize_prompts([prompt])
        assert bos_count(tokenizer, ids[0]) == 1


def test_an_end_token_in_the_text_is_not_doubled(tokenizer: Any) -> None:
    for text in (f"Hi.{tokenizer.eos_token}", f"Hi.{tokenizer.eos_token}\n", "Hi."):
        (found,) = encode_rows(tokenizer, [{"text": text}], max_length=500)
        assert found["input_ids"].count(tokenizer.eos_token_id) == 1


def test_a_completion_request_of_templated_text_has_one_bos(tokenizer: Any, tmp_path: Any) -> None:
    tokenizer.save_pretrained(tmp_path)
    for served in (tokenizer, plain_tokenizer(tmp_path, "LlamaForCausalLM")):
        assert served is not None
        prompts = Prompts(served, vocab_size=len(served))
        request = SimpleNamespace(prompt=templated(tokenizer))
        ids = prompts._tokens(request.prompt, special=True)
        assert bos_count(tokenizer, ids) == 1
        assert bos_count(tokenizer, prompt_ids(served, request.prompt)) == 1
        raw = prompts._tokens(request.prompt, special=False)
        assert bos_count(tokenizer, raw) == 1


def test_conversations_under_no_template_are_refused_and_strings_are_raw(tokenizer: Any) -> None:
    raw = use_chat_template(tokenizer, "none")
    (found,) = encode_rows(raw, [{"prompt": templated(tokenizer), "completion": "Hi."}], max_length=500)
    assert bos_count(raw, found["input_ids"]) == 1
