"""The tokens of one request in a step, and the packing of all requests' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward.attention import PackedTokens
from gym_fed.serving.forward.kv_cache import KVCache
from gym_fed.serving.forward.loaded import LoadedVariant
from gym_fed.serving.forward.picture_rows import EmbeddedRows, rows_of_step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """The tokens of one request in a step.

    Attributes:
        token_ids: A part of its prompt (prefill), or its newest token (decode); at least one.
        cache: The request's own; the tokens are appended to it.
        variant: The variant; None: the base.
        wants_logits: Whether to compute the logits after the last token.
        num_logits: How many of the last tokens get logits; scoring a text needs more than one.
        hidden: Collects the last hidden states of its tokens, for an embedding.
        pictures: The picture features that replace the embeddings of its tokens.
    """

    token_ids: list[int]
    cache: KVCache
    variant: LoadedVariant | None = None
    wants_logits: bool = True
    hidden: HiddenMean | None = None
    num_logits: int = 1
    pictures: EmbeddedRows | None = None

    @property
    def rows(self) -> int:
        """The rows of logits that a step returns for it."""
        return self.num_logits if self.wants_logits else 0


def packed_tokens(chunks: Sequence[Chunk]) -> tuple[list[int], PackedTokens]:
    """Reserve room in the caches, and return the token after each chunk's last with all tokens.

    Raises:
        GymError: ``USAGE`` as ``MultiVariantModel.step``.
    """
    if not chunks or not all(chunk.token_ids for chunk in chunks):
        raise GymError(ErrorCode.USAGE, "a step needs chunks of at least one token each")
    if not all(chunk.num_logits in range(1, len(chunk.token_ids) + 1) for chunk in chunks):
        raise GymError(ErrorCode.USAGE, "num_logits must be from 1 to the tokens of the chunk")
    if len({id(chunk.cache) for chunk in chunks}) != len(chunks):
        raise GymError(ErrorCode.USAGE, "two chunks of one step have the same cache")
    if len({id(chunk.cache.pool) for chunk in chunks}) != 1:
        raise GymError(ErrorCode.USAGE, "the chunks of one step have caches of different pools")
    ends, spans, at = [], [], 0
    for chunk in chunks:
        if not chunk.cache.reserve(len(chunk.token_ids)):
            raise GymError(
                ErrorCode.BUSY,
                f"the KV cache has no room for {len(chunk.token_ids)} more tokens of a request",
                "raise engine.kv_cache_size, or send fewer requests at once",
            )
        spans.append((at, at + len(chunk.token_ids), chunk.cache))
        at += len(chunk.token_ids)
        ends.append(at)
    starts = [start for start, _, _ in spans]
    pictures = rows_of_step([(at, chunk.pictures) for at, chunk in zip(starts, chunks, strict=True)])
    return ends, PackedTokens(spans, pictures=pictures)


class HiddenMean:
    """The mean of the last hidden states of a text whose prefill comes in chunks."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, states: Tensor) -> None:
        """Add the states of the next tokens: ``[tokens, hidden]``."""
        total = states.float().sum(dim=0)
        self._sum = total if self._sum is None else self._sum + total

    def unit(self) -> Tensor:
        """Return the mean scaled to length 1, for which the sum suffices: ``[hidden] float32``."""
        assert self._sum is not None
        mean: Tensor = self._sum / self._sum.norm().clamp_min(1e-12)
        return mean
