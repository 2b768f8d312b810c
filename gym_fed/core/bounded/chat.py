"""Render chat templates as transformers does, but in a child process with limits.

``install`` replaces transformers' function by ``render_chat``. All calls of ``apply_chat_template`` then use it,
including those from TRL, lm-eval and user code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NoReturn

from gym_fed.core import tokenizer_errors
from gym_fed.core.bounded import chat_operations, pool
from gym_fed.core.bounded.errors import LimitExceededError
from gym_fed.core.bounded.pool import EvaluationError, evaluate
from gym_fed.core.bounded.trusted import is_trusted
from gym_fed.core.errors import ErrorCode, GymError

MAX_TEMPLATE_CHARS = 4 << 20
_MAX_PLACES = 1000
_PLACES: dict[str, str] = {}
"""Model name by template, for error messages."""


def bind_templates(tokenizer: Any, name: str) -> None:
    """Render a tokenizer's or processor's templates in the child process; name its model in errors and panics."""
    install()
    tokenizer_errors.install()
    name_templates(tokenizer, name)


def name_templates(tokenizer: Any, name: str) -> None:
    """Record the model that a tokenizer's templates belong to, for error messages."""
    given = getattr(tokenizer, "chat_template", None)
    for template in given.values() if isinstance(given, Mapping) else (given,):
        if isinstance(template, str):
            if len(_PLACES) >= _MAX_PLACES:
                _PLACES.clear()
            _PLACES[template] = name


def install() -> None:
    """Replace transformers' functions that compile chat templates; repeated calls have no effect."""
    from transformers.utils import chat_template_utils as theirs

    chat_operations.transformers_render()
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
    """Render conversations; arguments and result are those of transformers' ``render_jinja_template``.

    Raises:
        TemplateError, TypeError, ValueError: If the template rejects a conversation.
        GymError: ``MODEL_INVALID`` if it exceeds a limit on time, memory or output.
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
    if (moment := chat_operations.present_time()) is not None:
        arguments["template_moment"] = moment
    texts, spans = [], []
    for given in conversations:
        conversation = plain(getattr(given, "messages", given))
        text, marked = _evaluate(
            chat_operations.render, chat_template, conversation=conversation, **arguments
        )
        texts.append(text)
        spans.append([(start, end) for start, end in marked])
    return texts, spans if return_assistant_tokens_mask else []


def template_variables(chat_template: str | None) -> frozenset[str]:
    """Return the variables that a template reads but does not set."""
    return frozenset() if chat_template is None else _names(chat_template)["variables"]


def literal_text(chat_template: str) -> str:
    """Return the literal text of a template, in pieces separated by null characters."""
    text: str = _names(chat_template)["literal"]
    return text


def attribute_names(chat_template: str) -> frozenset[str]:
    """Return names that a template may read from messages: attributes, and text constants such as keys."""
    names: frozenset[str] = _names(chat_template)["attributes"]
    return names


@lru_cache(maxsize=64)
def _names(chat_template: str) -> dict[str, Any]:
    names = _evaluate(chat_operations.names, chat_template, source=chat_template)
    return {key: value if isinstance(value, str) else frozenset(value) for key, value in names.items()}


def _schema(tool: Any) -> Any:
    """Return the JSON schema of a tool that is a function; return other tools unchanged."""
    from transformers.utils.chat_template_utils import get_json_schema

    if isinstance(tool, dict):
        return tool
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        return get_json_schema(tool)
    raise ValueError("a tool must be a JSON schema, or a function with type hints and a docstring")


def _evaluate(function: Callable[..., Any], template: str, **arguments: Any) -> Any:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise limit_error(template, f"has more than {MAX_TEMPLATE_CHARS:,} characters")
    if pool.in_child or is_trusted(template):
        return function(**arguments)
    try:
        return evaluate(function, **arguments)
    except LimitExceededError as error:
        raise limit_error(template, error.need) from error
    except EvaluationError as error:
        _raise_own(error)


def _raise_own(error: EvaluationError) -> NoReturn:
    """Raise the exception that transformers would have raised in this process."""
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


def limit_error(template: str, need: str, what: str = "one conversation") -> GymError:
    """Return the error for a template that exceeds a limit; ``what`` names the input that it was rendering."""
    name = _PLACES.get(template)
    whose = f"{name}: its chat template" if name else "the chat template"
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"{whose} {need} on {what}",
        "correct chat_template.jinja (or chat_template in tokenizer_config.json), or use another model",
    )
