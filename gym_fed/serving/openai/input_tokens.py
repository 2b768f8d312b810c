"""Count the input tokens of a request to the Responses API, with the prompt that its answer would have."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from gym_fed.serving.openai.catalogue import Caller, Catalogue
from gym_fed.serving.openai.fields import parse, unsupported
from gym_fed.serving.openai.prompts import Prompts
from gym_fed.serving.openai.responses import RESPONSES, ResponsesAsChat, earlier_turns
from gym_fed.serving.openai.responses_request import RESPONSES_NEUTRAL, ResponsesRequest
from gym_fed.serving.openai.schemas import ChatRequest
from gym_fed.serving.openai.stored_answers import StoredAnswers
from gym_fed.serving.openai.tokenizing import ids_that_fit
from gym_fed.serving.openai.tool_template import ToolUse
from gym_fed.serving.openai.variant_prompts import VariantPrompts
from gym_fed.serving.pictures.reader import ExpandedPrompt

INPUT_TOKENS = f"{RESPONSES}/input_tokens"
_FIELDS = frozenset(
    {
        *("conversation", "input", "instructions", "model", "parallel_tool_calls", "previous_response_id"),
        *("reasoning", "text", "tool_choice", "tools", "truncation", "chat_template_kwargs"),
    }
)


def count_input_tokens(
    body: Any,
    caller: Caller,
    catalogue: Catalogue,
    prompts: VariantPrompts,
    context: int | None,
    stored: StoredAnswers | None,
) -> dict[str, Any]:
    """Answer a request without running the model.

    Args:
        body: The parsed JSON.
        caller: The authenticated user.
        catalogue: The models that may be named; the base is the default.
        prompts: The prompts of each variant.
        context: Tokens of prompt and answer together.
        stored: The store of earlier responses; None if there is none.

    Raises:
        GymError: As in ``begin_response``, also for fields that do not apply to a count.
    """
    if isinstance(body, Mapping):
        for name in body.keys() - _FIELDS:
            raise unsupported(str(name)[:80])
        body = {**body, "model": catalogue.served_name if body.get("model") is None else body["model"]}
    request = parse(ResponsesRequest, body, RESPONSES_NEUTRAL)
    as_chat = ResponsesAsChat(request, earlier_turns(request.previous_response_id, caller, stored))
    with as_chat.errors():
        chat = as_chat.chat()
        own = prompts(catalogue.resolve(chat.model, caller).variant)
        prompt, _, _ = chat_prompt(own, chat, context if request.truncation == "auto" else None)
    return {"object": "response.input_tokens", "input_tokens": len(prompt)}


def chat_prompt(
    prompts: Prompts, request: ChatRequest, context: int | None
) -> tuple[ExpandedPrompt, ToolUse, dict[str, Any]]:
    """Render a chat request.

    Args:
        prompts: The prompts of the model.
        request: The request.
        context: Tokens into which the oldest turns are dropped to fit; None: keep all.

    Returns:
        The prompt, its tools, and the variables of the chat template.
    """
    tools, variables = ToolUse(request, prompts.tools), prompts.names.of(request)
    seen = prompts.pictures_of(request.messages)
    how: dict[str, Any] = {"tools": tools.shown, "open_call": tools.required, "variables": variables}
    how |= request.prompt_end
    render = partial(prompts.expanded, seen=seen, **how)
    return ids_that_fit(request.messages, render, context, request.longest), tools, variables
