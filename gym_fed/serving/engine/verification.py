"""From a step's logits to the tokens of every answer: one each, and more where proposed ones prove right.

Each token is sampled from the logits after the one before, by the row's own sampler, as if nothing had been proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import GymError
from gym_fed.serving.engine.guided import banned_by
from gym_fed.serving.engine.sampling import Row, SampledToken, choose

if TYPE_CHECKING:
    from gym_fed.serving.engine.sequence import GenerationSequence
    from gym_fed.serving.forward.chunk import Chunk


@dataclass
class _VerifiedRow:
    sequence: GenerationSequence
    proposal: list[int]
    first: int
    """Its first row of logits."""


def sample_step(
    logits: Any,
    wanted: Sequence[tuple[GenerationSequence, Chunk]],
    banned: dict[int, Any],
    token_text: Callable[[int], str],
    push: Callable[[GenerationSequence, SampledToken | GymError], None],
) -> tuple[int, int]:
    """Sample the tokens of a step.

    Args:
        logits: ``[rows, vocab] float32``: the ``Chunk.rows`` of every chunk, in order.
        wanted: Sequences and their chunks, whose last tokens are proposals where ``num_logits`` is more than one.
        banned: What the guides forbid as the next token, by place in ``wanted``.
        token_text: For the texts of logprobs.
        push: Takes a sequence's next token, or why there is none.

    Returns:
        Proposed tokens, and how many of them were sampled.
    """
    active: list[_VerifiedRow] = []
    start = proposed = correct = accepted = 0
    for sequence, chunk in wanted:
        active.append(_VerifiedRow(sequence, chunk.token_ids[len(chunk.token_ids) - chunk.rows + 1 :], start))
        start += chunk.rows
    while active:
        places = [row.first + accepted for row in active]
        found = _choose(logits if len(places) == len(logits) else logits[places], active, banned, token_text)
        going: list[_VerifiedRow] = []
        for row, sampled in zip(active, found, strict=True):
            sequence = row.sequence
            if sequence.ended:
                continue
            push(sequence, sampled)
            right = isinstance(sampled, SampledToken) and [sampled.token_id] == row.proposal[accepted:][:1]
            if right and not sequence.ended:
                going.append(row)
            elif row.proposal:
                sequence.verified(len(row.proposal), accepted + right)
                proposed += len(row.proposal)
                correct += accepted + right
        active = going
        accepted += 1
        banned = banned_by(
            {n: r.sequence.guide for n, r in enumerate(active) if r.sequence.guide is not None}
        )
    return proposed, correct


def _choose(
    logits: Any, rows: list[_VerifiedRow], banned: dict[int, Any], token_text: Callable[[int], str]
) -> list[SampledToken | GymError]:
    """A sampled token or a ``GymError`` for each row."""
    errors = {place: mask for place, mask in banned.items() if isinstance(mask, GymError)}
    chosen = choose(
        logits,
        [Row(row.sequence.sampler, None if n in errors else banned.get(n)) for n, row in enumerate(rows)],
        token_text,
    )
    return [errors.get(place) or sampled.error or sampled for place, sampled in enumerate(chosen)]
