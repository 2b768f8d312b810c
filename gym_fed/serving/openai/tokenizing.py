"""The endpoints ``/tokenize`` and ``/detokenize`` of vLLM, and the truncation of long conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Annotated, Any, TypeVar

from pydantic import Field, model_validator

from gym_fed.serving.openai.catalogue import Caller, Catalogue
from gym_fed.serving.openai.fields import RequestModel, off, only, parse
from gym_fed.serving.openai.prompts import Prompts
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    InstructionMessage,
    Message,
    TokenId,
    Tool,
    UserMessage,
)

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MAX_TOKEN_IDS = 2**20


class TokenizeRequest(RequestModel):
    """A text, or messages to be rendered with the chat template."""

    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    """Add the tokenizer's own first and last tokens to a text; a chat template writes its own."""

    add_generation_prompt: Annotated[Any, only(True)] = None
    continue_final_message: Annotated[Any, only(False)] = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _validate_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise off("prompt", "give prompt or messages")
        if self.messages is None and self.tools is not None:
            raise off("tools", "tools go with messages")
        if self.messages is not None and self.add_special_tokens:
            raise off("add_special_tokens", "the chat template writes them; leave it out, or give false")
        return self


class DetokenizeRequest(RequestModel):
    """Token ids to decode."""

    model: Annotated[str, Field(max_length=256)] | None = None
    tokens: list[TokenId] = Field(max_length=MAX_TOKEN_IDS)


class Tokenizing:
    """Answers ``/tokenize`` and ``/detokenize``.

    Args:
        catalogue: The models that may be named; without a name the base is used.
        prompts: The prompts of the base.
        context: Tokens of prompt and answer together.
    """

    def __init__(self, catalogue: Catalogue, prompts: Prompts, context: int | None) -> None:
        self._catalogue = catalogue
        self._prompts = prompts
        self._context = context

    def answer(self, url: str, body: Any, caller: Caller) -> dict[str, Any]:
        """Answer a request without running the model.

        Raises:
            RequestError: If it is refused, like the same prompt of a completion.
        """
        if url == DETOKENIZE:
            given = parse(DetokenizeRequest, body, {})
            self._catalogue.resolve(given.model or self._catalogue.served_name, caller)
            self._prompts.require_known(given.tokens, "tokens")
            return {"prompt": self._prompts.text(given.tokens, special=True)}
        request = parse(TokenizeRequest, body, {})
        self._catalogue.resolve(request.model or self._catalogue.served_name, caller)
        ids = self._ids_of(request)
        strings = self._prompts.pieces(ids) if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": self._context, "tokens": ids, "token_strs": strings}

    def _ids_of(self, request: TokenizeRequest) -> list[int]:
        if request.messages is not None:
            tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []]
            seen = self._prompts.pictures_of(request.messages)
            return self._prompts.expanded(request.messages, seen, tools=tools or None).ids
        if not request.prompt:
            return []
        return self._prompts.of_input(
            request.prompt, "prompt", special=request.add_special_tokens is not False
        )


PromptT = TypeVar("PromptT", bound=Sized)
Render = Callable[[list[Message]], PromptT]
"""Renders messages to a prompt, whose length is its tokens; raises ``context_length_exceeded`` for far too many."""

_ROOM = 4
"""At most a quarter of the context is left free for an answer."""


def ids_that_fit(
    messages: Sequence[Message], render: Render[PromptT], context: int | None, max_tokens: int | None
) -> PromptT:
    """Render a conversation without as many of its oldest turns as needed to fit.

    A turn is a question with everything up to the next one, so a call stays with its result. System
    messages and the last turn stay.

    Args:
        messages: The conversation.
        render: Renders a part of the conversation.
        context: Tokens of prompt and answer together; None: nothing is dropped.
        max_tokens: Maximum tokens of the answer; room for them is left, but at most a quarter of the context.

    Raises:
        RequestError: As ``render`` of the last turn.
    """
    if context is None:
        return render(list(messages))
    starts = [index for index, message in enumerate(messages) if isinstance(message, UserMessage)]
    most = context - min(max_tokens or context, context // _ROOM)

    def from_turn(turn: int) -> list[Message]:
        if turn == 0:
            return list(messages)
        first = starts[turn]
        return [
            item
            for index, item in enumerate(messages)
            if index >= first or isinstance(item, InstructionMessage)
        ]

    def fitting(turn: int) -> PromptT | None:
        try:
            ids = render(from_turn(turn))
        except RequestError as error:
            if error.name != "context_length_exceeded":
                raise
            return None
        return ids if len(ids) <= most else None

    if (prompt := fitting(0)) is not None:
        return prompt
    low, high = 1, len(starts)  # binary search for the first turn from which it fits
    while low < high:
        middle = (low + high) // 2
        if (ids := fitting(middle)) is not None:
            prompt, high = ids, middle
        else:
            low = middle + 1
    return prompt if prompt is not None else render(from_turn(max(len(starts) - 1, 0)))
