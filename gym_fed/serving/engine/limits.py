"""The limits of a model and its engine, checked when a request is submitted. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gym_fed.serving.forward.chunk import PlacedPicture


MAX_LOGPROBS = 20
MAX_BIAS = 1000
_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "repetition_penalty": (0.01, 100.0),
}


@dataclass(frozen=True)
class Limits:
    """The limits that a model and its engine impose on requests.

    Attributes:
        context: Maximum number of tokens of the prompt and the answer together.
        vocab_size: Width of the logits.
        kv_bytes_per_token: Bytes of one token in the KV cache; 0 for a model whose state has a fixed size.
        kv_bytes: Bytes of all blocks of the KV cache.
    """

    context: int
    vocab_size: int
    kv_bytes_per_token: int
    kv_bytes: int

    def check_prompt(self, ids: list[int], pictures: Sequence[PlacedPicture] = ()) -> None:
        """Validate a prompt.

        Raises:
            GymError: ``USAGE`` for an empty prompt, unknown tokens, or pictures that do not match the tokens;
                ``TOO_LARGE`` if not even one token of an answer would fit.
        """
        if not ids:
            raise GymError(ErrorCode.USAGE, "the prompt is empty", "send at least one token")
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            off = next(token_id for token_id in ids if not 0 <= token_id < self.vocab_size)
            raise GymError(
                ErrorCode.USAGE, f"the prompt has token {off}; valid ids are 0 to {self.vocab_size - 1}"
            )
        if len(ids) >= self.context:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"the prompt has {counted(len(ids), 'token')}; together with the answer, "
                f"at most {self.context} are allowed",
                "shorten the prompt, or remove images" if pictures else "shorten the prompt",
            )
        end = 0
        for picture in pictures:
            if picture.start < end or not picture.whole:
                raise GymError(ErrorCode.USAGE, "an image does not match its placeholder in the prompt")
            end = picture.start + picture.length
        if end > len(ids):
            raise GymError(ErrorCode.USAGE, "an image ends beyond its prompt")

    def answer_tokens(self, request: GenerationRequest) -> int:
        """Return the token limit of this answer: ``max_tokens``, or the room left in context and KV cache.

        Raises:
            GymError: ``TOO_LARGE`` if prompt and answer need more than the KV cache.
        """
        room = self.context - len(request.prompt_ids)
        answer = request.sampling.max_tokens
        if answer is None:
            answer = room
            if self.kv_bytes_per_token:  # 0 if the state has a fixed size
                answer = max(1, self.kv_bytes // self.kv_bytes_per_token - len(request.prompt_ids))
        tokens = min(answer, room)
        self.check_kv_cache(len(request.prompt_ids), tokens)
        return tokens

    def check_kv_cache(self, prompt: int, answer: int) -> None:
        """Refuse a request that could never fit into the KV cache.

        Raises:
            GymError: ``TOO_LARGE``.
        """
        need = (prompt + answer) * self.kv_bytes_per_token
        if need > self.kv_bytes:
            also = f" and an answer of {answer}" if answer else ""
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"a prompt of {counted(prompt, 'token')}{also} may need {counted(need, 'byte')} of KV cache, "
                f"but kv_cache_size has room for {self.kv_bytes:,}",
                "request fewer max_tokens, or raise kv_cache_size"
                if answer
                else "shorten the prompt, or raise kv_cache_size",
            )

    def check_sampling(self, params: SamplingParams) -> None:
        """Validate sampling parameters.

        Raises:
            GymError: ``USAGE`` naming the first invalid parameter.
        """

        def require(name: str, value: object, holds: bool, allowed: str) -> None:
            if not holds:
                raise GymError(ErrorCode.USAGE, f"{name} must be {allowed}, not {value!r}")

        most, fewest, probable = params.max_tokens, params.min_tokens, params.logprobs
        require("max_tokens", most, most is None or most >= 1, "at least 1")
        require("min_tokens", fewest, 0 <= fewest <= (most or self.context), "from 0 to max_tokens")
        require("top_k", params.top_k, params.top_k >= 0, "0 (all) or more")
        for name, (low, high) in _RANGES.items():
            value = getattr(params, name)
            require(name, value, math.isfinite(value) and low <= value <= high, f"from {low:g} to {high:g}")
        for token_id, bias in params.logit_bias.items():
            require(
                "logit_bias", token_id, 0 <= token_id < self.vocab_size, f"a token id below {self.vocab_size}"
            )
            require(
                "logit_bias",
                bias,
                math.isfinite(bias) and abs(bias) <= MAX_BIAS,
                f"from -{MAX_BIAS} to {MAX_BIAS}",
            )
        require("stop", params.stop, all(params.stop), "texts of one character or more")
        for name in ("stop_token_ids", "shown_token_ids"):
            ids = getattr(params, name)
            known = all(_whole(i) and 0 <= i < self.vocab_size for i in ids)
            require(name, ids, known, f"token ids from 0 to {self.vocab_size - 1}")
        require("seed", params.seed, params.seed is None or _whole(params.seed), "an integer")
        within = probable is None or 0 <= probable <= MAX_LOGPROBS
        require("logprobs", probable, within, f"from 0 to {MAX_LOGPROBS}")
        if params.json_schema is not None and params.grammar is not None:
            raise GymError(ErrorCode.USAGE, "json_schema and grammar cannot be used together")
        if params.min_tokens and params.held_to is not None:
            raise GymError(
                ErrorCode.USAGE,
                "min_tokens cannot be used with a grammar, which determines where the answer ends",
            )
        of_json = params.held_to is not None and params.held_to.kind == "json_schema"
        if of_json and (params.stop or params.stop_token_ids):
            raise GymError(
                ErrorCode.USAGE,
                "stop and json_schema cannot be used together: a truncated value is not JSON",
                "omit one of them",
            )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_CONTEXTS = ("max_position_embeddings", "max_seq_len", "context_length", "seq_length")
"""The names of the context length in configs."""
DEFAULT_CONTEXT = 32_768
"""The context of a model whose config does not state one, such as Mamba and Bloom."""


def model_context(config: Any) -> int | None:
    """Return the context length of a transformers model; None if its config does not state one."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    lengths = [getattr(text, name, None) for name in _CONTEXTS]
    return next((int(length) for length in lengths if isinstance(length, int) and length > 0), None)


def context_length(config: Any, configured: int | None) -> int:
    """Return the context length: the model's own, or a smaller configured one.

    A model that does not state one has ``DEFAULT_CONTEXT``, or any configured length.

    Args:
        config: The config of a transformers model.
        configured: ``max_context``; None: the model's own.

    Raises:
        GymError: ``CONFIG_INVALID`` for more than the model has.
    """
    limit = model_context(config)
    if limit is None:
        return configured or DEFAULT_CONTEXT
    if configured is not None and configured > limit:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"max_context: {configured} exceeds the model's limit of {limit}",
            "remove it",
        )
    return configured or limit
