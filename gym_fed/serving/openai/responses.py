"""The Responses API over chat's path: what a request goes on from, and what is kept of its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gym_fed.core.errors import GymError
from gym_fed.serving.openai.answers import Answer
from gym_fed.serving.openai.catalogue import LOCAL, Caller
from gym_fed.serving.openai.fields import parse
from gym_fed.serving.openai.pending import Pending
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.responses_answer import Keep, ResponsesAnswer
from gym_fed.serving.openai.responses_as_chat import ResponsesAsChat
from gym_fed.serving.openai.responses_request import RESPONSES_NEUTRAL, ResponsesRequest
from gym_fed.serving.openai.schemas import ChatRequest
from gym_fed.serving.openai.stored_answers import StoredAnswers

RESPONSES = "/v1/responses"
MAX_CONVERSATION_BYTES = 2**20
"""Of what is kept to go on from; a longer one is not kept. So no small request makes a server hold a large one."""


@dataclass(frozen=True)
class ChatForm:
    """What differs between the APIs that are answered by chat's path.

    Attributes:
        url: The kind of request, for the usage log.
        answer: Makes the answer; called as ``Answer``.
        renamed: Names the caller's own fields in an error.
        truncate: Whether the oldest turns are left out of a conversation that is too long.
    """

    url: str
    answer: Callable[..., Answer]
    renamed: Callable[[GymError], GymError] = lambda error: error
    truncate: bool = False


Chat = Callable[[ChatRequest, Caller, ChatForm], Pending]


def begin_response(
    body: Any, caller: Caller, chat: Chat, stored: StoredAnswers | None, defaults: Mapping[str, Any]
) -> Pending:
    """Accept a request.

    Args:
        body: The parsed JSON.
        caller: The authenticated user.
        chat: Accepts the chat request that it stands for.
        stored: Where earlier responses are, and this one goes; None: nowhere.
        defaults: Of fields about sampling that were not given.

    Raises:
        GymError: As ``OpenAIService.handle``; ``NOT_FOUND`` for a ``previous_response_id`` that is not stored.
    """
    request = parse(ResponsesRequest, body, RESPONSES_NEUTRAL).filled(defaults)
    as_chat = ResponsesAsChat(request, _earlier(request.previous_response_id, caller, stored))
    keeping = store_of(request.store, stored, default=True)
    keep = None if keeping is None else _keep(keeping, caller, as_chat)
    form = ChatForm(
        RESPONSES,
        partial(ResponsesAnswer, request=request, keep_response=keep),
        as_chat.renamed,
        request.truncation == "auto",
    )
    with as_chat.errors():
        return chat(as_chat.chat(), caller, form)


def check_response(body: Any) -> None:
    """Refuse what would be refused where no answers are kept; raises as ``begin_response``."""
    request = parse(ResponsesRequest, body, RESPONSES_NEUTRAL)
    store_of(request.store, None, default=True)
    ResponsesAsChat(request, _earlier(request.previous_response_id, LOCAL, None)).chat()


def store_of(wanted: bool | None, stored: StoredAnswers | None, *, default: bool) -> StoredAnswers | None:
    """Where an answer is kept, by its request's ``store``; None: nowhere.

    Raises:
        RequestError: It is to be kept, and nothing is kept here.
    """
    if wanted and stored is None:
        raise RequestError(
            "field 'store': no answers are kept here",
            param="store",
            name="unsupported_parameter",
            hint="leave it out; a server keeps them unless stored_answers.bytes_per_key is 0",
        )
    return stored if (default if wanted is None else wanted) else None


def _earlier(previous: str | None, caller: Caller, stored: StoredAnswers | None) -> list[dict[str, Any]]:
    if previous is None:
        return []
    if stored is None:
        raise RequestError(
            "field 'previous_response_id': no answers are kept here",
            param="previous_response_id",
            name="unsupported_parameter",
            hint="send the conversation as input",
        )
    return stored.get(caller, previous, "resp_", "previous_response_id").conversation()


def _keep(stored: StoredAnswers, caller: Caller, as_chat: ResponsesAsChat) -> Keep | None:
    before = json.dumps(as_chat.messages, ensure_ascii=False)  # now, on a thread that may take its time
    if len(before.encode()) > MAX_CONVERSATION_BYTES:
        return None

    def keep(answer_id: str, body: dict[str, Any], answer: list[dict[str, Any]]) -> bool:
        after = json.dumps(answer, ensure_ascii=False)
        return stored.put(caller, answer_id, body, f"{before[:-1]}, {after[1:]}")

    return keep
