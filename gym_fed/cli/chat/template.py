"""`--chat-template` of gym chat, api and batch: what writes conversations instead of the model's own template."""

from __future__ import annotations

from typing import Annotated

import typer

ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="NAME",
        help="Chat template: a name such as chatml, a Jinja file, or Jinja text.",
        show_default="the model's own",
    ),
]


def require_template(value: str | None) -> None:
    """Refuse a wrong template before any model is fetched or loaded.

    Raises:
        GymError: As ``read_chat_template``.
    """
    if value is not None:
        from gym_fed.data.chat_templates.choice import read_chat_template

        read_chat_template(value)
