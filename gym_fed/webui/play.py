"""The screen ``play``: chat with the models of this machine, compare two, and teach better answers."""

from __future__ import annotations

import shlex
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import StreamingResponse

from gym_fed.config.schema.base import StrictModel
from gym_fed.trust.identity.variant import VariantName
from gym_fed.web.app import Changing, Looking
from gym_fed.web.model_server import SERVED_NAME, stream_answer
from gym_fed.webui.inventory import find_base, local_bases, local_variants
from gym_fed.webui.model_servers import MAX_SERVERS, servers_of
from gym_fed.webui.taught import Taught
from gym_fed.webui.workbench import Workbench

MAX_TEXT = 200_000
TOP_LOGPROBS = 5

BaseId = Annotated[str, Field(min_length=1, max_length=4096)]


class Turn(StrictModel):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str = Field(max_length=MAX_TEXT)


Turns = Annotated[list[Turn], Field(min_length=1, max_length=500)]


class ChosenModels(StrictModel):
    """The models that are to be loaded."""

    bases: list[BaseId] = Field(max_length=MAX_SERVERS)


class AskedPrompt(StrictModel):
    """What a page wants answered. It is passed on, and neither kept nor logged."""

    base: BaseId
    variant: VariantName | None = None
    messages: Turns
    max_tokens: int = Field(default=256, ge=1, le=32_768)
    temperature: float = Field(default=0.7, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**53)
    logprobs: bool = False

    def body(self) -> dict[str, Any]:
        """As `gym api` takes it."""
        found: dict[str, Any] = {
            "model": SERVED_NAME if self.variant is None else f"{SERVED_NAME}:{self.variant}",
            "messages": [turn.model_dump() for turn in self.messages],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.seed is not None:
            found["seed"] = self.seed
        if self.logprobs:
            found |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        return found


class TaughtAnswer(StrictModel):
    """A better answer than a model gave."""

    base: BaseId
    prompt: Turns
    chosen: str = Field(max_length=MAX_TEXT)
    rejected: str = Field(max_length=MAX_TEXT)


class NewVariant(StrictModel):
    """A variant to be made of what was taught."""

    base: BaseId
    name: VariantName


def routes(workbench: Workbench) -> APIRouter:
    """``play`` and what is below it."""
    found = APIRouter()
    servers, taught = servers_of(workbench), Taught(workbench)

    @found.get("/play")
    def play(visitor: Looking) -> dict[str, Any]:
        """The models and variants of this machine, and those that are loaded."""
        return {
            "models": [model.facts() for model in local_bases(workbench)],
            "variants": local_variants(),
            "servers": servers.facts(),
        }

    @found.post("/play/serve")
    def serve(given: ChosenModels, visitor: Changing) -> dict[str, Any]:
        """Have these models loaded, and no others: their servers."""
        servers.serve(given.bases)
        return {"servers": servers.facts()}

    @found.post("/play/chat")
    def chat(given: AskedPrompt, visitor: Changing) -> StreamingResponse:
        """A stream of the answer, as `gym api` sends it."""
        server = servers.ready(given.base)
        return StreamingResponse(
            stream_answer(f"{server.url}/chat/completions", server.key, given.body()),
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no"},
        )

    @found.get("/play/taught")
    def rows(base: Annotated[str, Query(max_length=4096)], visitor: Looking) -> dict[str, Any]:
        """What was taught to a base."""
        return taught.rows(base)

    @found.post("/play/taught")
    def teach(given: TaughtAnswer, visitor: Changing) -> dict[str, Any]:
        """Add a better answer: how many there are."""
        prompt = [turn.model_dump() for turn in given.prompt]
        return {"total": taught.add(given.base, prompt, given.chosen, given.rejected)}

    @found.delete("/play/taught")
    def forget(
        base: Annotated[str, Query(max_length=4096)],
        id: Annotated[str, Query(max_length=64)],
        visitor: Changing,
    ) -> dict[str, Any]:
        """Remove what was taught: how many are left."""
        return {"total": taught.remove(base, id)}

    @found.get("/play/variant-command")
    def command(
        base: Annotated[str, Query(max_length=4096)],
        name: Annotated[str, Query(max_length=64)],
        visitor: Looking,
    ) -> dict[str, Any]:
        """The command that makes a variant of what was taught."""
        return {"command": shlex.join(_create(taught, base, name))}

    @found.post("/play/variant")
    def make(given: NewVariant, visitor: Changing) -> dict[str, Any]:
        """Start that command: the job."""
        find_base(workbench, given.base)
        words = _create(taught, given.base, given.name)
        return workbench.jobs.start(words, title=f"Make the variant {given.name}").facts()

    return found


def _create(taught: Taught, base: str, name: str) -> list[str]:
    """The command that makes a variant of what was taught."""
    known = any(row["name"] == name for row in local_variants())
    return [
        *("gym", "variant", "create", f"--data={taught.file(base)}", f"--user={name}", f"--base={base}"),
        *(["--replace"] if known else []),
    ]
