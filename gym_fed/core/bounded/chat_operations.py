"""Functions that the child process runs to render chat templates with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from functools import cache
from typing import Any

from gym_fed.core.bounded.errors import OUTPUT_CHARS, LimitExceededError


def render(
    conversation: list[dict[str, Any]], *, template_moment: str | None = None, **arguments: Any
) -> Any:
    """Return the text of one conversation, and the spans of its ``{% generation %}`` blocks.

    Args:
        conversation: Messages in the format of transformers.
        template_moment: The time that templates see as the current time, in ISO format; None for the real time.
        arguments: Keyword arguments of transformers' ``render_jinja_template``.
    """
    if template_moment is not None:
        with present_time_set(template_moment):
            return render(conversation, **arguments)
    rendered: Any = transformers_render()(conversations=[conversation], **arguments)
    text = rendered[0][0]
    if len(text) > OUTPUT_CHARS:
        raise LimitExceededError("output")
    return [text, rendered[1][0] if rendered[1] else []]


def present_time() -> str | None:
    """Return the fixed current time for templates in ISO format; None if it is not set."""
    from transformers.utils import chat_template_utils as theirs

    return None if theirs.datetime is datetime else theirs.datetime.now().isoformat()


@contextmanager
def present_time_set(moment: str) -> Iterator[None]:
    """Fix the current time that templates see inside the block; ``moment`` is ISO local time."""
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    before, fixed = module.datetime, datetime.fromisoformat(moment)

    class Then(datetime):
        """A replacement for ``datetime``, of which transformers uses only ``now``."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return fixed.astimezone(tz) if tz is not None else fixed

    module.datetime = Then
    try:
        yield
    finally:
        module.datetime = before


@cache
def transformers_render() -> Any:
    """Return transformers' own function; must be called once before ``install`` replaces that function."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def names(source: str) -> dict[str, Any]:
    """Return the names and texts of a template, from its syntax tree alone.

    Returns:
        ``variables`` that the template does not set itself, ``attributes`` with text constants, and ``literal`` text.
    """
    from jinja2 import nodes
    from jinja2.meta import find_undeclared_variables
    from transformers.utils import chat_template_utils as theirs

    tree = theirs._compile_jinja_template("").environment.parse(source)
    constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    data = {node.data for node in tree.find_all(nodes.TemplateData)}

    return {
        "variables": sorted(find_undeclared_variables(tree)),
        "attributes": sorted({node.attr for node in tree.find_all(nodes.Getattr)} | constants),
        "literal": "\0".join(sorted(data | constants)),
    }
