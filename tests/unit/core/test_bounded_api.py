"""`gym api` with an untrusted base: a conversation whose template hangs does not delay other requests."""

from __future__ import annotations

import copy
import threading
import time

import pytest

from gym_fed.base.models import load_tokenizer
from gym_fed.core.bounded import chat, pool
from gym_fed.core.bounded.patterns import find_all
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.guided import compiled
from gym_fed.serving.engine.request import Grammar
from gym_fed.serving.openai.chat_template import TemplateNames
from gym_fed.serving.openai.prompts import Prompts
from gym_fed.serving.openai.schemas import UserMessage
from tests.support.evaluation_pool import reach_deadlines
from tests.support.wait import SECONDS

HANGS_ON_A_WORD = (
    "{% if messages[-1].content == 'hang' %}"
    + "{% for a in range(99999) %}" * 4
    + "{% endfor %}" * 4
    + "{% endif %}"
    "{{ messages[-1].content }}"
)


def test_a_hung_conversation_is_refused_and_others_are_answered_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "SECONDS", SECONDS)
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
    reach_deadlines()
    hung.join(SECONDS)
    assert (found, was_hung) == ([wanted] * 3, True)
    assert [one.code for one in refused] == [ErrorCode.MODEL_INVALID]
    assert "takes longer than" in refused[0].message


@pytest.mark.parametrize("owners", ["aaaaaa", "aaabbb"])
def test_callers_whose_conversations_hang_take_no_process_that_another_caller_waits_for(
    owners: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SECONDS", 3.0)
    template = "{# owners #}" + HANGS_ON_A_WORD
    chat.render_chat([[{"role": "user", "content": "warm"}]], chat_template=template)
    ended: dict[str, list[ErrorCode | None]] = {"a": [], "b": [], "c": []}

    def ask(owner: str, text: str) -> None:
        pool.evaluation_owner.set(owner)
        try:
            chat.render_chat([[{"role": "user", "content": text}]], chat_template=template)
            ended[owner].append(None)
        except GymError as error:
            ended[owner].append(error.code)

    hung = [threading.Thread(target=ask, args=(owner, "hang")) for owner in owners]
    other = threading.Thread(target=ask, args=("c", "hello"))
    for one in hung:
        one.start()
    time.sleep(0.5)
    other.start()
    for one in (other, *hung):
        one.join(SECONDS)
    assert ended["c"] == [None]
    assert ended["a"].count(ErrorCode.MODEL_INVALID) >= pool.MAX_PER_OWNER


def test_a_deadline_includes_the_wait_for_a_process_and_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    late = GymError(ErrorCode.POLICY_REFUSED, "too late")
    monkeypatch.setattr(pool, "_pool", pool._Pool())
    monkeypatch.setattr(pool, "SECONDS", SECONDS)
    began = time.monotonic()
    with pool.evaluation_deadline(began + 0.05, late), pytest.raises(GymError, match="too late"):
        pool.evaluate(find_all, pattern="a", text="a")  # no interpreter starts in that time
    assert pool.evaluate(find_all, pattern="a", text="a") == ["a"]  # a process is ready now
    with pool.evaluation_deadline(time.monotonic() - 1, late), pytest.raises(GymError, match="too late"):
        pool.evaluate(find_all, pattern="a", text="a")
    monkeypatch.setattr(pool, "MAX_PROCESSES", 0)
    with pool.evaluation_deadline(time.monotonic() + 0.2, late), pytest.raises(GymError, match="too late"):
        pool.evaluate(find_all, pattern="a", text="a")
    assert time.monotonic() - began < pool.SECONDS


def test_reading_the_names_of_a_template_that_hangs_in_the_compiler_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = copy.deepcopy(load_tokenizer("gym-nano"))
    tokenizer.chat_template = "{{ 9 ** (9 ** 9) if thinking else messages[0].reasoning_content }}"
    monkeypatch.setattr(pool, "SECONDS", 0.5)
    with pytest.raises(GymError, match=r"takes longer than 0\.5 s"):
        _ = TemplateNames(tokenizer).thoughts
    monkeypatch.setattr(pool, "SECONDS", SECONDS)
    tokenizer.chat_template = "{{ 9 if thinking else messages[0].reasoning_content }}"
    assert TemplateNames(tokenizer).thoughts == ("reasoning_content",)


@pytest.mark.parametrize("pattern", ["(a+)+", "(a|a)*b", ".*.*.*.*x", "((((a{1,9}){1,9}){1,9}){1,9}){1,9}"])
def test_a_callers_pattern_is_compiled_by_an_engine_that_does_not_backtrack(pattern: str) -> None:
    pytest.importorskip("llguidance")
    assert compiled(Grammar("regex", pattern))
