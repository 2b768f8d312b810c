"""Thoughts are separated from answers, by the format that the model's chat template writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.models import load_tokenizer
from gym_fed.config.serving import ServingConfig
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.responses_answer import _messages
from gym_fed.serving.openai.service import CHAT, RESPONSES
from gym_fed.serving.setup import Serving, open_serving
from tests.support.quick import quick
from tests.support.thinking_model import HARMONY, THINK, TOOL, Learned, learn, template_file
from tests.support.wait import SECONDS

THOUGHT, ANSWER = "2+2 is 4.", "It is 4."
CLOSED = f"{THOUGHT}\n</think>\n\n{ANSWER}"
SUMS = {
    "qwen3": f"<think>\n{CLOSED}",
    "qwen3_5_think": CLOSED,
    "deepseek_r1_distill": CLOSED,
    "glm4moe": f"\n<think>{THOUGHT}</think>\n{ANSWER}",
    "gptoss": f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}",
}
"""What the model writes to the question ``sum``, by template."""
PARSERS = {
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3",
    "deepseek_r1_distill": "deepseek_r1",
    "glm4moe": "glm45",
    "gptoss": "openai_gptoss",
}
RAIN = '{"in": "Rome"}'
CALLS = {
    "qwen3": f'<think>\nI look.\n</think>\n\n<tool_call>\n{{"name": "rain", "arguments": {RAIN}}}\n</tool_call>',
    "gptoss": "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.rain <|constrain|>json<|message|>{RAIN}<|call|>",
}
DIRECT = "Just an answer."


@pytest.fixture(scope="module")
def with_marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has a token for every mark."""
    answers = [Learned(name, "sum", raw) for name, raw in SUMS.items()]
    answers += [Learned(name, "rain", raw, (TOOL,)) for name, raw in CALLS.items()]
    answers.append(Learned("qwen3", "plain", DIRECT))
    answers.append(Learned("qwen3", "open", "<think>\nNever closed."))
    folder = tmp_path_factory.mktemp("with_marks")
    return learn(folder, load_tokenizer("gym-nano"), answers, (*THINK, *HARMONY))


@pytest.fixture(scope="module")
def without_marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer writes marks as plain text."""
    answers = [Learned(name, "sum", raw) for name, raw in SUMS.items() if name != "gptoss"]
    return learn(tmp_path_factory.mktemp("without_marks"), load_tokenizer("gym-nano"), answers)


def serve(folder: Path, template: str, **more: Any) -> Serving:
    file = str(template_file(template))
    return open_serving(
        ServingConfig(base=str(folder), served_name="m", chat_template=file, device="cpu", **more)
    )


def body(question: str = "sum", **fields: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 200,
        **fields,
    }


def choice(serving: Serving, question: str = "sum", **fields: Any) -> dict[str, Any]:
    """The single choice of a complete chat answer, with its usage."""
    answer = serving.service.handle(CHAT, body(question, **fields), LOCAL)
    return {**answer["choices"][0], "usage": answer["usage"]}


def streamed(serving: Serving, question: str = "sum", **fields: Any) -> dict[str, str]:
    """The texts of a streamed chat answer by field of ``delta``, and its finish reason."""
    texts = {"reasoning_content": "", "reasoning": "", "content": ""}
    order: list[str] = []
    for chunk in serving.service.stream(CHAT, body(question, **fields), LOCAL):
        for part in chunk["choices"]:
            for name, text in part["delta"].items():
                if name in texts and text:
                    texts[name] += text
                    order.append(name)
            texts["finish_reason"] = part["finish_reason"] or ""
    if "content" in order:
        assert set(order[order.index("content") :]) == {"content"}
    return texts


def raw_text(serving: Serving, prompt: str = "sum") -> str:
    """The answer of the same model without a parser, with its control tokens."""
    prompt_ids = serving.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    request = GenerationRequest(list(prompt_ids), SamplingParams(temperature=0, max_tokens=200))
    tokens = serving.engine.submit(request).result(SECONDS).token_ids
    ends = {serving.tokenizer.eos_token_id}
    return str(serving.tokenizer.decode([token for token in tokens if token not in ends]))


@pytest.mark.parametrize(
    ("marks", "template"),
    quick(
        [(marks, template) for marks in ("tokens", "text") for template in SUMS],
        ("tokens", "qwen3"),
        ("tokens", "glm4moe"),
        ("tokens", "gptoss"),
        ("text", "qwen3_5_think"),
        ("text", "deepseek_r1_distill"),
    ),
)
def test_a_thought_is_separate_from_the_answer_whole_and_streamed(
    template: str, marks: str, request: pytest.FixtureRequest
) -> None:
    if (template, marks) == ("gptoss", "text"):
        pytest.skip("gpt-oss's marks are always control tokens")
    folder = request.getfixturevalue("with_marks" if marks == "tokens" else "without_marks")
    with serve(folder, template) as serving:
        assert serving.service.reasoning_parser == PARSERS[template]
        assert raw_text(serving) == SUMS[template]
        whole, parts = choice(serving), streamed(serving)
    assert whole["message"] == {
        "role": "assistant",
        "content": ANSWER,
        "refusal": None,
        "reasoning_content": THOUGHT,
        "reasoning": THOUGHT,
    }
    assert parts == {
        "reasoning_content": THOUGHT,
        "reasoning": THOUGHT,
        "content": ANSWER,
        "finish_reason": "stop",
    }
    assert whole["finish_reason"] == "stop"
    thought = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert len(THOUGHT) <= thought <= whole["usage"]["completion_tokens"] - len(ANSWER)


def test_without_a_parser_the_thought_is_a_part_of_the_answer(with_marks: Path) -> None:
    with serve(with_marks, "qwen3", reasoning_parser="none") as serving:
        whole = choice(serving)
        assert whole["message"] == {"role": "assistant", "content": SUMS["qwen3"], "refusal": None}
        assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
        with pytest.raises(RequestError) as caught:
            choice(serving, thinking_token_budget=3)
        assert caught.value.param == "thinking_token_budget"
        with pytest.raises(RequestError) as caught:
            choice(serving, "rain", tools=[TOOL], tool_choice="required", thinking_token_budget=3)
        assert caught.value.param == "thinking_token_budget"


@pytest.fixture(scope="module")
def qwen(with_marks: Path) -> Iterator[Serving]:
    with serve(with_marks, "qwen3") as serving:
        yield serving


def test_an_answer_without_a_thought_has_no_reasoning(qwen: Serving) -> None:
    message = choice(qwen, "plain")["message"]
    assert message == {"role": "assistant", "content": DIRECT, "refusal": None}
    assert streamed(qwen, "plain")["reasoning_content"] == ""


def test_an_answer_that_is_cut_in_its_thought_has_no_content(qwen: Serving) -> None:
    cut = choice(qwen, max_tokens=6)
    assert (cut["message"]["content"], cut["finish_reason"]) == (None, "length")
    assert cut["message"]["reasoning_content"] == THOUGHT[:4]
    assert cut["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}


def test_stop_texts_and_stop_tokens_end_the_answer_and_not_the_thought(qwen: Serving) -> None:
    stopped = choice(qwen, stop=["4"])
    assert (stopped["message"]["reasoning_content"], stopped["message"]["content"]) == (THOUGHT, "It is ")
    token = qwen.tokenizer.encode("4", add_special_tokens=False)
    stopped = choice(qwen, stop_token_ids=token)
    assert (stopped["message"]["reasoning_content"], stopped["message"]["content"]) == (THOUGHT, "It is ")


def test_the_model_s_end_token_ends_a_thought_also_if_the_caller_names_it(qwen: Serving) -> None:
    for fields in ({}, {"stop_token_ids": [qwen.tokenizer.eos_token_id]}):
        whole = choice(qwen, "open", **fields)
        assert (whole["message"]["content"], whole["finish_reason"]) == (None, "stop")
        assert whole["message"]["reasoning_content"] == "Never closed."


@pytest.mark.parametrize("template", ["qwen3", "gptoss"])
def test_log_probabilities_are_those_of_the_answer(template: str, with_marks: Path) -> None:
    with serve(with_marks, template) as serving:
        logprobs = choice(serving, logprobs=True)["logprobs"]["content"]
    assert "".join(token["token"] for token in logprobs) == ANSWER


@pytest.mark.parametrize("template", ["qwen3", "deepseek_r1_distill", "glm4moe", "gptoss"])
def test_a_schema_holds_for_the_answer_after_the_thought(template: str, with_marks: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [4]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    with serve(with_marks, template) as serving:
        whole, parts = choice(serving, response_format=form), streamed(serving, response_format=form)
    assert json.loads(whole["message"]["content"]) == {"n": 4}
    assert whole["message"]["reasoning_content"] == THOUGHT
    assert (parts["content"], parts["reasoning"]) == (whole["message"]["content"], THOUGHT)


def test_a_schema_leaves_the_choice_of_a_thought_written_as_text(without_marks: Path) -> None:
    form = {"guided_choice": ["four", "five"]}
    with serve(without_marks, "qwen3") as serving:
        message = choice(serving, **form)["message"]
    assert message["reasoning_content"] == THOUGHT
    assert message["content"] in form["guided_choice"]


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "deepseek_r1_distill", "glm4moe", "gptoss"])
@pytest.mark.parametrize("budget", [0, 3])
def test_a_budget_closes_the_thought(template: str, budget: int, with_marks: Path) -> None:
    with serve(with_marks, template) as serving:
        whole = choice(serving, thinking_token_budget=budget, guided_choice=["yes"])
        same = choice(serving, thinking_budget=budget, guided_choice=["yes"])
    assert len(whole["message"].get("reasoning_content", "")) <= budget
    assert THOUGHT.startswith(whole["message"].get("reasoning_content", ""))
    assert whole["message"]["content"] == "yes"
    assert whole["message"] == same["message"]
    if budget:
        assert whole["message"]["reasoning_content"] == THOUGHT[: len(whole["message"]["reasoning_content"])]


def test_speculative_tokens_do_not_change_the_thought_its_budget_or_its_grammar(with_marks: Path) -> None:
    for fields in ({}, {"thinking_budget": 4}, {"guided_regex": "It is (four|4)"}, {"stop": ["is"]}):
        answers = []
        for speculative in ("off", "ngram"):
            with serve(with_marks, "qwen3", engine={"speculative": speculative}) as serving:
                answers.append(choice(serving, **fields)["message"])
        assert answers[0] == answers[1]


@pytest.mark.parametrize("template", list(CALLS))
def test_tools_are_called_after_a_thought(template: str, with_marks: Path) -> None:
    with serve(with_marks, template) as serving:
        whole = choice(serving, "rain", tools=[TOOL])
        chunks = list(serving.service.stream(CHAT, body("rain", tools=[TOOL]), LOCAL))
        one = choice(serving, "rain", tools=[TOOL], parallel_tool_calls=False)
    for answer in (whole, one):
        (call,) = answer["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "rain",
            {"in": "Rome"},
        )
        assert answer["message"]["reasoning_content"] == "I look."
        assert (answer["message"]["content"], answer["finish_reason"]) == (None, "tool_calls")
    deltas = [part["delta"] for chunk in chunks for part in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I look."
    assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ())] == ["rain"]


def test_a_required_call_has_no_thought(with_marks: Path) -> None:
    for template in ("qwen3", "qwen3_5_think"):
        with serve(with_marks, template) as serving:
            message = choice(serving, "rain", tools=[TOOL], tool_choice="required")["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["rain"]
        assert "reasoning_content" not in message


@pytest.mark.parametrize("template", ["qwen3", "glm4moe"])
def test_a_thought_is_recognised_where_the_grammar_allows_any_text(
    template: str, with_marks: Path, without_marks: Path
) -> None:
    for folder in (with_marks, without_marks):
        with serve(folder, template) as serving:
            message = choice(serving, guided_regex=r"(.|\n)*is (four|4)\.")["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, ANSWER)


def test_the_thought_can_be_left_out(qwen: Serving) -> None:
    whole = choice(qwen, include_reasoning=False)
    assert whole["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    cut = choice(qwen, include_reasoning=False, max_tokens=6)
    assert cut["message"] == {"role": "assistant", "content": None, "refusal": None}


def test_a_stored_answer_keeps_all_its_thoughts() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    message = {"type": "message", "content": [{"type": "output_text", "text": ANSWER}]}
    assert _messages({"output": [thought("one"), message, thought("two")]}) == [
        {"role": "assistant", "content": ANSWER, "reasoning_content": "one\ntwo"}
    ]


def test_responses_have_a_reasoning_item_that_can_be_sent_back(qwen: Serving) -> None:
    asked = {"model": "m", "input": "sum", "temperature": 0, "max_output_tokens": 200}
    events = list(qwen.service.stream(RESPONSES, asked, LOCAL))
    last = events[-1]["response"]
    thought, message = last["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert (thought["type"], thought["status"], thought["summary"]) == ("reasoning", "completed", [])
    assert message["content"][0]["text"] == ANSWER
    assert last["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == THOUGHT
    kinds = [event["type"] for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    again = [{"role": "user", "content": "sum"}, thought, message, {"role": "user", "content": "sum"}]
    assert qwen.service.handle(RESPONSES, {**asked, "input": again}, LOCAL)["output"]
    cut = qwen.service.handle(RESPONSES, {**asked, "max_output_tokens": 6}, LOCAL)
    assert [item["type"] for item in cut["output"]] == ["reasoning"]
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")


def test_a_stored_response_keeps_its_thought(qwen: Serving) -> None:
    asked = {"model": "m", "input": "sum", "temperature": 0, "max_output_tokens": 200}
    *_, last = qwen.service.stream(RESPONSES, asked, LOCAL)
    stored = qwen.service.stored_answer(RESPONSES, last["response"]["id"], LOCAL).conversation()
    assert stored[-1] == {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}


@pytest.mark.parametrize(("rule", "refused"), [("2+2", True), ("It is 4", True), ("nothing", False)])
def test_the_content_filter_sees_thought_and_answer(
    rule: str, refused: bool, with_marks: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text(f"[mine]\n{rule}\n")
    filters = {"output": True, "package_rules": False, "rules": [rules], "text": "refused"}
    with serve(with_marks, "qwen3", filter=filters) as serving:
        whole, parts = choice(serving), streamed(serving)
    if refused:
        assert whole["message"] == {"role": "assistant", "content": "refused", "refusal": None}
        assert whole["finish_reason"] == parts["finish_reason"] == "content_filter"
        assert rule not in parts["content"] + parts["reasoning_content"]
    else:
        assert (whole["message"]["reasoning_content"], whole["message"]["content"]) == (THOUGHT, ANSWER)
        assert (parts["reasoning_content"], parts["content"]) == (THOUGHT, ANSWER)


def test_a_classifier_of_answers_sees_the_thought(with_marks: Path) -> None:
    filters = {"output": True, "package_rules": False, "classifier": {"threshold": 1e-9}}
    with serve(with_marks, "qwen3", filter=filters) as serving:
        cut = choice(serving, max_tokens=6)
    assert cut["finish_reason"] == "content_filter"
    assert "reasoning_content" not in cut["message"]
