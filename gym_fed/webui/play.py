"""The ``play`` screen: chat with local models, compare two of them, and record better answers."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import threading
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import StreamingResponse

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import append_lines, drop_torn_line, make_folder, write_atomically
from gym_fed.core.text import counted
from gym_fed.data.formats.base import BadRow
from gym_fed.data.formats.preference import Preference
from gym_fed.trust.identity.variant import VariantName
from gym_fed.web.app import Changing, Looking
from gym_fed.web.model_server import SERVED_NAME, stream_answer
from gym_fed.webui.inventory import MAX_SERVERS, find_base, local_bases, local_variants, servers_of
from gym_fed.webui.workbench import MAX_ROWS, Workbench

FOLDER = "taught"
MAX_TAUGHT_ROWS = 10_000

MAX_TEXT = 200_000
TOP_LOGPROBS = 5

BaseId = Annotated[str, Field(min_length=1, max_length=4096)]


class Turn(StrictModel):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str = Field(max_length=MAX_TEXT)


Turns = Annotated[list[Turn], Field(min_length=1, max_length=500)]


class ChosenModels(StrictModel):
    """The models to load."""

    bases: list[BaseId] = Field(max_length=MAX_SERVERS)


class AskedPrompt(StrictModel):
    """A prompt from a page, forwarded without being stored or logged."""

    base: BaseId
    variant: VariantName | None = None
    messages: Turns
    max_tokens: int = Field(default=256, ge=1, le=32_768)
    temperature: float = Field(default=0.7, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**53)
    logprobs: bool = False

    def body(self) -> dict[str, Any]:
        """Return the request for `gym api`."""
        request: dict[str, Any] = {
            "model": SERVED_NAME if self.variant is None else f"{SERVED_NAME}:{self.variant}",
            "messages": [turn.model_dump() for turn in self.messages],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.seed is not None:
            request["seed"] = self.seed
        if self.logprobs:
            request |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        return request


class TaughtAnswer(StrictModel):
    """An answer that is better than a model's."""

    base: BaseId
    prompt: Turns
    chosen: str = Field(max_length=MAX_TEXT)
    rejected: str = Field(max_length=MAX_TEXT)


class NewVariant(StrictModel):
    """A new variant from taught answers."""

    base: BaseId
    name: VariantName


def routes(workbench: Workbench) -> APIRouter:
    """Create the routes below ``/play``."""
    router = APIRouter()
    servers, taught = servers_of(workbench), Taught(workbench)

    @router.get("/play")
    def play(visitor: Looking) -> dict[str, Any]:
        """List the local models and variants, the models with taught answers, and the running servers."""
        models = local_bases(workbench)
        return {
            "models": [model.facts() for model in models],
            "taught": [model.id for model in models if taught.has_rows(model.id)],
            "variants": local_variants(),
            "servers": servers.facts(),
        }

    @router.post("/play/serve")
    def serve(given: ChosenModels, visitor: Changing) -> dict[str, Any]:
        """Load exactly these models; return their servers."""
        servers.serve(given.bases)
        return {"servers": servers.facts()}

    @router.post("/play/chat")
    def chat(given: AskedPrompt, visitor: Changing) -> StreamingResponse:
        """Stream an answer in the format of `gym api`."""
        server = servers.ready(given.base)
        return StreamingResponse(
            stream_answer(f"{server.url}/chat/completions", server.key, given.body()),
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no"},
        )

    @router.get("/play/taught")
    def rows(base: Annotated[str, Query(max_length=4096)], visitor: Looking) -> dict[str, Any]:
        """Return the rows taught to a base."""
        return taught.rows(base)

    @router.post("/play/taught")
    def teach(given: TaughtAnswer, visitor: Changing) -> dict[str, Any]:
        """Add a better answer; return the number of rows."""
        prompt = [turn.model_dump() for turn in given.prompt]
        return {"total": taught.add(given.base, prompt, given.chosen, given.rejected)}

    @router.delete("/play/taught")
    def forget(
        base: Annotated[str, Query(max_length=4096)],
        id: Annotated[str, Query(max_length=64)],
        visitor: Changing,
    ) -> dict[str, Any]:
        """Remove a taught answer; return the number of rows left."""
        return {"total": taught.remove(base, id)}

    @router.get("/play/variant-command")
    def command(
        base: Annotated[str, Query(max_length=4096)],
        name: Annotated[str, Query(max_length=64)],
        visitor: Looking,
    ) -> dict[str, Any]:
        """Return the command that creates a variant from taught answers."""
        return {"command": shlex.join(_create(taught, base, name))}

    @router.post("/play/variant")
    def make(given: NewVariant, visitor: Changing) -> dict[str, Any]:
        """Start the command that creates a variant."""
        find_base(workbench, given.base)
        words = _create(taught, given.base, given.name)
        return workbench.jobs.start(words, title=f"Make the variant {given.name}").facts()

    return router


def _create(taught: Taught, base: str, name: str) -> list[str]:
    """Return the command that creates a variant from taught answers."""
    known = any(row["name"] == name for row in local_variants())
    return [
        *("gym", "variant", "create", f"--data={taught.file(base)}", f"--user={name}", f"--base={base}"),
        *(["--replace"] if known else []),
    ]


class Taught:
    """The taught answers as preference rows, one file per base: ``taught/NAME.jsonl`` below the workbench's folder."""

    def __init__(self, workbench: Workbench) -> None:
        self._workbench = workbench
        self._lock = threading.Lock()

    def file(self, base: str) -> Path:
        """Return the file of a base, relative to the workbench's folder."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", base).strip("-.")[:60]
        if name != base:  # gives different bases distinct file names
            name = f"{name}-{hashlib.sha256(base.encode()).hexdigest()[:8]}"
        return Path(FOLDER) / f"{name}.jsonl"

    def has_rows(self, base: str) -> bool:
        """Return True if a base has taught answers."""
        file = self._workbench.folder / self.file(base)
        return file.is_file() and file.stat().st_size > 0

    def rows(self, base: str) -> dict[str, Any]:
        """Return ``{file, total, rows}`` with the newest rows first, each with an ``id`` for its removal.

        Raises:
            GymError: ``DATA_INVALID`` for a line that is not a preference row.
        """
        lines = self._lines(base)
        newest = [(id_of(line), self._row(base, line)) for line in reversed(lines[-MAX_ROWS:])]
        return {
            "file": str(self.file(base)),
            "total": len(lines),
            "rows": [
                {"id": id, **{key: row[key] for key in ("prompt", "chosen", "rejected")}}
                for id, row in newest
            ],
        }

    def add(self, base: str, prompt: list[dict[str, str]], chosen: str, rejected: str) -> int:
        """Add a preference; return the number of rows.

        Args:
            base: Base of the taught answer.
            prompt: Messages before the answer.
            chosen: The better answer.
            rejected: The model's answer.

        Raises:
            GymError: ``DATA_INVALID`` if the answers are not a valid preference row; ``QUOTA_EXCEEDED``.
        """
        alone = len(prompt) == 1 and prompt[0]["role"] == "user"
        row = {"prompt": prompt[0]["content"] if alone else prompt, "chosen": chosen, "rejected": rejected}
        try:
            Preference().read(row)
        except BadRow as error:
            raise GymError(ErrorCode.DATA_INVALID, f"not a valid preference: {error}") from error
        with self._lock:
            file = self._path(base)
            make_folder(file.parent)
            if file.exists():
                drop_torn_line(file)
            count = len(self._lines(base))
            if count >= MAX_TAUGHT_ROWS:
                raise GymError(
                    ErrorCode.QUOTA_EXCEEDED, f"{self.file(base)} has {counted(count, 'row')}", "move it away"
                )
            append_lines(file, [json.dumps(row, ensure_ascii=False)])
        return count + 1

    def remove(self, base: str, id: str) -> int:
        """Remove a row; return the number of rows left.

        Raises:
            GymError: ``NOT_FOUND``.
        """
        with self._lock:
            lines = self._lines(base)
            remaining = [line for line in lines if id_of(line) != id]
            if len(remaining) == len(lines):
                raise GymError(ErrorCode.NOT_FOUND, f"{self.file(base)} has no such row", "reload the page")
            write_atomically(self._path(base), "".join(f"{line}\n" for line in remaining).encode())
        return len(remaining)

    def _path(self, base: str) -> Path:
        return self._workbench.inside(str(self.file(base)))

    def _lines(self, base: str) -> list[str]:
        file = self._path(base)
        if not file.is_file():
            return []
        return [line for line in file.read_text(encoding="utf-8", errors="replace").split("\n") if line]

    def _row(self, base: str, line: str) -> dict[str, Any]:
        try:
            row = json.loads(line)
            if isinstance(row, dict) and {"prompt", "chosen", "rejected"} <= row.keys():
                return row
        except (ValueError, RecursionError):
            pass
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{self.file(base)}: a line is not a valid preference",
            "repair it, or move it away",
        )


def id_of(line: str) -> str:
    """Return the id of a row, derived from its content so that an outdated page cannot remove a different row."""
    return hashlib.sha256(line.encode()).hexdigest()[:16]
