"""Rows in the layouts of TRL, Axolotl and ms-swift give the tokens and labels of the tool that they were written for.

TRL is a dependency. The others run where they are installed next to gym-fed, in an environment of their own:
``pip install --no-deps axolotl ms-swift addict modelscope modelscope-hub json_repair``. Elsewhere,
their tokens and labels are those of ``golden/rows_of_peers.json``, recorded with Axolotl 0.19.0 and ms-swift 4.6.0.
``RECORD_PEERS=1`` writes that file again, with both installed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gym_fed.data.chat_templates.rendering import trl_templates
from gym_fed.data.encoding import IGNORED, encode_one
from gym_fed.data.reading import Learned, converted
from gym_fed.data.rows import as_kind
from gym_fed.training.rows.answers import encode_answers

Row = dict[str, Any]

WORDS = (
    "hello there, how are you? I am doing very well, thank you! The answer is 4. Let me think step by step. "
)
MORE = "What is the weather in Oslo and Rome today? It is sunny, 22 degrees. blue green sky assistant user system "
SPECIAL = {
    "qwen2_5": ("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
    "llama3": ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    "phi3": ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
}
"""Special tokens of each template, the end of a sequence first."""
END_OF_TURN = {"phi3": ["<|end|>"]}


def tokenizer_of(template: str | None) -> Any:
    """A small byte-level BPE tokenizer, whose tokens cross the borders of words."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [WORDS * 3, MORE * 3],
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False),
    )
    special = SPECIAL.get(str(template), ("</s>",))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0], pad_token=special[0])
    tokenizer.add_special_tokens({"additional_special_tokens": list(special[1:])})
    if "<|begin_of_text|>" in special:
        tokenizer.bos_token = "<|begin_of_text|>"
    if template is not None:
        tokenizer.chat_template = (trl_templates() / f"{template}.jinja").read_text()
    return tokenizer


def user(text: str, **more: Any) -> Row:
    return {"role": "user", "content": text, **more}


def answer(text: str, **more: Any) -> Row:
    return {"role": "assistant", "content": text, **more}


def ours(row: Row, tokenizer: Any, learned: Learned = Learned(), kind: Any = "supervised") -> Row:
    ((_, read),) = converted([("row 1", deepcopy(row))], "auto", learned=learned)
    (whole,) = as_kind([read], kind)
    return dict(encode_one(tokenizer, whole))


RECORDED = Path(__file__).parent / "golden" / "rows_of_peers.json"


def of_peer(package: str, name: str, encode: Callable[[], Row]) -> Row:
    """Return a row as the peer encodes it, or as it was recorded if the peer is not installed."""
    rows = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if find_spec(package) is None:
        ids, learned = rows[f"{package} {name}"]
        labels = [token if mark == "1" else IGNORED for token, mark in zip(ids, learned, strict=True)]
        return {"input_ids": ids, "labels": labels}
    row = encode()
    if os.environ.get("RECORD_PEERS"):
        ids = [int(token) for token in row["input_ids"]]
        rows[f"{package} {name}"] = [ids, "".join("01"[label != IGNORED] for label in row["labels"])]
        lines = (f"{json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows))
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return row


def assert_equal(tokenizer: Any, found: Row, expected: Row) -> None:
    """Compare token by token; the message shows what is learned."""

    def shown(row: Row) -> str:
        return "".join(f"[{tokenizer.decode([label])}]" for label in row["labels"] if label != IGNORED)

    assert tokenizer.decode(found["input_ids"]) == tokenizer.decode(expected["input_ids"])
    assert found["input_ids"] == list(expected["input_ids"])
    assert shown(found) == shown(expected)
    assert found["labels"] == list(expected["labels"])


def without_line_breaks(tokenizer: Any, row: Row) -> Row:
    """Return a peer's row without the labels of line breaks that the template writes, and no model.

    TRL and ms-swift learn the one behind an end token, and TRL the one before an answer.
    """
    (line_break,) = tokenizer("\n")["input_ids"]
    labels, before = list(row["labels"]), [None, *row["input_ids"]]
    for at, label in enumerate(labels):
        if label == line_break and (before[at] == tokenizer.eos_token_id or row["labels"][at - 1] == IGNORED):
            labels[at] = IGNORED
    return {**row, "labels": labels}


# Axolotl ---------------------------------------------------------------------------------------------------------

CHAT = [
    {"role": "system", "content": "You are a user of tools."},
    user("hello there"),
    answer("How are you?"),
    user("very well"),
    answer("I am doing very well, thank you!"),
]
FLAGGED = [
    {"role": "system", "content": "Let me think.", "train": False},
    user("hello", train=False),
    answer("hello there", train=True),
    user("how are you?", train=True),
    answer("very well", train=True),
    user("The answer?", train=True),
    answer("It is 4.", train=False),
]
RANGES = [
    {"begin_offset": 0, "end_offset": 9, "train": False},
    {"begin_offset": 10, "end_offset": 19, "train": True},
    {"begin_offset": 20, "end_offset": 25, "train": False},
]
PARTS = [
    {"type": "text", "text": "Let me think step by step.", "train": False},
    {"type": "text", "text": " The answer is 4.", "train": True},
]
WEIGHED = [
    {"type": "text", "text": "The answer is", "weight": 1},
    {"type": "text", "text": " very well 4", "weight": 0},
    {"type": "text", "text": " thank you!"},
]
CONVERSATIONS = {
    "roles": CHAT,
    "train": FLAGGED,
    "ranges": [*CHAT[:-1], {**CHAT[-1], "train_detail": RANGES}],
    "parts": [*CHAT[:-1], {"role": "assistant", "content": PARTS}],
    "weights of parts": [*CHAT[:-1], {"role": "assistant", "content": WEIGHED}],
    "parts of a user": [
        CHAT[0],
        {"role": "user", "content": [PARTS[0], WEIGHED[2]]},
        CHAT[2],
        {"role": "user", "content": [WEIGHED[0], WEIGHED[2]]},
        CHAT[4],
    ],
    "ranges of a user": [
        CHAT[0],
        {**CHAT[1], "train_detail": [{"begin_offset": 0, "end_offset": 10, "train": True}]},
        CHAT[2],
    ],
}


def of_axolotl(
    row: Row, tokenizer: Any, template: str, roles: list[str], ends: str | None, **more: Any
) -> Row:
    strategies = import_module("axolotl.prompt_strategies.chat_template")
    prompter = strategies.ChatTemplatePrompter(
        tokenizer,
        chat_template=tokenizer.chat_template,
        message_field_training="train",
        message_field_training_detail="train_detail",
        **more,
    )
    strategy = strategies.ChatTemplateStrategy(
        prompter,
        tokenizer=tokenizer,
        train_on_inputs=False,
        sequence_len=4096,
        roles_to_train=roles,
        train_on_eos=ends,
        eot_tokens=END_OF_TURN.get(template),
    )
    return dict(strategy.tokenize_prompt(deepcopy(row)))


@pytest.mark.parametrize("ends", ["turn", "all", "last", None])
@pytest.mark.parametrize(
    "roles", [["assistant"], ["user"], ["user", "assistant"], ["system", "user", "assistant"], []]
)
@pytest.mark.parametrize("template", list(SPECIAL))
def test_roles_and_end_tokens_are_learned_as_in_axolotl(
    template: str, roles: list[str], ends: str | None
) -> None:
    tokenizer = tokenizer_of(template)
    expected = of_peer(
        "axolotl",
        f"{template} {roles} {ends}",
        lambda: of_axolotl({"messages": CHAT}, tokenizer, template, roles, ends),
    )
    assert_equal(tokenizer, ours({"messages": CHAT}, tokenizer, Learned(roles, ends or "none")), expected)


@pytest.mark.parametrize("roles", [["assistant"], []])
@pytest.mark.parametrize("name", [name for name in CONVERSATIONS if name != "roles"])
@pytest.mark.parametrize("template", list(SPECIAL))
def test_turns_and_parts_with_flags_are_learned_as_in_axolotl(
    template: str, name: str, roles: list[str]
) -> None:
    tokenizer, row = tokenizer_of(template), {"messages": CONVERSATIONS[name]}
    expected = of_peer(
        "axolotl", f"{template} {roles} {name}", lambda: of_axolotl(row, tokenizer, template, roles, "turn")
    )
    assert_equal(tokenizer, ours(row, tokenizer, Learned(roles)), expected)


def test_other_names_of_messages_and_keys_are_read_as_in_axolotl() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    turns = [{"speaker": turn["role"], "said": turn["content"]} for turn in CHAT]
    from gym_fed.data.reading import renaming

    rename = renaming({"messages": "talk", "messages.role": "speaker", "messages.content": "said"})
    ((_, read),) = converted([("row 1", {"talk": turns})], "auto", rename)
    mapped = {"field_messages": "talk", "message_property_mappings": {"role": "speaker", "content": "said"}}
    expected = of_peer(
        "axolotl",
        "other names",
        lambda: of_axolotl({"talk": turns}, tokenizer, "qwen2_5", ["assistant"], "turn", **mapped),
    )
    assert_equal(tokenizer, dict(encode_one(tokenizer, read)), expected)


def of_axolotl_segments(row: Row, tokenizer: Any) -> Row:
    raw = import_module("axolotl.prompt_strategies.input_output")
    strategy = raw.RawInputOutputStrategy(raw.RawInputOutputPrompter(), tokenizer, False, 4096)
    return dict(strategy.tokenize_prompt(row))


def test_segments_are_joined_and_learned_as_in_axolotl() -> None:
    tokenizer = tokenizer_of(None)
    parts = (("hello there\n", False), ("I am very ", True), ("well, thank", False), (" you!</s>", True))
    row = {"segments": [{"text": text, "label": label} for text, label in parts]}
    expected = of_peer("axolotl", "segments", lambda: of_axolotl_segments(row, tokenizer))
    assert_equal(tokenizer, ours(row, tokenizer), expected)


# TRL -------------------------------------------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
SUPERVISED: dict[str, Row] = {
    "language modeling": {"text": "The sky is blue."},
    "language modeling, chat": {"messages": CHAT},
    "prompt and completion": {"prompt": "The sky is", "completion": " blue."},
    "prompt and completion, chat": {"prompt": [user("The sky?")], "completion": [answer("It is blue.")]},
    "a prompt with answers, chat": {"prompt": CHAT[:-1], "completion": CHAT[-1:]},
    "tools, chat": {
        "prompt": [{"role": "system", "content": "Let me think."}, user("What is the weather in Oslo?")],
        "completion": [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
        "tools": [TOOL],
    },
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def of_trl(row: Row, tokenizer: Any, model: Any, folder: Path) -> Row:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    chat = "messages" in row
    arguments = SFTConfig(
        output_dir=str(folder), max_length=None, bf16=False, report_to=[], assistant_only_loss=chat
    )
    data = Dataset.from_list([row])
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    return dict(trainer.train_dataset[0])


@pytest.mark.parametrize("name", list(SUPERVISED))
def test_supervised_rows_are_encoded_as_by_trl(name: str, tiny: Any, tmp_path: Path) -> None:
    row = SUPERVISED[name]
    tokenizer = tokenizer_of("qwen2_5" if "chat" in name else None)
    expected = without_line_breaks(tokenizer, of_trl(deepcopy(row), tokenizer, tiny, tmp_path))
    assert_equal(tokenizer, ours(row, tokenizer), expected)


PREFERENCES: dict[str, Row] = {
    "explicit": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "explicit, chat": {"prompt": CHAT[:-1], "chosen": [answer("blue")], "rejected": [answer("green")]},
    "implicit, chat": {"chosen": [user("sky?"), answer("blue")], "rejected": [user("sky?"), answer("green")]},
}


@pytest.mark.parametrize("name", list(PREFERENCES))
def test_preferences_are_encoded_as_by_trl(name: str, tiny: Any, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    row, tokenizer = PREFERENCES[name], tokenizer_of("qwen2_5" if "chat" in name else None)
    arguments = DPOConfig(output_dir=str(tmp_path), bf16=False, report_to=[])
    data = Dataset.from_list([deepcopy(row)])
    trainer = DPOTrainer(model=tiny, args=arguments, train_dataset=data, processing_class=tokenizer)
    expected = trainer.train_dataset[0]
    ((_, read),) = converted([("row 1", deepcopy(row))], "auto")
    (found,) = encode_answers(tokenizer, as_kind([read], "preference"), ("chosen", "rejected"))
    for key in ("prompt_ids", "chosen_ids", "rejected_ids"):
        assert list(found[key]) == list(expected[key]), key


@pytest.mark.parametrize("right", [True, False])
def test_solutions_in_steps_become_judged_answers_as_in_trls_documentation(right: bool) -> None:
    row = {
        "prompt": "What is 2+2?",
        "completions": [" Let me think.", " The answer is 4."],
        "labels": [True, right],
    }
    ((_, read),) = converted([("row 1", row)], "auto")
    whole = " Let me think. The answer is 4."
    assert as_kind([read], "unpaired") == [{"prompt": "What is 2+2?", "completion": whole, "label": right}]


# ms-swift --------------------------------------------------------------------------------------------------------

OF_SWIFT: dict[str, Row] = {
    "messages": {"messages": CHAT},
    "loss": {
        "messages": [user("hello"), answer("how are you?", loss=False), user("well"), answer("4", loss=True)]
    },
    "loss_scale": {
        "messages": [user("hello"), answer("how?", loss_scale=0.0), user("well"), answer("4", loss_scale=1.0)]
    },
    "query": {
        "system": "Let me think.",
        "query": "hello",
        "response": "thank you!",
        "history": [["how?", "well"]],
    },
    "pairs": {
        "system": "S",
        "conversation": [{"human": "hello", "assistant": "how?"}, {"human": "4", "gpt": "you"}],
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "thank you!"}]
    },
    "alpaca": {"instruction": "hello", "input": "there", "output": "how are you?"},
    "calls": {
        "tools": json.dumps([TOOL]),
        "messages": [
            {"role": "system", "content": "Let me think."},
            user("What is the weather in Oslo and Rome?"),
            {"role": "tool_call", "content": json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})},
            {"role": "tool_call", "content": json.dumps({"name": "weather", "arguments": {"city": "Rome"}})},
            {"role": "tool_response", "content": "22 degrees"},
            {"role": "tool_response", "content": "sunny"},
            answer("It is sunny."),
        ],
    },
    "blocks of Anthropic": {
        "tools": [TOOL],
        "messages": [
            {"role": "system", "content": "Let me think."},
            user("What is the weather in Oslo?"),
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}]},
            answer("It is sunny."),
        ],
    },
}
"""ms-swift's Qwen2.5 has the default system prompt of the template, so rows without a system prompt are alike."""


@pytest.fixture(scope="module")
def swift_template(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> tuple[Any, Any]:
    tokenizer = tokenizer_of("qwen2_5")
    if find_spec("swift") is None:
        return tokenizer, None
    swift = import_module("swift")
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    tiny.config.save_pretrained(folder)
    processor = swift.get_processor(str(folder), model_type="llama")
    template = swift.get_template(processor, template_type="qwen2_5", agent_template="hermes")
    template.set_mode("train")
    return tokenizer, template


def of_swift(row: Row, template: Any) -> Row:
    """Encode a row as ms-swift does after its columns were renamed."""
    from swift.dataset import AutoPreprocessor, RowPreprocessor

    reader = AutoPreprocessor()._get_preprocessor(SimpleNamespace(features=row))  # type: ignore[arg-type]
    names = Counter(reader.columns.get(key, key) for key in row)
    renamed = {key: reader.columns.get(key, key) for key in row}  # columns for one name keep theirs
    columns = {key: name if names[name] == 1 else key for key, name in renamed.items()}
    (read,) = RowPreprocessor.batched_to_rows(
        reader.batched_preprocess(
            {columns[key]: [deepcopy(value)] for key, value in row.items()},
            strict=True,
            ignore_max_length_error=False,
        )
    )
    return dict(template.encode(read))


@pytest.mark.parametrize("name", list(OF_SWIFT))
def test_rows_of_ms_swift_are_encoded_as_by_it(name: str, swift_template: tuple[Any, Any]) -> None:
    tokenizer, template = swift_template
    expected = of_peer("swift", name, lambda: of_swift(OF_SWIFT[name], template))
    assert_equal(tokenizer, ours(OF_SWIFT[name], tokenizer), without_line_breaks(tokenizer, expected))
