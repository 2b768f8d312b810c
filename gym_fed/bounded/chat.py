"""Chat templates: rendered as transformers does, but in the bounded child process.

``install`` puts ``render_chat`` in the place of transformers' function, so that ``apply_chat_template`` of every
tokenizer and processor goes through it, also where TRL, lm-eval or a caller's code calls it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NoReturn

from gym_fed.bounded import _chat_operations, here
from gym_fed.bounded.errors import LimitExceededError
from gym_fed.bounded.pool import EvaluationError, evaluate
from gym_fed.bounded.shipped import is_shipped
from gym_fed.errors import ErrorCode, GymError

MAX_TEMPLATE_CHARS = 4 << 20
_MAX_PLACES = 1000
_PLACES: dict[str, str] = {}
"""Which model a template came with, for errors."""


def bind_templates(tokenizer: Any, name: str) -> None:
    """Render a tokenizer's or a processor's templates in the bounded process, and name its model in errors."""
    install()
    name_templates(tokenizer, name)


def name_templates(tokenizer: Any, name: str) -> None:
    """Name the model of a tokenizer's templates in errors."""
    given = getattr(tokenizer, "chat_template", None)
    for template in given.values() if isinstance(given, Mapping) else (given,):
        if isinstance(template, str):
            if len(_PLACES) >= _MAX_PLACES:
                _PLACES.clear()
            _PLACES[template] = name


def install() -> None:
    """Replace transformers' functions that compile chat templates; once for the process."""
    from transformers.utils import chat_template_utils as theirs

    _chat_operations.transformers_render()
    for name, ours in (
        ("render_jinja_template", render_chat),
        ("_get_template_variables", template_variables),
        ("_get_template_literal_text", literal_text),
    ):
        original = getattr(theirs, name)
        if original is ours:
            continue
        for module in [one for key, one in sys.modules.items() if key.startswith("transformers.")]:
            if vars(module).get(name) is original:
                setattr(module, name, ours)


def render_chat(
    conversations: list[Any],
    tools: list[Any] | None = None,
    documents: list[Any] | None = None,
    chat_template: str | None = None,
    return_assistant_tokens_mask: bool = False,
    continue_final_message: bool | str = False,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> tuple[list[str], list[list[tuple[int, int]]]]:
    """Render conversations; see transformers' ``render_jinja_template``, whose arguments and result these are.

    Raises:
        TemplateError, TypeError, ValueError: If the template refuses a conversation.
        GymError: ``MODEL_INVALID`` if it takes more time or memory, or writes more, than it may.
    """
    from transformers.utils import chat_template_utils as theirs

    assert chat_template is not None
    plain = theirs._plain_template_data
    arguments = {
        "tools": None if tools is None else [plain(_schema(tool)) for tool in tools],
        "documents": plain(documents),
        "chat_template": chat_template,
        "return_assistant_tokens_mask": return_assistant_tokens_mask,
        "continue_final_message": continue_final_message,
        "add_generation_prompt": add_generation_prompt,
        **plain(variables),
    }
    texts, spans = [], []
    for given in conversations:
        conversation = plain(getattr(given, "messages", given))
        text, marked = _evaluate(
            _chat_operations.render, chat_template, conversation=conversation, **arguments
        )
        texts.append(text)
        spans.append([(start, end) for start, end in marked])
    return texts, spans if return_assistant_tokens_mask else []


def template_variables(chat_template: str | None) -> frozenset[str]:
    """The variables that a template reads and does not set."""
    return frozenset() if chat_template is None else _names(chat_template)["variables"]


def literal_text(chat_template: str) -> str:
    """The text that a template can write by itself, its pieces separated by null characters."""
    text: str = _names(chat_template)["literal"]
    return text


def attribute_names(chat_template: str) -> frozenset[str]:
    """Names that a template may read of messages: attributes, and text constants such as keys."""
    found: frozenset[str] = _names(chat_template)["attributes"]
    return found


@lru_cache(maxsize=64)
def _names(chat_template: str) -> dict[str, Any]:
    found = _evaluate(_chat_operations.names, chat_template, source=chat_template)
    return {key: value if isinstance(value, str) else frozenset(value) for key, value in found.items()}


def _schema(tool: Any) -> Any:
    """A function's JSON schema; other tools as they are."""
    from transformers.utils.chat_template_utils import get_json_schema

    if isinstance(tool, dict):
        return tool
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        return get_json_schema(tool)
    raise ValueError("a tool is a JSON schema, or a function with type hints and a docstring")


def _evaluate(function: Callable[..., Any], template: str, **arguments: Any) -> Any:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise too_much(template, f"has more than {MAX_TEMPLATE_CHARS:,} characters")
    if here.is_bounded or is_shipped(template):
        return function(**arguments)
    try:
        return evaluate(function, **arguments)
    except LimitExceededError as error:
        raise too_much(template, error.need) from error
    except EvaluationError as error:
        _raise_own(error)


def _raise_own(error: EvaluationError) -> NoReturn:
    """Raise what transformers' function would have raised in this process."""
    from jinja2 import exceptions

    if "TemplateSyntaxError" in error.kinds:
        raise exceptions.TemplateSyntaxError(str(error), error.line or 1) from error
    for kind in (exceptions.SecurityError, exceptions.UndefinedError, exceptions.TemplateError):
        if kind.__name__ in error.kinds:
            raise kind(str(error)) from error
    for builtin in (TypeError, ValueError):
        if builtin.__name__ in error.kinds:
            raise builtin(str(error)) from error
    raise exceptions.TemplateError(f"{error.kinds[0]}: {error}") from error


def too_much(template: str, need: str, what: str = "one conversation") -> GymError:
    """The error for a template that needs more than it may; ``what`` is what it was rendered with."""
    name = _PLACES.get(template)
    whose = f"{name}: its chat template" if name else "the chat template"
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"{whose} {need} on {what}",
        "correct chat_template.jinja (or chat_template in tokenizer_config.json), or use another model",
    )
