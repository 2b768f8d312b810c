"""Rows of plain strings: chat turns where the tokenizer has a chat template, for every algorithm and for evaluation."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.cli.main import app
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data.chat_templates.choice import use_chat_template
from gym_fed.data.chat_templates.rendering import trl_templates
from gym_fed.data.encoding import encode_one, encode_rows
from gym_fed.data.preview import sequences_of
from gym_fed.data.string_rows import as_turns, count_forms, forms_in_words
from gym_fed.evaluation.loss import heldout_loss
from gym_fed.training.rows.run_rows import encode_run, rows_of_run
from gym_fed.training.trainer import Trainer
from tests.support.conversations import byte_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
)
QUESTION, ANSWER, OTHER = "What is the capital of Peru?", "Lima.", "Quito."


def turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


STRINGS = {"prompt": QUESTION, "completion": ANSWER}
CHAT = {"messages": [*turn("user", QUESTION), *turn("assistant", ANSWER)]}
PAIR = {"prompt": QUESTION, "chosen": ANSWER, "rejected": OTHER}
CHAT_PAIR = {
    "prompt": turn("user", QUESTION),
    "chosen": turn("assistant", ANSWER),
    "rejected": turn("assistant", OTHER),
}


def encoded(algorithm: str, tokenizer: Any, rows: list[dict[str, Any]], **keys: Any) -> Any:
    graders = [{"grader": "length", "max": 10}] if ALGORITHMS.type_of(algorithm).needs_graders else []
    config = TrainingConfig(algorithm=algorithm, graders=graders, max_length=200, **keys)
    data, _ = rows_of_run(config, rows, None)
    return encode_run(config, ALGORITHMS.new(algorithm), tokenizer, data, None)


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "orpo", "simpo", "tdpo", "reward_model"])
def test_string_rows_are_encoded_as_the_conversation_that_they_are(tokenizer: Any, algorithm: str) -> None:
    strings, chats = (STRINGS, CHAT) if algorithm == "sft" else (PAIR, CHAT_PAIR)
    found, expected = (encoded(algorithm, tokenizer, [row] * 2) for row in (strings, chats))
    assert list(found.encoded) == list(expected.encoded)
    assert found.counts.forms["turns"] == len(
        rows_of_run(TrainingConfig(algorithm=algorithm), [strings] * 2, None)[0]
    )
    assert not expected.counts.forms


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "rloo", "ppo"])
def test_string_prompts_of_algorithms_that_generate_are_a_users_turn(tokenizer: Any, algorithm: str) -> None:
    found = encoded(algorithm, tokenizer, [{"prompt": QUESTION, "answer": ANSWER}] * 64)
    assert found.encoded[0] == {"prompt": turn("user", QUESTION), "answer": ANSWER}


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_with_chat_template_none_string_rows_stay_raw(tokenizer: Any, algorithm: str) -> None:
    raw = use_chat_template(tokenizer, "none")
    assert raw.chat_template is None
    assert tokenizer.chat_template, "the given tokenizer is left as it was"
    found = encoded(algorithm, raw, [STRINGS if algorithm == "sft" else PAIR] * 2)
    assert found.counts.forms == {"raw": 2}
    row = found.encoded[0]
    ids = row["input_ids"] if algorithm == "sft" else row["prompt_ids"] + row["chosen_ids"]
    assert raw.decode(ids) == f"{QUESTION}{ANSWER}<|im_end|>"


def test_the_default_system_message_also_begins_string_rows(tokenizer: Any) -> None:
    found = encoded("sft", tokenizer, [STRINGS], default_system="Be brief.")
    assert tokenizer.decode(found.encoded[0]["input_ids"]).count("Be brief.") == 1


def test_held_out_string_rows_are_measured_as_they_are_trained() -> None:
    loaded = load_model("gym-nano")
    as_strings, as_chat = (heldout_loss(loaded.model, loaded.tokenizer, [row]) for row in (STRINGS, CHAT))
    assert as_strings == as_chat
    raw = use_chat_template(loaded.tokenizer, "none")
    assert heldout_loss(loaded.model, raw, [STRINGS]) != as_chat


def test_text_rows_stay_raw_and_previews_show_string_rows_as_turns(tokenizer: Any) -> None:
    (text,) = encode_rows(tokenizer, [{"text": QUESTION}], max_length=100)
    assert tokenizer.decode(text["input_ids"]) == f"{QUESTION}<|im_end|>"
    for strings, chat in (
        (STRINGS, CHAT),
        (PAIR, CHAT_PAIR),
        ({"prompt": QUESTION}, {"prompt": turn("user", QUESTION)}),
    ):
        found, expected = (sequences_of(tokenizer, row) for row in (strings, chat))
        assert [sequence.encoded for sequence in found] == [sequence.encoded for sequence in expected]


@pytest.mark.parametrize("name", ["llama3", "gemma", "qwen2_5", "phi3", "cohere", "glm4moe"])
def test_prompts_that_were_templated_beforehand_are_trained_as_they_are(name: str) -> None:
    template = (trl_templates() / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = byte_tokenizer(template)
    prompt = tokenizer.apply_chat_template(turn("user", QUESTION), tokenize=False, add_generation_prompt=True)
    row = {"prompt": prompt, "completion": ANSWER}
    assert as_turns(tokenizer, [row]) == [row]
    assert count_forms(tokenizer, [row, STRINGS]) == {"turns": 1, "templated": 1}


def test_prompts_under_a_template_of_plain_words_are_recognised_by_its_header() -> None:
    vicuna = "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}{{ m.content }}\n{% endfor %}"
    tokenizer = byte_tokenizer(vicuna)
    templated = {"prompt": "USER: Hello\nASSISTANT: ", "completion": "Hi"}
    asked = {"prompt": "Say who the user is", "completion": "Ida"}
    assert as_turns(tokenizer, [templated]) == [templated]
    assert as_turns(tokenizer, [asked])[0]["messages"][0]["content"] == asked["prompt"]


def test_an_end_token_written_by_hand_is_not_doubled_by_the_template(tokenizer: Any) -> None:
    by_hand = {"prompt": QUESTION, "completion": f"{ANSWER}<|im_end|>\n"}
    assert encode_one(tokenizer, by_hand) == encode_one(tokenizer, CHAT)


@pytest.fixture
def decoders_built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets an entry each time a tokenizer builds ``added_tokens_decoder``."""
    built: list[int] = []
    original = PreTrainedTokenizerFast.added_tokens_decoder

    def counted(self: Any) -> Any:
        built.append(1)
        return original.__get__(self)

    monkeypatch.setattr(PreTrainedTokenizerFast, "added_tokens_decoder", property(counted))
    return built


@pytest.mark.parametrize(
    "prepare",
    [
        as_turns,
        count_forms,
        lambda tokenizer, rows: [as_turns(tokenizer, [row]) for row in rows],
    ],
    ids=["as_turns", "count_forms", "as_turns of single rows"],
)
def test_added_tokens_are_read_once_for_any_number_of_rows(prepare: Any, decoders_built: list[int]) -> None:
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.add_tokens([f"<unused{number}>" for number in range(50)])
    decoders_built.clear()
    prepare(tokenizer, [STRINGS] * 40)
    assert len(decoders_built) == 1


def test_marks_follow_a_tokenizer_whose_template_or_tokens_change() -> None:
    tokenizer = byte_tokenizer(CHATML)
    row = {"prompt": "[INST] Hello [/INST]", "completion": "Hi"}
    assert count_forms(tokenizer, [row]) == {"turns": 1}
    tokenizer.chat_template = "{% for m in messages %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}{% endfor %}"
    tokenizer.add_tokens(["[INST]", "[/INST]"])
    assert count_forms(tokenizer, [row]) == {"templated": 1}
    tokenizer.chat_template = CHATML
    assert count_forms(tokenizer, [row]) == {"turns": 1}


@pytest.mark.parametrize(
    ("prompt", "content"), [("<s>hi", "hi"), ("hi <s>", "hi <s>"), ("<s><s>hi", "<s>hi"), ("hi", "hi")]
)
def test_the_bos_token_before_a_prompt_is_left_to_the_template(prompt: str, content: str) -> None:
    tokenizer = byte_tokenizer(f"{{{{ bos_token }}}}{CHATML}")
    (row,) = as_turns(tokenizer, [{"prompt": prompt, "completion": "Hello."}])
    assert row["messages"][0] == {"role": "user", "content": content}


def test_prompts_keep_their_beginning_where_the_tokenizer_has_no_bos_token() -> None:
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.bos_token = None
    (row,) = as_turns(tokenizer, [{"prompt": "<s>hi", "completion": "Hello."}])
    assert row["messages"][0]["content"] == "<s>hi"


def test_the_run_says_what_became_of_string_rows(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "questions.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows([["prompt", "completion"], *([QUESTION, ANSWER] for _ in range(3))])
    flags = ["train", "--no-check", "--model", "gym-nano", "--data", str(file)]
    flags += ["--max-steps", "1", "--finetuning", "full"]
    for extra, words in (
        ([], "data: 3 rows of plain strings, trained as chat turns (chat_template: none keeps them raw)"),
        (["--chat-template", "none"], "data: 3 rows of plain strings, trained raw (without a chat template)"),
    ):
        run = tmp_path / f"run{len(extra)}"
        result = CliRunner().invoke(app, [*flags, *extra, "--output-dir", str(run)])
        assert result.exit_code == 0, result.output
        assert words in " ".join(result.stderr.split())
        assert bool(load_tokenizer(str(run)).chat_template) is not bool(extra)


def test_a_run_on_strings_learns_what_a_run_on_conversations_learns(tmp_path: Path) -> None:
    losses = []
    for name, row in (("strings", STRINGS), ("chat", CHAT)):
        config = TrainingConfig(model="gym-nano", output_dir=tmp_path / name, max_steps=2)
        losses.append(Trainer(config).train([row] * 4, [row]).losses)
    assert losses[0] == losses[1]


def test_counts_of_forms_are_in_words_and_in_json() -> None:
    assert forms_in_words({"turns": 1500}) == [
        "1,500 rows of plain strings, trained as chat turns (chat_template: none keeps them raw)"
    ]
    assert json.loads(json.dumps({"raw": 1})) == {"raw": 1}
    assert forms_in_words({}) == []
