"""A conversation with a model: history, streaming, and what to forget when the context is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from gym_fed.errors import ErrorCode, GymError

OnText = Callable[[str], None]


class ChatSession:
    """Talks to one model. A model without a chat template continues each text, and remembers nothing.

    Args:
        model: A causal LM.
        tokenizer: Its tokenizer.
        system: A system message that is always kept.
        max_new_tokens: Longest answer in tokens.
        temperature: 0 is greedy.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        system: str | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._system = [{"role": "system", "content": system}] if system else []
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        self.history: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget the conversation, but not the system message."""
        self.history = []

    @torch.inference_mode()
    def say(self, text: str, on_text: OnText | None = None) -> str:
        """Say something and get the answer.

        Args:
            text: The user's words.
            on_text: Called with each piece of the answer as it comes.

        Raises:
            GymError: ``TOO_LARGE`` when the text alone does not fit the model's context.
        """
        ids = self._prompt_ids(text)
        device = next(self._model.parameters()).device
        prompt = torch.tensor([ids], device=device)
        sampling = (
            {"do_sample": True, "temperature": self._temperature}
            if self._temperature
            else {"do_sample": False}
        )
        out = self._model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(self._max_new_tokens, self._context() - len(ids)),
            pad_token_id=self._tokenizer.pad_token_id,
            streamer=_Pieces(self._tokenizer, on_text) if on_text else None,
            **sampling,
        )
        answer = str(self._tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))
        if self._tokenizer.chat_template:
            self.history += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        return answer

    def _prompt_ids(self, text: str) -> list[int]:
        """Token ids of the prompt; the oldest turns are dropped until an answer fits behind it."""
        room = self._context() - min(self._max_new_tokens, self._context() // 2)
        if not self._tokenizer.chat_template:
            ids = list(self._tokenizer(text)["input_ids"])
            return ids if len(ids) <= room else self._refuse(len(ids), room)
        while True:
            conversation = [*self._system, *self.history, {"role": "user", "content": text}]
            encoded = self._tokenizer.apply_chat_template(
                conversation, tokenize=True, return_dict=True, add_generation_prompt=True
            )
            ids = list(encoded["input_ids"])
            if len(ids) <= room:
                return ids
            if not self.history:
                return self._refuse(len(ids), room)
            self.history = self.history[2:]

    def _refuse(self, length: int, room: int) -> list[int]:
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"the message takes {length} tokens, and the model has room for {room}",
            "shorten it, or lower --max-new-tokens",
        )

    def _context(self) -> int:
        return int(getattr(self._model.config, "max_position_embeddings", 2048))


class _Pieces(BaseStreamer):
    """Hands on text as soon as it is whole: half a character of several bytes is held back."""

    def __init__(self, tokenizer: Any, on_text: OnText) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._ids: list[int] = []
        self._shown = 0
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then a token at a time."""
        if not self._seen_prompt:
            self._seen_prompt = True
            return
        self._ids += value.flatten().tolist()
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if not text.endswith("�"):
            self._on_text(text[self._shown :])
            self._shown = len(text)

    def end(self) -> None:
        """Hand on what was held back."""
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        self._on_text(text[self._shown :])
