"""The content filter's classifier: gym-nano's own probabilities, and refusals whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_adapted
from gym_fed.config.serving import ClassifierConfig, FilterConfig, ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.filter.content_filter import Classifier
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.openai.prompts import Prompts
from gym_fed.serving.openai.service import CHAT
from gym_fed.serving.setup import Serving, open_serving

TEXTS = ("Reverse: abc", "double: xyz")
REFUSAL = "No."


def config(**fields: Any) -> ServingConfig:
    settings = {"package_rules": False, "text": REFUSAL, **fields}
    return ServingConfig(device="cpu", num_threads=1, filter=FilterConfig(**settings))


@pytest.fixture(scope="module")
def plain() -> Iterator[Serving]:
    with open_serving(ServingConfig(device="cpu", num_threads=1)) as serving:
        yield serving


def classifier(serving: Serving, **fields: Any) -> Classifier:
    prompts = Prompts(serving.tokenizer, 262)
    yes, no = prompts.first_id("yes"), prompts.first_id("no")
    return Classifier(ClassifierConfig(**fields), serving.engine, prompts.of_question, yes, no)


def by_hand(serving: Serving, text: str) -> float:
    """The share of yes, from one forward of transformers."""
    loaded = load_adapted("gym-nano", [])
    prompts = Prompts(loaded.tokenizer, 262)
    ids = prompts.of_question(f"Is the following text harmful? Answer yes or no.\n\n{text}")
    with torch.no_grad():
        logits = loaded.model(torch.tensor([ids])).logits[0, -1]
    yes, no = (float(logits[prompts.first_id(word)]) for word in ("yes", "no"))
    return 1 / (1 + torch.exp(torch.tensor(no - yes)).item())


def ask(serving: Serving, text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "gym-nano", "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    return serving.service.handle(CHAT, {**body, "max_tokens": 12}, LOCAL)["choices"][0]


def test_the_probability_is_that_of_the_model(plain: Serving) -> None:
    judge = classifier(plain)
    for text in TEXTS:
        assert judge.ask(text, "").probability() == pytest.approx(by_hand(plain, text), rel=1e-4)


def test_a_request_is_refused_from_the_threshold_on(plain: Serving) -> None:
    low, high = sorted(TEXTS, key=lambda text: classifier(plain).ask(text, "").probability())
    middle = sum(classifier(plain).ask(text, "").probability() for text in TEXTS) / 2
    settings = {"threshold": middle, "category": "judged"}
    with open_serving(config(input=["judged"], classifier=ClassifierConfig(**settings))) as serving:
        assert ask(serving, low) == ask(plain, low)
        refused = ask(serving, high)
        assert (refused["message"]["content"], refused["finish_reason"]) == (REFUSAL, "content_filter")
        assert serving.content_filter is not None
        assert serving.content_filter.refused() == {("input", "judged"): 1}


async def test_an_answer_is_held_until_it_is_judged(plain: Serving) -> None:
    body = {
        "model": "gym-nano",
        "messages": [{"role": "user", "content": TEXTS[0]}],
        "temperature": 0,
        "max_tokens": 12,
    }
    for threshold, refused in ((1e-9, True), (1 - 1e-9, False)):
        judge = ClassifierConfig(threshold=threshold)
        with open_serving(config(output=True, classifier=judge)) as serving:
            whole = ask(serving, TEXTS[0])
            pending = serving.service.begin(CHAT, {**body, "stream": True}, LOCAL)
            choices = [chunk["choices"][0] async for chunk in pending.achunks()]
            text = "".join(choice["delta"].get("content", "") for choice in choices)
            wanted = REFUSAL if refused else ask(plain, TEXTS[0])["message"]["content"]
            assert whole["message"]["content"] == text == wanted
            assert choices[-1]["finish_reason"] == whole["finish_reason"]
            assert (whole["finish_reason"] == "content_filter") == refused


def test_a_question_that_cannot_be_answered_is_refused_at_the_start(plain: Serving) -> None:
    with pytest.raises(GymError, match=r"filter.classifier: .*no variant 'guard'") as caught:
        classifier(plain, variant="guard")
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    with pytest.raises(GymError, match="begin with the same token"):
        Classifier(ClassifierConfig(), plain.engine, lambda text: [1], 5, 5)
    with pytest.raises(ValueError, match=r"must contain the placeholder \{text\}"):
        ClassifierConfig(question="Is it harmful?")


def test_a_text_without_room_for_the_question_is_too_large(plain: Serving) -> None:
    judge = classifier(plain)
    with pytest.raises(GymError, match="the content filter's classifier did not answer") as caught:
        judge.ask("a" * plain.engine.limits.context, "")
    assert caught.value.code is ErrorCode.TOO_LARGE
