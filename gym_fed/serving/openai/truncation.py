"""Conversations that are longer than the context: their oldest turns are left out (``truncation: auto``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import TypeVar

from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.schemas import InstructionMessage, Message, UserMessage

PromptT = TypeVar("PromptT", bound=Sized)
Render = Callable[[list[Message]], PromptT]
"""Messages as a prompt, whose length is its tokens; a ``RequestError`` named ``context_length_exceeded`` where they are
far too many."""

_ROOM = 4
"""A quarter of the context at most is left free for an answer."""


def ids_that_fit(
    messages: Sequence[Message], render: Render[PromptT], context: int | None, max_tokens: int | None
) -> PromptT:
    """The prompt of a conversation without as many of its oldest turns as it takes to fit.

    A turn is a question with all that follows it up to the next one, so a call is not parted from its result. System
    messages and the last turn stay.

    Args:
        messages: The conversation.
        render: Makes a prompt of a part of it.
        context: Tokens of prompt and answer together; None: nothing is left out.
        max_tokens: Of the answer; room for them is left, but at most a quarter of the context.

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
        return [one for index, one in enumerate(messages) if index >= first or _stays(one)]

    def fitting(turn: int) -> PromptT | None:
        try:
            ids = render(from_turn(turn))
        except RequestError as error:
            if error.name != "context_length_exceeded":
                raise
            return None
        return ids if len(ids) <= most else None

    if (found := fitting(0)) is not None:
        return found
    low, high = 1, len(starts)  # of the turns, the first with which it fits, if there is one
    while low < high:
        middle = (low + high) // 2
        if (ids := fitting(middle)) is not None:
            found, high = ids, middle
        else:
            low = middle + 1
    return found if found is not None else render(from_turn(max(len(starts) - 1, 0)))


def _stays(message: Message) -> bool:
    return isinstance(message, InstructionMessage)
