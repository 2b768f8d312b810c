"""Generate answers with transformers' ``generate``, for models that the multi-variant step cannot compute."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.encoding import prompt_ids
from gym_fed.serving.base import end_ids
from gym_fed.serving.reasoning.answers import AnswerReader, AnswerStream
from gym_fed.serving.reasoning.base import AnswerSplit

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_KNOWN = frozenset({"model", "messages", "prompt", "max_tokens", "seed", *_SAMPLING})


class PlainGeneration:
    """Implements ``Service`` of ``LocalWriter`` over ``model.generate``.

    Args:
        model: Any transformers causal LM, or a PEFT model around one.
        tokenizer: Its tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._reader = AnswerReader(tokenizer)

    def stream(self, url: str, body: dict[str, Any], caller: object) -> Generator[dict[str, Any]]:
        """Stream the chunks of one answer.

        Raises:
            GymError: ``USAGE`` for an unsupported field.
        """
        for name in body.keys() - _KNOWN:
            raise GymError(
                ErrorCode.USAGE,
                f"{name} is not supported for this model, which is not served by the engine",
                f"supported fields: {', '.join(sorted(_KNOWN - {'model', 'messages', 'prompt'}))}",
            )
        return self._chunks(body)

    def _chunks(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        ids = prompt_ids(self._tokenizer, body["messages"] if "messages" in body else body["prompt"])
        texts: queue.SimpleQueue[AnswerSplit | None] = queue.SimpleQueue()
        stop = _Stop()
        done: list[int] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                done.append(self._generate(ids, body, _TextQueue(self._reader, texts), stop))
            except Exception as error:  # noqa: BLE001  # raised again on the reading thread
                failed.append(error)
            finally:
                texts.put(None)

        thread = threading.Thread(target=work, name="gym-generate", daemon=True)
        thread.start()
        try:
            while (split := texts.get()) is not None:
                delta = {"reasoning_content": split.reasoning, "content": split.text}
                if delta := {name: text for name, text in delta.items() if text}:
                    yield {"choices": [{"index": 0, "delta": delta}]}
        finally:
            stop.requested = True
            thread.join()
        if failed:
            raise failed[0]
        reason = "length" if done[0] >= int(body["max_tokens"]) else "stop"
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}

    @torch.inference_mode()
    def _generate(self, ids: list[int], body: dict[str, Any], streamer: _TextQueue, stop: _Stop) -> int:
        """Generate an answer, and return its number of tokens, not counting the end token."""
        if body.get("seed") is not None:
            torch.manual_seed(body["seed"])
        ends = end_ids(self._model, self._tokenizer)
        prompt = torch.tensor([ids], device=next(self._model.parameters()).device)
        sampling: dict[str, Any] = {name: body[name] for name in _SAMPLING if name in body}
        if "temperature" in sampling:
            sampling["do_sample"] = sampling["temperature"] > 0
        if sampling.get("do_sample") is False:
            sampling = {k: v for k, v in sampling.items() if k in ("do_sample", "repetition_penalty")}
        out = self._model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=body["max_tokens"],
            pad_token_id=self._tokenizer.pad_token_id,
            eos_token_id=sorted(ends) or None,
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([stop]),
            **sampling,
        )
        return int(out.shape[1]) - len(ids) - (int(out[0, -1]) in ends)


class _Stop(StoppingCriteria):
    """Stops generation after the current token."""

    requested = False

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        return torch.full((input_ids.shape[0],), self.requested, device=input_ids.device)


class _TextQueue(BaseStreamer):
    """Passes on text as soon as its characters are complete, like the engine."""

    def __init__(self, reader: AnswerReader, texts: queue.SimpleQueue[AnswerSplit | None]) -> None:
        self._reader = reader
        self._texts = texts
        self._answer: AnswerStream | None = None

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, and then one token at a time."""
        ids = value.flatten().tolist()
        if self._answer is None:
            self._answer = self._reader.stream(ids)
            return
        for token_id in ids:
            self._texts.put(self._answer.push(token_id))

    def end(self) -> None:
        """Pass on the held-back text."""
        if self._answer is not None:
            self._texts.put(self._answer.end())
