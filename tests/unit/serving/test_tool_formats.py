"""Tool call formats: detected from real templates, parsed while streaming, and rendered again."""

from __future__ import annotations

import json
import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from gym_fed.core.registries import TOOL_FORMATS
from gym_fed.serving.openai.fields import parse
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.schemas import CHAT_NEUTRAL, ChatRequest
from gym_fed.serving.openai.tool_formats._mistral import short_id
from gym_fed.serving.openai.tool_formats.base import (
    MAX_CALL_CHARACTERS,
    MAX_CALLS,
    Call,
    CallEnd,
    CallParser,
    MoreArguments,
)
from gym_fed.serving.openai.tool_formats.hermes import Hermes
from gym_fed.serving.openai.tool_formats.pythonic import calls_of
from gym_fed.serving.openai.tool_template import ToolTemplate, ToolUse
from tests.support.tool_templates import FORMS, OWN, form_of, renderer, source_of

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "only": {"type": "boolean"}},
    "required": ["city"],
}
TOOLS: dict[str, Any] = {"weather": PARAMETERS, "time": None}
SHOWN = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The forecast.", "parameters": PARAMETERS},
    }
]
BERN: dict[str, Any] = {"city": "Bern", "days": 2}
ONE = json.dumps({"name": "weather", "arguments": BERN})
LLAMA_ONE = json.dumps({"name": "weather", "parameters": BERN})
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
FROM_MODELS: list[tuple[str, str, str, int]] = [
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", 1),
    (
        "hermes",
        f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{ONE}</tool_call>",
        "Let me see.\n\n",
        2,
    ),
    ("hermes", f"<think>\nhm\n</think>\n\n<tool_call>\n{ONE}", "<think>\nhm\n</think>\n\n", 1),
    ("qwen3_coder", f"So.\n{XML}\n{XML}", "So.\n\n", 2),
    ("qwen3_coder", XML.removeprefix("<tool_call>\n"), "", 1),
    ("llama", LLAMA_ONE, "", 1),
    ("llama", f"<|python_tag|>{LLAMA_ONE}; {LLAMA_ONE}", "", 2),
    ("llama", f"\n{LLAMA_ONE};{LLAMA_ONE}", "", 2),
    ("llama", json.dumps({"type": "function", "function": {"name": "weather", "parameters": BERN}}), "", 1),
    ("mistral", f"[TOOL_CALLS] [{ONE}, {ONE}]", "", 2),
    ("mistral", f'Hm.[TOOL_CALLS][{ONE[:-1]}, "id": "abcdefghi"}}]', "Hm.", 1),
    (
        "mistral_v11",
        f"[TOOL_CALLS]weather[ARGS]{json.dumps(BERN)}[TOOL_CALLS]weather{json.dumps(BERN)}",
        "",
        2,
    ),
    ("mistral_v11", f"a [TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{json.dumps(BERN)}", "a ", 1),
    ("pythonic", "[weather(city='Bern', days=2), weather(days=2, city=\"Bern\")]", "", 2),
    ("pythonic", '<|tool_call_start|>[weather(city="Bern", days=2)]<|tool_call_end|>Done.', "Done.", 1),
]
NO_CALLS: list[tuple[str, str]] = [
    ("hermes", "<tool_call>nothing</tool_call> <tool"),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call> and more'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Be'),
    ("hermes", "<tool_call>" + "x" * 1000),
    ("qwen3_coder", "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nBe"),
    ("llama", '{"city": "Bern"} is JSON'),
    ("llama", '{"name": "Bob", "age": 3}'),
    ("llama", "<|python_tag|>print(1)"),
    ("llama", 'Look: {"name": "weather", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS] nothing of it"),
    ("mistral", '[TOOL_CALLS] [{"name": "other", "arguments": {}}'),
    ("mistral_v11", "[TOOL_CALLS]weather and so on"),
    ("pythonic", "[1, 2, 3] are numbers"),
    ("pythonic", "[weather(city=open('/etc/passwd').read())]"),
    ("pythonic", "[weather('Bern')]"),
    ("pythonic", "[other(city=1)]"),
]


def parsed(
    form: str, text: str, cuts: list[str] | None = None, *, cut: bool = False, **how: Any
) -> tuple[str, list[Any], int]:
    """Shown text, parts of calls, and how much was malformed, of an answer that comes in pieces."""
    malformed: list[int] = []
    parser = CallParser(TOOL_FORMATS.new(form), TOOLS, on_malformed=lambda: malformed.append(1), **how)
    parts = [part for piece in (cuts if cuts is not None else [text]) for part in parser.feed(piece)]
    parts += parser.end(cut=cut)
    shown = "".join(part for part in parts if isinstance(part, str))
    return shown, [part for part in parts if not isinstance(part, str | CallEnd)], len(malformed)


def pieces(text: str, seed: int) -> list[str]:
    found, dice = [], random.Random(seed)
    while text:
        length = dice.randint(1, 7)
        found.append(text[:length])
        text = text[length:]
    return found


@pytest.mark.parametrize("name", [*FORMS, *OWN])
def test_the_form_is_found_out_from_what_the_template_makes_of_a_call(name: str) -> None:
    template = ToolTemplate(renderer(source_of(name)), {})
    assert type(template.format) is TOOL_FORMATS.type_of(form_of(name))


@pytest.mark.parametrize("name", [*FORMS, *OWN])
def test_calls_and_results_are_shown_again_and_can_be_read_back(name: str) -> None:
    render = renderer(source_of(name))
    template = ToolTemplate(render, {})
    call = {
        "id": "call_0123456789abcdef",
        "type": "function",
        "function": {"name": "weather", "arguments": BERN},
    }
    rows = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '"it rains"', "tool_call_id": call["id"]},
    ]
    prepared, tools = template.prepare(rows, SHOWN)
    text = render(prepared, tools)
    assert "it rains" in text[text.index("How is it?") :]
    assert "The forecast." in render(*template.prepare(rows[:1], SHOWN))
    # as the model would have written it: the rendered call is read back by the format's own reader
    written = render(*template.prepare(rows[:2], SHOWN), prompt=False)
    written = written[len(render(*template.prepare(rows[:1], SHOWN))) :]
    parser = CallParser(template.format, TOOLS)
    found = [*parser.feed(written), *parser.end()]
    assert [(c.name, json.loads(c.arguments)) for c in found if isinstance(c, Call)] == [("weather", BERN)]


@pytest.mark.parametrize(("form", "text", "content", "number"), FROM_MODELS)
def test_calls_are_read_whole_and_in_pieces(form: str, text: str, content: str, number: int) -> None:
    for cuts in ([text], list(text), *(pieces(text, seed) for seed in range(5))):
        shown, calls, malformed = parsed(form, text, cuts)
        assert (shown, malformed) == (content, 0)
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", BERN)] * number
        assert len({call.id for call in calls}) == number


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_stays_text(form: str, text: str) -> None:
    for cuts in ([text], list(text), *(pieces(text, seed) for seed in range(5))):
        assert parsed(form, text, cuts)[:2] == (text, [])


@pytest.mark.parametrize(
    ("form", "text", "number"),
    [
        ("hermes", f"<tool_call>no</tool_call><tool_call>{ONE}</tool_call>", 1),
        ("hermes", f'<tool_call>{{"name": "weather"]</tool_call><tool_call>{ONE}</tool_call>', 1),
        ("mistral_v11", "[TOOL_CALLS]?[TOOL_CALLS]other[ARGS]{}", 2),
        ("llama", '{"city": "Bern"} is no call', 0),
        ("pythonic", "[1, 2, 3] are numbers", 0),
    ],
)
def test_malformed_calls_are_counted_and_do_not_hide_others(form: str, text: str, number: int) -> None:
    assert parsed(form, text)[2] == number


@pytest.mark.parametrize(("form", "text", "content", "number"), FROM_MODELS)
def test_held_calls_come_in_fragments_name_first(form: str, text: str, content: str, number: int) -> None:
    shown, parts, malformed = parsed(form, text, list(text), fragments=True)
    assert (shown, malformed) == (content, 0)
    found: list[list[str]] = []
    for part in parts:
        if isinstance(part, Call):
            assert part.name == "weather"
            found.append([part.arguments])
        else:
            assert isinstance(part, MoreArguments)
            found[-1].append(part.text)
    assert [json.loads("".join(one)) for one in found] == [BERN] * number
    # Python's literals and texts between tags become JSON when the call is complete
    in_json = form not in ("pythonic", "qwen3_coder") and '"function"' not in text
    assert all(len(one) > 10 for one in found) if in_json else all(len(one) == 1 for one in found)


def test_a_held_call_that_is_cut_short_keeps_its_beginning() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Be'
    _, parts, malformed = parsed("hermes", text, list(text), fragments=True)
    assert parts[0].name == "weather"
    assert "".join(part.text for part in parts[1:]) == '{"city": "Be'
    assert malformed == 0


def test_one_call_is_one_whatever_follows() -> None:
    for form, text, content, number in FROM_MODELS:
        if number == 2:
            shown, calls, _ = parsed(form, text, list(text), one=True)
            assert len(calls) == 1
            assert shown.strip() == content.strip()


@pytest.mark.parametrize("written", ["get-the-weather(city='x-y(z)')", "get_the_weather(city='x-y(z)')"])
def test_a_tool_with_hyphens_is_called_in_python_s_form(written: str) -> None:
    tools: dict[str, Any] = {"get-the-weather": None, "the-weather": None, "time": None}
    assert calls_of(f"[{written}, time()]", tools) == [
        ("get-the-weather", '{"city": "x-y(z)"}'),
        ("time", "{}"),
    ]
    assert calls_of("[get_the_weather()]", {"get-the_weather": None, "get_the-weather": None}) == []
    for no_call in ("[1 - time()]", "[time - 1]", "[time() - time()]", "[time.time()]"):
        assert calls_of(no_call, tools) == []


@pytest.mark.parametrize("text", ['[time(**{"a": 1})]', '[time(a={**{"b": 1}})]', "[time(a=1, **b)]"])
def test_arguments_without_a_name_are_no_call(text: str) -> None:
    assert calls_of(text, {"time": None}) == []


def test_a_model_s_escapes_warn_nobody() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calls_of("[time(a='\\d')]", {"time": None}) == [("time", '{"a": "\\\\d"}')]


def test_a_form_that_is_not_found_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    )
    looked: list[str] = []
    hinted = Hermes.hinted

    def counted(self: Hermes, shown: str) -> bool:
        looked.append(shown)
        return hinted(self, shown)

    monkeypatch.setattr(Hermes, "hinted", counted)
    template = ToolTemplate(renderer(source), {})
    said = set()
    for _ in range(3):
        with pytest.raises(RequestError) as caught:
            _ = template.format
        said.add((str(caught.value), caught.value.param, caught.value.name))
    assert len(said) == len(looked) == 1


def test_arguments_of_texts_get_the_types_of_their_schema() -> None:
    values = {"city": "7", "days": "7", "only": "True", "more": "[1]", "note": "null"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    _, (call,), _ = parsed("qwen3_coder", f"<tool_call>\n<function=weather>\n{body}</function>\n</tool_call>")
    expected = {"city": "7", "days": 7, "only": True, "more": "[1]", "note": "null"}
    assert json.loads(call.arguments) == expected


def test_mistral_ids_have_nine_characters_and_others_are_mapped() -> None:
    ids = {TOOL_FORMATS.new("mistral").call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert short_id("abcDEF123") == "abcDEF123"
    assert short_id("call_1") == short_id("call_1") != short_id("call_2")
    assert len(short_id("call_1")) == 9
    assert short_id("call_1").isalnum()


@pytest.mark.parametrize(
    ("form", "begin", "more"),
    [
        ("hermes", "<tool_call>{", '"a":[{'),
        ("hermes", "", "<tool_call>"),
        ("hermes", "", "<tool_call>{"),
        ("qwen3_coder", "<tool_call><function=weather>", "<parameter=a>"),
        ("mistral", "[TOOL_CALLS][", '{"name":"other"},'),
        ("mistral_v11", "", "[TOOL_CALLS]x"),
        ("llama", '{"name":', '{"name":"'),
        ("pythonic", "[weather(a=", "[("),
        ("pythonic", "[weather(a='", "\\\\"),
    ],
)
def test_hostile_lengths_are_text_and_held_no_longer_than_a_call_may_be(
    form: str, begin: str, more: str
) -> None:
    text = begin + more * ((2 * MAX_CALL_CHARACTERS) // len(more))
    parser = CallParser(TOOL_FORMATS.new(form), TOOLS)
    shown = 0
    for at in range(0, len(text), 64):
        found = parser.feed(text[at : at + 64])
        assert all(isinstance(part, str) for part in found)
        shown += len("".join(map(str, found)))
        assert at + 64 - shown <= MAX_CALL_CHARACTERS + 1000
    assert shown + len("".join(map(str, parser.end()))) == len(text)


def test_calls_beyond_the_most_are_text() -> None:
    text = f"<tool_call>{ONE}</tool_call>" * (MAX_CALLS + 2)
    shown, calls, _ = parsed("hermes", text)
    assert len(calls) == MAX_CALLS
    assert shown.count("<tool_call>") == 2


def test_a_template_with_an_unknown_form_is_refused_with_what_helps() -> None:
    source = (
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    )
    with pytest.raises(RequestError) as caught:
        _ = ToolTemplate(renderer(source), {}).format
    assert caught.value.param == "tools"
    assert "tool_format to described" in caught.value.hint
    assert ToolTemplate(renderer(source), {}, "described").format.describes
    with pytest.raises(RequestError, match="does not show tools"):
        _ = ToolTemplate(renderer(source_of("gemma3")), {}, "hermes").format


def test_tools_are_described_to_a_template_that_takes_no_system_message() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    render = renderer(source)
    text = render(*ToolTemplate(render, {}).prepare([{"role": "user", "content": "How is it?"}], SHOWN))
    assert text.startswith("<user>You can call")
    assert text.endswith("How is it?")
    kept = renderer(source_of("gemma3"))
    rows = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is it?"}]
    assert "Be brief.\n\nYou can call" in kept(*ToolTemplate(kept, {}).prepare(rows, SHOWN))


NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TEMPLATE: Any = SimpleNamespace(
    shown_ids=tuple,
    format=SimpleNamespace(close=""),
    grammar=lambda tools, *, one, required: json.dumps(tools),
)


@pytest.mark.parametrize(
    ("function", "choice", "held"),
    [
        ({}, "required", NOTHING),
        ({"strict": True}, "auto", NOTHING),
        ({"parameters": {}}, "required", {}),
        ({"parameters": {"type": "object"}}, "required", {"type": "object"}),
    ],
)
def test_a_tool_that_names_no_parameters_is_called_without_any(
    function: dict[str, Any], choice: str, held: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": {"name": "now", **function}}
    message = {"role": "user", "content": "x"}
    body = {"model": "m", "messages": [message], "tools": [tool], "tool_choice": choice}
    request = parse(ChatRequest, body, CHAT_NEUTRAL)
    assert json.loads(ToolUse(request, TEMPLATE).sampling()["grammar"].text) == {"now": held}
