"""Generate greedy answers in batches, and compute exact match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.encoding import require_chat_template
from gym_fed.evaluation.loss import padded
from gym_fed.serving.reasoning.answers import AnswerReader, ReadAnswer

Message = dict[str, str]


def exact_match(
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 64,
) -> float:
    """Return the fraction of rows whose last assistant message the model generates exactly with greedy decoding.

    Args:
        model: A causal LM.
        tokenizer: The model's tokenizer, with a chat template.
        rows: ``{"messages": [..., {"role": "assistant", ...}]}``.
        max_new_tokens: Longer answers count as wrong.
        batch_size: Prompts per generation; the answers do not depend on it beyond rounding.

    Returns:
        Between 0 and 1. White space around answers is ignored.

    Raises:
        GymError: ``DATA_INVALID`` for no rows, or rows that do not end with an assistant message.
    """
    prompts, references = [], []
    for number, row in enumerate(rows, start=1):
        messages = row.get("messages") or []
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"row {number} does not end with an assistant message",
                "use rows with an answer",
            )
        prompts.append(messages[:-1])
        references.append(messages[-1]["content"].strip())
    if not prompts:
        raise GymError(ErrorCode.DATA_INVALID, "no rows to evaluate on", "pass at least one row")
    answers = generate_batch(model, tokenizer, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size)
    right = sum(int(a.strip() == w) for a, w in zip(answers, references, strict=True))
    return right / len(references)


def answer(model: Any, tokenizer: Any, prompt: str, *, max_new_tokens: int = 64) -> str:
    """Return the model's greedy answer to one user message."""
    conversation = [{"role": "user", "content": prompt}]
    return generate_batch(model, tokenizer, [conversation], max_new_tokens=max_new_tokens)[0]


def generate_batch(
    model: Any,
    tokenizer: Any,
    conversations: Sequence[Sequence[Message]],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 64,
) -> list[str]:
    """Return the texts of ``generate_answers``."""
    options = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    return [answer.text for answer in generate_answers(model, tokenizer, conversations, **options)]


@torch.inference_mode()
def generate_answers(
    model: Any,
    tokenizer: Any,
    conversations: Sequence[Sequence[Message]],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 64,
) -> list[ReadAnswer]:
    """Generate greedy answers to conversations that end with a user message, in the given order.

    Conversations of similar length share a batch.
    """
    require_chat_template(tokenizer)
    encoded = [
        tokenizer.apply_chat_template(list(c), tokenize=True, return_dict=True, add_generation_prompt=True)[
            "input_ids"
        ]
        for c in conversations
    ]
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    answers = [ReadAnswer("")] * len(encoded)
    reader = AnswerReader(tokenizer)
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            prompts = [encoded[i] for i in chosen]
            generated = greedy_ids(model, tokenizer, prompts, max_new_tokens=max_new_tokens)
            for i, answer in zip(chosen, generated, strict=True):
                answers[i] = reader.read(encoded[i], answer.ids)
    finally:
        model.train(was_training)
    return answers


@dataclass(frozen=True)
class GreedyIds:
    """A greedy answer as token ids.

    Attributes:
        ids: The token ids without the end token.
        ended: True if the model ended it; False if it was cut at the limit.
    """

    ids: list[int]
    ended: bool


@torch.inference_mode()
def greedy_ids(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    on_token: Callable[[int], None] | None = None,
) -> list[GreedyIds]:
    """Continue prompts greedily in one batch.

    Args:
        model: A causal LM; its training mode is restored afterwards.
        prompts: Token ids, at least one each.
        max_new_tokens: Maximum length of an answer.
        on_token: Called after each token of the batch with their number; an exception ends the generation.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    class EachToken(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
            if on_token is not None:
                on_token(input_ids.shape[1] - width)
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    device = next(model.parameters()).device
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id or 0
    ids = padded([list(prompt) for prompt in prompts], pad, left=True).to(device)
    mask = padded([[1] * len(prompt) for prompt in prompts], 0, left=True).to(device)
    was_training = model.training
    model.eval()
    try:
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([EachToken()]),
        )
    finally:
        model.train(was_training)
    ends = end_ids(model, tokenizer)
    answers = []
    for row in out[:, width:].tolist():
        at = next((i for i, token in enumerate(row) if token in ends), None)
        answers.append(GreedyIds(row[:at], at is not None))
    return answers


def context_of(model: Any) -> int | None:
    """Return the context length in tokens; None if the config does not contain it."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(positions) if positions else None


def end_ids(model: Any, tokenizer: Any) -> set[int]:
    """Return the token ids that end an answer, from the generation config and the tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return {token for token in (*ids, tokenizer.eos_token_id) if token is not None}
