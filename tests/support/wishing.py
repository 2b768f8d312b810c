"""A model that writes what it wishes, and where that is forbidden the first token that is not: for grammars' tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import openai
import torch

from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.openai.catalogue import Catalogue
from gym_fed.serving.openai.service import OpenAIService
from gym_fed.serving.setup import Serving
from tests.support.api_server import api_server
from tests.support.toy_engine import END, ToyModel
from tests.support.wait import SECONDS

ASSISTANT = "<|im_start|>assistant\n"
"""gym-nano's token after which an answer begins."""


class Wishing(ToyModel):
    """Its answers begin after the last token ``ASSISTANT``.

    Attributes:
        wish: The tokens that it would write.
    """

    vocabulary = 300

    def __init__(self) -> None:
        super().__init__(8192)
        self.wish: list[int] = []
        self._start = 261

    def _logits(self, chunk: Any, place: int) -> torch.Tensor:
        written = 0
        while self.pool.at(chunk.cache, place - written)[0] != self._start:
            written += 1
        wanted = self.wish[written] if written < len(self.wish) else END
        return torch.nn.functional.one_hot(torch.tensor(wanted), self.vocabulary) * 50.0


def tokenizer_with(template: str, *control: str) -> Any:
    """gym-nano's tokenizer with another template, whose answers begin after ``ASSISTANT``, and control tokens."""
    from gym_fed.base.models import load_tokenizer

    found = load_tokenizer("gym-nano")
    if control:
        found.add_special_tokens({"additional_special_tokens": list(control)})
    begin = "{% if add_generation_prompt %}{{ '" + ASSISTANT.replace("\n", "\\n") + "' }}{% endif %}"
    found.chat_template = template.replace("{{ bos_token }}", "") + begin
    return found


@contextmanager
def served(model: ToyModel, tokenizer: Any, **more: Any) -> Iterator[OpenAIService]:
    """OpenAI's API over the model, which is called ``toy``."""
    with Engine(model, tokenizer) as engine:
        yield OpenAIService(
            engine,
            Catalogue("toy", None, "sha256:1"),
            tokenizer,
            vocab_size=model.vocabulary,
            fingerprint="fp_1",
            max_at_once=20,
            **more,
        )


@contextmanager
def openai_client(service: OpenAIService) -> Iterator[openai.OpenAI]:
    """OpenAI's client of a server with this service."""
    serving = SimpleNamespace(
        service=service, engine=service._engine, store=None, usage_log=None, content_filter=None
    )
    with api_server(cast("Serving", serving), None) as server:
        yield openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=SECONDS)
