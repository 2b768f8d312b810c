"""`gym api` with an untrusted base: a conversation whose template hangs does not delay other requests."""

from __future__ import annotations

import copy
import threading

import pytest

from gym_fed.base.models import load_tokenizer
from gym_fed.core.bounded import pool
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.guided import compiled
from gym_fed.serving.engine.request import Grammar
from gym_fed.serving.openai.prompts import Prompts
from gym_fed.serving.openai.schemas import UserMessage
from gym_fed.serving.openai.template_variables import TemplateNames

HANGS_ON_A_WORD = (
    "{% if messages[-1].content == 'hang' %}"
    + "{% for a in range(99999) %}" * 4
    + "{% endfor %}" * 4
    + "{% endif %}"
    "{{ messages[-1].content }}"
)


def test_a_hung_conversation_is_refused_and_others_are_answered_meanwhile() -> None:
    tokenizer = copy.deepcopy(load_tokenizer("gym-nano"))
    tokenizer.chat_template = HANGS_ON_A_WORD
    prompts = Prompts(tokenizer, len(tokenizer))
    wanted = prompts.of_question("hello")
    refused: list[GymError] = []

    def hang() -> None:
        try:
            prompts.of_question("hang")
        except GymError as error:
            refused.append(error)

    hung = threading.Thread(target=hang)
    hung.start()
    found = [prompts.of_messages([UserMessage(role="user", content="hello")]) for _ in range(3)]
    was_hung = hung.is_alive()
    hung.join(timeout=10 * pool.SECONDS)
    assert (found, was_hung) == ([wanted] * 3, True)
    assert [one.code for one in refused] == [ErrorCode.MODEL_INVALID]
    assert "takes longer than 10 s" in refused[0].message


def test_reading_the_names_of_a_template_that_hangs_in_the_compiler_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = copy.deepcopy(load_tokenizer("gym-nano"))
    tokenizer.chat_template = "{{ 9 ** (9 ** 9) if thinking else messages[0].reasoning_content }}"
    monkeypatch.setattr(pool, "SECONDS", 2.0)
    with pytest.raises(GymError, match="takes longer than 2 s"):
        _ = TemplateNames(tokenizer).thoughts
    tokenizer.chat_template = "{{ 9 if thinking else messages[0].reasoning_content }}"
    assert TemplateNames(tokenizer).thoughts == ("reasoning_content",)


@pytest.mark.parametrize("pattern", ["(a+)+", "(a|a)*b", ".*.*.*.*x", "((((a{1,9}){1,9}){1,9}){1,9}){1,9}"])
def test_a_callers_pattern_is_compiled_by_an_engine_that_does_not_backtrack(pattern: str) -> None:
    pytest.importorskip("llguidance")
    assert compiled(Grammar("regex", pattern))
