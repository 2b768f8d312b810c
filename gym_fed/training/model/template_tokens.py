"""Refuse a chat template whose special tokens the tokenizer lacks, or add them to tokenizer and embeddings.

A template ends an answer with a token such as ``<|im_end|>``. A tokenizer without this token splits the text into
several tokens. The trained model then never stops, because no single token ends its answers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from gym_fed.base.modeling.processors import is_processor, is_vision_model
from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.registries import TUNING
from gym_fed.core.text import plain
from gym_fed.data.chat_templates.choice import end_and_marks, is_token, suggested_templates, use_chat_template
from gym_fed.data.encoding import require_chat_template
from gym_fed.data.training_rows import TrainingRows

_TOKEN_COLUMNS = (
    *("input_ids", "prompt_ids", "chosen_ids", "rejected_ids", "completion_ids", "KL_completion_ids"),
    *("prompt_input_ids", "chosen_input_ids", "rejected_input_ids"),
)
"""Names of columns with token ids that the algorithms' ``encode`` returns."""
_MAX_CHECKED = 1000
"""Number of rows that are checked before the model is loaded; the rest is checked while encoding."""


def check_template_tokens(config: TrainingConfig, rows: Iterable[dict[str, Any]]) -> None:
    """Refuse a template whose end token the tokenizer lacks, and conversations without a template; before loading.

    Raises:
        GymError: ``CONFIG_INVALID``; see ``template_tokenizer``. ``DATA_INVALID``; see ``require_chat_template``.
    """
    checked = islice(rows, _MAX_CHECKED)
    has_conversations = any("messages" in row or isinstance(row.get("prompt"), list) for row in checked)
    if config.chat_template is None and config.chat_template_tokens == "require" and not has_conversations:
        return
    name = tokenizer_name(config)
    if name is None or is_vision_model(name):
        return
    templated = template_tokenizer(load_tokenizer(name), config)
    if has_conversations:
        require_chat_template(templated)


def tokenizer_name(config: TrainingConfig) -> str | None:
    """Return the name of the run's tokenizer; None if the config specifies no model."""
    return config.model if config.model_init is None else config.model_init.tokenizer


def template_tokenizer(tokenizer: Any, config: TrainingConfig) -> Any:
    """Return the tokenizer (or processor) with ``chat_template`` and, if requested, the tokens that it needs.

    Raises:
        GymError: ``CONFIG_INVALID`` if the tokenizer lacks the token that ends an answer, or if the tuning method does
            not train added tokens.
    """
    templated = use_chat_template(tokenizer, config.chat_template)
    if is_processor(templated) or not templated.chat_template:
        return templated
    adds = config.chat_template_tokens == "add"
    if config.chat_template is None and not adds:
        return templated
    end, marks = end_and_marks(templated)
    missing = [mark for mark in marks if not is_token(templated, mark)]
    if not missing or not (adds or end in missing):
        return templated
    if not adds:
        names = suggested_templates(tokenizer)
        others = f", or choose a template whose end token the tokenizer has: {names}" if names else ""
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"chat_template: {plain(config.chat_template, 60)} ends an answer with {end}, which is not a token of "
            "the tokenizer, so the model would never stop",
            f"set chat_template_tokens: add (full fine-tuning){others}",
        )
    _require_trained_embeddings(config)
    extended = copy.deepcopy(tokenizer)
    extended.add_tokens(missing, special_tokens=True)
    extended = use_chat_template(extended, config.chat_template)
    if end is not None:
        extended.eos_token = end
    return extended


def fit_to_template(model: Any, tokenizer: Any, config: TrainingConfig) -> Any:
    """Return the tokenizer from ``template_tokenizer``, after extending the model's embeddings if needed.

    Raises:
        GymError: See ``template_tokenizer`` and ``fit_embeddings``.
    """
    templated = template_tokenizer(tokenizer, config)
    fit_embeddings(model, templated, config, _largest_id(tokenizer) + 1)
    return templated


def fit_embeddings(model: Any, tokenizer: Any, config: TrainingConfig, known: int) -> None:
    """Add an embedding row for each new token, with ``chat_template_tokens: add``.

    Args:
        model: The loaded model; its embeddings are extended in place. New rows start as the mean of the others.
        tokenizer: The tokenizer of the rows.
        config: The run's config.
        known: Number of tokens of the original tokenizer.

    Raises:
        GymError: ``CONFIG_INVALID`` if the tuning method does not train the new rows.
    """
    largest = _largest_id(tokenizer)
    rows = num_embeddings(model)
    added = range(known, largest + 1)
    if config.chat_template_tokens == "add" and (added or largest >= rows):
        _require_trained_embeddings(config)
        _grow(model, min(known, rows), largest + 1)


def require_embedded(model: Any, *encoded: Sequence[dict[str, Any]] | None) -> None:
    """Refuse rows with a token that has no embedding, before anything is written.

    A tokenizer may have more tokens than its model has embeddings (Gemma 3 has one for images); unused tokens are
    harmless. Rows with a ``prompt`` are not encoded, because GRPO and similar algorithms tokenise prompts when they
    generate answers. Their other columns are for graders and may have any name.

    Args:
        model: The loaded model.
        encoded: Encoded training and held-out rows.
    """
    size = num_embeddings(model)
    for rows in encoded:
        if isinstance(rows, TrainingRows) and all(
            rows.largest.get(column, -1) < size for column in _TOKEN_COLUMNS
        ):
            continue
        for number, row in enumerate(rows or (), start=1):
            columns = () if "prompt" in row else (row[key] for key in _TOKEN_COLUMNS if key in row)
            largest = max((max(ids, default=-1) for ids in columns), default=-1)
            reason = f"row {number} has token id {largest}, but the embeddings have only rows 0 to {size - 1}"
            remedy = "use the model's own tokenizer, or set chat_template_tokens: add (full fine-tuning)"
            refuse_first((largest >= size, reason, remedy))


def _grow(model: Any, known: int, size: int) -> None:
    """Set rows ``known`` to ``size - 1`` of the embeddings and the output head to the mean of the rows before."""
    import torch

    rows = num_embeddings(model)
    if size > rows:
        model.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        inner, head = model.get_input_embeddings(), model.get_output_embeddings()
        layers = [inner] if head is None or head.weight is inner.weight else [inner, head]
        for layer in layers:
            layer.weight[known:size] = layer.weight[:known].float().mean(dim=0).to(layer.weight.dtype)
            if getattr(layer, "bias", None) is not None:
                layer.bias[known:size] = layer.bias[:known].float().mean().to(layer.bias.dtype)


def num_embeddings(model: Any) -> int:
    """Return the number of embedding rows. Under ZeRO-3, the tensor is empty, and ``ds_shape`` is its full shape."""
    weight = model.get_input_embeddings().weight
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def _largest_id(tokenizer: Any) -> int:
    text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor contains its tokenizer
    return max(text_tokenizer.get_vocab().values(), default=-1)


def _require_trained_embeddings(config: TrainingConfig) -> None:
    method = f"finetuning: {config.finetuning}"
    reason = f"chat_template_tokens: add gives the embeddings new rows, which {method} does not train or save"
    remedy = "set finetuning: full, or choose a template whose tokens the tokenizer has"
    refuse_first((not TUNING.type_of(config.finetuning).trains_all, reason, remedy))
