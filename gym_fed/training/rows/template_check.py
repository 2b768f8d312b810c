"""Renders rows by the chat template without training, for `gym configs validate`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from gym_fed.base.modeling.processors import is_vision_model
from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data.chat_templates.batches import render_rows
from gym_fed.data.chat_templates.conversation import ChatRenderer, write_answered
from gym_fed.data.chat_templates.rendering import vision_template
from gym_fed.data.encoding import require_chat_template
from gym_fed.data.reading import PlacedRow
from gym_fed.data.rows import PlacedDict, Row, place_of
from gym_fed.data.string_rows import is_string_row
from gym_fed.training.algorithms.sft import Sft
from gym_fed.training.model.template_tokens import template_tokenizer
from gym_fed.training.rows.run_kind import rows_to_encode, rows_to_learn

MOST_ROWS = 1000


def check_template(config: TrainingConfig, rows: Iterable[PlacedRow]) -> int:
    """Render the first ``MOST_ROWS`` rows as the run would.

    Returns:
        How many rows there were, at most ``MOST_ROWS``.

    Raises:
        GymError: ``DATA_INVALID`` naming the row that the template refuses, leaves something of, or whose answers
            cannot be located; or for a tokenizer without a template.
    """
    algorithm = ALGORITHMS.new(config.algorithm)
    placed = [PlacedDict.of(row, place) for place, row in islice(rows, MOST_ROWS)]
    learned = rows_to_learn(config, placed)
    if not any(_is_chat(row) or is_string_row(row) for row in learned):
        return len(placed)
    tokenizer = template_tokenizer(load_tokenizer(_tokenizer_name(config)), config)
    chats = [row for row in rows_to_encode(config, tokenizer, learned) if _is_chat(row)]
    if not chats:
        return len(placed)
    require_chat_template(tokenizer)
    if not isinstance(algorithm, Sft):
        for number, row in enumerate(chats, 1):
            _answers(config, tokenizer, row, place_of(row, number))
        return len(placed)
    assistant_only = algorithm.assistant_only(config)
    if config.model is not None and is_vision_model(config.model):
        if assistant_only:
            vision_template(tokenizer)
        return len(placed)
    renderer = ChatRenderer(tokenizer, assistant_only, config.mask_history, config.reasoning)
    render_rows(renderer, [(row, place_of(row, number)) for number, row in enumerate(chats, 1)])
    return len(placed)


def _answers(config: TrainingConfig, tokenizer: Any, row: Row, place: str) -> None:
    if "messages" in row:  # of an algorithm that takes rows as they are
        return
    answers: tuple[Any, ...] = ([], row.get("chosen"), row.get("rejected"), row.get("completion"))
    for answer in answers:
        if answer is not None and not isinstance(answer, str):
            tools = row.get("tools") or None
            write_answered(tokenizer, row["prompt"], answer, tools, place, reasoning=config.reasoning)


def _is_chat(row: Row) -> bool:
    return "messages" in row or isinstance(row.get("prompt"), list)


def _tokenizer_name(config: TrainingConfig) -> str:
    return str(config.model if config.model_init is None else config.model_init.tokenizer)
