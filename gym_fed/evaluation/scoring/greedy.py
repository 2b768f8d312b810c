"""Greedy generation for many variants and prompts in lockstep.

The rows of a forward pass are the answers of all models to some prompts, each extended by one token. Finished rows are
removed when they are a quarter of all rows. Requests with sampling or long prompts, and models with special attention,
use the engine (``local``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.base import end_ids
from gym_fed.serving.forward.padded import BatchCache

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.serving.forward.multi_variant import MultiVariantModel
    from gym_fed.serving.forward.variant_weights import LoadedVariant


LONGEST_PROMPT = 2048
"""Maximum number of tokens of a prompt, since its attention is quadratic."""
_MAX_ROWS = 512
_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class GreedyPrompt:
    """A truncated prompt with the end conditions of its answer: ``max_tokens``, end tokens and ``until``."""

    place: int
    token_ids: Sequence[int]
    max_tokens: int
    until: tuple[str, ...]


@dataclass
class GreedyAnswer:
    """Generated tokens, their lead over the second-best in nats, and whether the answer ended with an end token."""

    token_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    stopped: bool = False
    done: bool = False


class GreedyWriter:
    """Generates the answers of a base and its variants.

    Args:
        variants: Variants by name; None is the base itself.
        step_tokens: Maximum number of tokens of a forward that reads prompts.
        most_rows: Maximum number of rows of logits of a forward.
    """

    def __init__(
        self,
        served: MultiVariantModel,
        tokenizer: Any,
        variants: Mapping[str, LoadedVariant | None],
        step_tokens: int,
        most_rows: int,
    ) -> None:
        self._served, self._tokenizer, self._variants = served, tokenizer, variants
        self._step_tokens, self._most_rows = step_tokens, min(_MAX_ROWS, most_rows)
        self._ends = end_ids(served.model, tokenizer)
        self._stops = cache(self._stop_tokens)

    def answers(self, prompts: Sequence[GreedyPrompt]) -> Iterator[tuple[int, dict[str, GreedyAnswer]]]:
        """Yield each prompt's index and its answers by model, when they are done under all models.

        Raises:
            GymError: ``MODEL_INVALID`` for a model whose probabilities are not numbers.
        """
        # Group equal maximum lengths, so that few rows remain at the end.
        waiting = sorted(prompts, key=lambda prompt: (prompt.max_tokens, len(prompt.token_ids), prompt.place))
        while waiting:
            longest = waiting[-1]
            bytes_each = self._served.bytes_per_token * (len(longest.token_ids) + longest.max_tokens)
            most = min(self._most_rows, max(1, _CACHE_BYTES // max(1, bytes_each)))
            count = max(1, most // len(self._variants))
            group = [prompt for prompt in waiting[-count:] if prompt.max_tokens == longest.max_tokens]
            waiting = waiting[: -len(group)]
            yield from self._group(group)

    def _group(self, prompts: Sequence[GreedyPrompt]) -> Iterator[tuple[int, dict[str, GreedyAnswer]]]:
        rows = [(name, number) for name in self._variants for number in range(len(prompts))]
        written = {row: GreedyAnswer() for row in rows}
        left = [len(self._variants)] * len(prompts)
        lengths = [len(prompts[number].token_ids) for _, number in rows]
        capacity = max(lengths) + prompts[0].max_tokens
        cache = BatchCache(lengths, capacity, self._served.dtype, self._served.device)
        logits = self._prefill(cache, rows, prompts)
        while True:
            best = logits.topk(2, dim=1)
            self._require_numbers(best.values, rows)
            tokens: list[int] = best.indices[:, 0].tolist()
            margins: list[float] = (best.values[:, 0] - best.values[:, 1]).tolist()
            for row, token, margin in zip(rows, tokens, margins, strict=True):
                answer = written[row]
                if answer.done:
                    continue
                number = row[1]
                self._push(answer, token, margin, prompts[number])
                if answer.done:
                    left[number] -= 1
                    if not left[number]:
                        yield prompts[number].place, {name: written[name, number] for name in self._variants}
            alive = [at for at, row in enumerate(rows) if not written[row].done]
            if not alive:
                return
            if 4 * len(alive) <= 3 * len(rows):
                cache.keep(alive)
                rows, tokens = [rows[at] for at in alive], [tokens[at] for at in alive]
            positions = cache.lengths.tolist()
            logits = self._served.step_together(
                tokens, positions, self._parts(rows), range(len(rows)), cache.next_token()
            )

    def _prefill(
        self, cache: BatchCache, rows: Sequence[tuple[str, int]], prompts: Sequence[GreedyPrompt]
    ) -> Tensor:
        """Return the logits after every prompt, computed in forwards of about ``step_tokens`` including padding."""
        logits: list[Tensor] = []
        first = 0
        while first < len(rows):
            last, longest = first, 0
            while last < len(rows):
                longest = max(longest, len(prompts[rows[last][1]].token_ids))
                if last > first and longest * (last + 1 - first) > self._step_tokens:
                    break
                last += 1
            texts = [prompts[number].token_ids for _, number in rows[first:last]]
            ids = [token for text in texts for token in text]
            positions = [place for text in texts for place in range(len(text))]
            ends: list[int] = []
            for text in texts:
                ends.append((ends[-1] if ends else -1) + len(text))
            parts = self._parts(rows[first:last], [len(text) for text in texts])
            logits.append(self._served.step_together(ids, positions, parts, ends, cache.prefill(first, last)))
            first = last
        return torch.cat(logits)

    def _parts(
        self, rows: Sequence[tuple[str, int]], counts: Sequence[int] | None = None
    ) -> list[tuple[LoadedVariant | None, int, int]]:
        """Yield runs of rows of the same variant: the variant, tokens and rows."""
        parts: list[tuple[LoadedVariant | None, int, int]] = []
        name = None
        for at, row in enumerate(rows):
            count = 1 if counts is None else counts[at]
            if row[0] == name:
                variant, tokens, logits = parts.pop()
                parts.append((variant, tokens + count, logits + 1))
            else:
                name = row[0]
                parts.append((self._variants[name], count, 1))
        return parts

    def _push(self, answer: GreedyAnswer, token: int, margin: float, prompt: GreedyPrompt) -> None:
        answer.token_ids.append(token)
        answer.margins.append(margin)
        if token in self._ends:
            answer.stopped = answer.done = True
            return
        candidates = self._stops(prompt.until)
        if prompt.until and (candidates is None or token in candidates):
            text = self._tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            if any(stop in text for stop in prompt.until):
                answer.stopped = answer.done = True
                return
        answer.done = len(answer.token_ids) >= prompt.max_tokens

    def _stop_tokens(self, until: tuple[str, ...]) -> frozenset[int] | None:
        """Return the tokens that may end one of these texts, by their last character. None: any may."""
        last = {stop[-1] for stop in until}
        if not all(char == "\n" or (char.isascii() and char.isprintable() and char != " ") for char in last):
            return None  # partial characters and spaces may be invisible in a single token
        pieces = self._tokenizer.batch_decode([[token] for token in range(len(self._tokenizer))])
        return frozenset(token for token, piece in enumerate(pieces) if not last.isdisjoint(piece))

    def _require_numbers(self, values: Tensor, rows: Sequence[tuple[str, int]]) -> None:
        broken = (~torch.isfinite(values).all(dim=1)).nonzero().flatten().tolist()
        if broken:
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{rows[broken[0]][0]}: its probabilities are not finite",
                "omit it, or train it again",
            )
