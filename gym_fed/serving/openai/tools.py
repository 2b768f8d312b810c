"""The tools of a chat request: what the prompt shows, what a grammar holds, and what finds the calls in an answer."""

from __future__ import annotations

from typing import Any

from gym_fed.serving.engine.request import Grammar
from gym_fed.serving.openai.schemas import ChatRequest, Function, NamedTool
from gym_fed.serving.openai.tool_calls import CallParser
from gym_fed.serving.openai.tool_formats._reading import Tools
from gym_fed.serving.openai.tool_template import ToolTemplate

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolUse:
    """The tools of one request with one model's template.

    Args:
        request: With or without tools.
        template: Of the model.

    Attributes:
        shown: The tools as a template gets them; None where ``tool_choice`` is ``none``.
        required: Whether the answer must be a call.
        held: Whether a grammar holds calls to the parameters of their tools: where a call is required, or where a tool
            is ``strict``. The model then writes text until it begins a call, and calls are all that it can write there.
    """

    def __init__(self, request: ChatRequest, template: ToolTemplate) -> None:
        self._template = template
        self._request = request
        self.shown = _shown(request)
        self.required = isinstance(request.tool_choice, NamedTool) or request.tool_choice == "required"
        self._one = self.required or request.parallel_tool_calls is False
        strict = any(tool.function.strict for tool in request.tools or [])
        self.held = self.shown is not None and (self.required or strict)

    def sampling(self) -> dict[str, Any]:
        """The engine's parameters for it.

        Raises:
            RequestError: For parameters that the model's form of calls cannot be held to.
        """
        if self.shown is None:
            return {}
        found: dict[str, Any] = {"shown_token_ids": self._template.shown_ids()}
        close = self._template.format.close
        if self.held:
            text = self._template.grammar(self._held_tools(), one=self._one, required=self.required)
            found["grammar"] = Grammar("calls", text)
        elif self._one and close:
            found["also_stop"] = (close,)
        return found

    def parser(self, *, fragments: bool) -> CallParser | None:
        """A new one for an answer; None: it has no calls.

        Args:
            fragments: Whether the caller takes calls in parts. Only those that are held come so.
        """
        if self.shown is None:
            return None
        return CallParser(
            self._template.format,
            {tool.function.name: tool.function.parameters for tool in self._callable()},
            fragments=fragments and self.held,
            opened=self.required and bool(self._template.format.opening),
            one=self._one,
            on_malformed=self._template.count_malformed,
        )

    def _callable(self) -> list[Any]:
        choice, tools = self._request.tool_choice, self._request.tools or []
        if isinstance(choice, NamedTool):
            return [tool for tool in tools if tool.function.name == choice.function.name]
        return tools

    def _held_tools(self) -> Tools:
        """Where a call may be left out, a tool that is not strict takes any object."""
        return {
            tool.function.name: _parameters(tool.function) if self.required or tool.function.strict else None
            for tool in self._callable()
        }


def _parameters(function: Function) -> dict[str, Any]:
    """OpenAI's: a function that names no parameters has none."""
    return _NO_PARAMETERS if function.parameters is None else function.parameters


def _shown(request: ChatRequest) -> list[dict[str, Any]] | None:
    if not request.tools or request.tool_choice == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in request.tools]
