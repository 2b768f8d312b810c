"""Render many conversations with an untrusted template, in batches of rows per request to the child process.

A row is rendered several times, since spans are located by comparing prefixes. One request per rendering would be slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gym_fed.core.bounded.chat import limit_error
from gym_fed.core.bounded.chat_operations import present_time, present_time_set
from gym_fed.core.bounded.errors import SECONDS, LimitExceededError
from gym_fed.core.bounded.pool import EvaluationError, evaluate
from gym_fed.core.bounded.trusted import is_trusted
from gym_fed.core.text import plain
from gym_fed.data.chat_templates.conversation import ChatRenderer, RenderedConversation

_READ = ("messages", "tools", "train_on_eos")
_ROWS = 64
_CHARS = 1 << 22
"""Maximum number of rows, and approximate maximum number of characters, per request; a longer row is sent alone."""

Placed = tuple[dict[str, Any], str]
"""A row with ``messages`` and optionally ``tools``, and its place for errors."""


def render_rows(renderer: ChatRenderer, rows: Sequence[Placed]) -> list[RenderedConversation]:
    """Render each row as ``ChatRenderer.render`` does.

    Raises:
        GymError: Errors of ``ChatRenderer.render``; ``MODEL_INVALID`` for a template that exceeds a limit.
    """
    given = renderer.tokenizer.chat_template
    templates = list(given.values()) if isinstance(given, Mapping) else [given]
    if all(is_trusted(str(template)) for template in templates):
        return [renderer.render(row, place) for row, place in rows]
    return [template for batch in _batches(rows) for template in _bounded(renderer, batch)]


def _batches(rows: Sequence[Placed]) -> Iterator[list[list[Any]]]:
    """Yield rows as JSON in batches of ``_ROWS`` rows or about ``_CHARS`` characters."""
    from transformers.utils.chat_template_utils import _plain_template_data

    batch: list[list[Any]] = []
    chars = 0
    for row, place in rows:
        plain = {key: _plain_template_data(row[key]) for key in _READ if key in row}
        size = len(str(plain))
        if batch and (len(batch) == _ROWS or chars + size > _CHARS):
            yield batch
            batch, chars = [], 0
        batch.append([plain, place])
        chars += size
    if batch:
        yield batch


def _bounded(renderer: ChatRenderer, rows: list[list[Any]]) -> Iterator[RenderedConversation]:
    tokenizer = renderer.tokenizer
    try:
        rendered = evaluate(
            render_in_child,
            seconds=SECONDS * (1 + len(str(rows)) // _CHARS),
            rows=rows,
            tokenizer={
                "chat_template": tokenizer.chat_template,
                "special_tokens_map": dict(tokenizer.special_tokens_map),
                "all_special_tokens": list(renderer.ends),
            },
            how={
                "assistant_only": renderer.assistant_only,
                "mask_history": renderer.mask_history,
                "reasoning": renderer.reasoning,
            },
            moment=present_time(),
        )
    except LimitExceededError as error:
        template = tokenizer.get_chat_template(None, None)
        raise limit_error(template, error.need, f"the rows from {rows[0][1]} to {rows[-1][1]}") from error
    except EvaluationError as error:
        # A failing row fails the whole batch, so render the rows one by one to name it.
        if len(rows) > 1:
            for row in rows:
                yield from _bounded(renderer, [row])
            return
        template = tokenizer.get_chat_template(None, None)
        raise limit_error(template, f"fails ({plain(str(error), 200)})", rows[0][1]) from error
    for text, spans in rendered:
        yield RenderedConversation(text, [(start, end) for start, end in spans])


def render_in_child(
    rows: list[Any], tokenizer: dict[str, Any], how: dict[str, Any], moment: str | None
) -> list[Any]:
    """Return ``[text, spans]`` for each row; runs in the child process."""
    if moment is not None:
        with present_time_set(moment):
            return render_in_child(rows, tokenizer, how, None)
    renderer = ChatRenderer(_RowTokenizer(**tokenizer), **how)
    conversations = [renderer.render(row, place) for row, place in rows]
    return [[conversation.text, conversation.spans] for conversation in conversations]


@dataclass(frozen=True)
class _RowTokenizer:
    """The attributes of a tokenizer that a renderer uses."""

    chat_template: str | dict[str, str]
    special_tokens_map: dict[str, str]
    all_special_tokens: list[str]

    @property
    def added_tokens_decoder(self) -> dict[int, str]:
        """An empty list, since all special tokens are in ``all_special_tokens``."""
        return {}

    def get_chat_template(self, _name: None, tools: Any) -> str:
        """Choose among several templates in the same way as transformers."""
        if isinstance(self.chat_template, str):
            return self.chat_template
        if tools is not None and "tool_use" in self.chat_template:
            return self.chat_template["tool_use"]
        if "default" in self.chat_template:
            return self.chat_template["default"]
        raise ValueError(
            f"the tokenizer has no default chat template, only {', '.join(sorted(self.chat_template))}"
        )
