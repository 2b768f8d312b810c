"""The child's side of ``gym_fed.bounded.chat``: calls transformers' own functions for chat templates."""

from __future__ import annotations

from functools import cache
from typing import Any

from gym_fed.bounded.errors import OUTPUT_CHARS, LimitExceededError


def render(conversation: list[dict[str, Any]], **arguments: Any) -> Any:
    """Return the text of one conversation, and the spans of its ``{% generation %}`` blocks."""
    rendered: Any = transformers_render()(conversations=[conversation], **arguments)
    text = rendered[0][0]
    if len(text) > OUTPUT_CHARS:
        raise LimitExceededError("output")
    return [text, rendered[1][0] if rendered[1] else []]


@cache
def transformers_render() -> Any:
    """Return transformers' own function; it must be called once before ``install`` replaces that function."""
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
