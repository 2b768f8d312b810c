"""Serve variants in this process; all variants of one trainer share one base in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.request import CompletionOutput, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from gym_fed.serving.engine.request import Generation
    from gym_fed.serving.setup import Serving

_SAMPLING = {field.name for field in fields(SamplingParams)}


class SharedServing:
    """A reference-counted base, engine and store, opened by the first user and closed by the last.

    Args:
        opens: Function that opens them.
    """

    def __init__(self, opens: Callable[[], Serving]) -> None:
        self._opens = opens
        self._lock = threading.Lock()
        self._open: Serving | None = None
        self._users = 0

    def take(self) -> Serving:
        """Add a user. Raises as ``open_serving``."""
        with self._lock:
            if self._open is None:
                self._open = self._opens()
            self._users += 1
            return self._open

    def give_back(self) -> None:
        """Remove a user."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._open is not None:
                serving, self._open = self._open, None
                serving.close()


class ServedVariant:
    """A served variant. Use as a context manager, or ``close`` it; thread-safe.

    The keyword arguments ``sampling`` are fields of ``SamplingParams``: ``max_tokens``, ``temperature``, ``seed``,
    ``stop``, ...

    Attributes:
        name: Name of the variant.
        model: Its model name in the API: ``<base>:<variant>``.
    """

    def __init__(self, name: str, shared: SharedServing) -> None:
        """Create a served variant; use ``PersonalizedTrainer.serve_variant`` instead."""
        self.name = name
        self._shared = shared
        self._serving: Serving | None = shared.take()
        try:
            assert self._serving.store is not None  # a trainer's serving has one
            self._serving.store.release(
                self._serving.store.acquire(name)
            )  # verified and in memory, or rejected
        except BaseException:
            self.close()
            raise
        self.model = f"{self._serving.served_name}:{name}"

    def chat(self, messages: str | Sequence[Mapping[str, Any]], **sampling: Any) -> CompletionOutput:
        """Answer a conversation, or a single user message.

        Raises:
            GymError: ``USAGE`` for unknown or invalid sampling parameters; ``DATA_INVALID`` without a chat template;
                errors of ``Engine.submit``.
        """
        return self._submit(self._conversation(messages), sampling).result()

    def complete(self, prompt: str, **sampling: Any) -> CompletionOutput:
        """Complete a text; raises as ``chat``."""
        return self._submit(self._text(prompt), sampling).result()

    def stream(self, messages: str | Sequence[Mapping[str, Any]], **sampling: Any) -> Iterator[str]:
        """Stream the answer of ``chat`` in chunks; closing the iterator cancels the answer."""
        return _texts(self._submit(self._conversation(messages), sampling))

    def stream_completion(self, prompt: str, **sampling: Any) -> Iterator[str]:
        """Stream the text of ``complete`` in chunks."""
        return _texts(self._submit(self._text(prompt), sampling))

    def close(self) -> None:
        """Stop serving the variant; the base is freed with the last one. Idempotent."""
        if self._serving is not None:
            self._serving = None
            self._shared.give_back()

    def __enter__(self) -> ServedVariant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Serving:
        if self._serving is None:
            raise GymError(
                ErrorCode.USAGE, f"variant {self.name!r} is no longer served here", "serve it again"
            )
        return self._serving

    def _submit(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Generation:
        unknown = sorted(set(sampling) - _SAMPLING)
        if unknown:
            raise GymError(
                ErrorCode.USAGE, f"sampling has no {unknown[0]!r}", f"it has {', '.join(sorted(_SAMPLING))}"
            )
        values = dict(sampling)
        if isinstance(values.get("stop"), str):
            values["stop"] = (values["stop"],)
        request = GenerationRequest(prompt_ids, SamplingParams(**values), variant=self.name, user=self.name)
        return self._open().engine.submit(request)

    def _conversation(self, messages: str | Sequence[Mapping[str, Any]]) -> list[int]:
        from gym_fed.data.encoding import prompt_ids, require_chat_template

        tokenizer = self._open().tokenizer
        require_chat_template(tokenizer)
        rows = (
            [{"role": "user", "content": messages}]
            if isinstance(messages, str)
            else [dict(m) for m in messages]
        )
        return prompt_ids(tokenizer, rows)

    def _text(self, prompt: str) -> list[int]:
        return list(self._open().tokenizer(prompt)["input_ids"])


def _texts(generation: Generation) -> Iterator[str]:
    try:
        for event in generation:
            if event.text:
                yield event.text
    finally:
        generation.cancel()
