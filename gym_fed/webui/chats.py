"""Saved conversations of the ``play`` screen: one JSON file each in ``.chats`` of the runs folder, operators only."""

from __future__ import annotations

import re
import secrets
import threading
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field, ValidationError

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, write_atomically
from gym_fed.core.text import counted
from gym_fed.trust.identity.variant import VariantName
from gym_fed.web.app import Changing, Operating
from gym_fed.webui.play import MAX_TEXT, BaseId
from gym_fed.webui.workbench import Workbench

FOLDER = ".chats"
MAX_CHATS = 5000
MAX_TURNS = 500
MAX_ATTEMPTS = 100
"""Maximum number of saved attempts at one prompt, if it is asked repeatedly."""
_ID = re.compile(r"[0-9]{12}-[0-9a-f]{12}")
_TITLE_CHARACTERS = 80


class SavedAnswer(StrictModel):
    """The answer of one model. Its token probabilities are not saved."""

    base: BaseId
    variant: VariantName | None = None
    label: str = Field(max_length=5000)
    text: str = Field(max_length=MAX_TEXT)
    error: str = Field(default="", max_length=5000)
    finish: str = Field(default="", max_length=40)
    count: int = Field(default=0, ge=0)
    first: float = Field(default=0, ge=0)
    """Milliseconds until the first token."""
    took: float = Field(default=0, ge=0)
    """Milliseconds until the end of the answer."""


Answers = Annotated[list[SavedAnswer], Field(min_length=1, max_length=2)]
"""The answers of one attempt, one per model."""


class SavedTurn(StrictModel):
    """A prompt with all attempts to answer it, oldest first, and the index of the attempt that is shown."""

    prompt: str = Field(max_length=MAX_TEXT)
    attempts: list[Answers] = Field(min_length=1, max_length=MAX_ATTEMPTS)
    shown: int = Field(default=0, ge=0, lt=MAX_ATTEMPTS)


class SavedChat(StrictModel):
    """A conversation."""

    title: str = Field(default="", max_length=_TITLE_CHARACTERS)
    """The title; if empty, the start of the first prompt is shown."""
    system: str = Field(default="", max_length=MAX_TEXT)
    turns: list[SavedTurn] = Field(min_length=1, max_length=MAX_TURNS)

    def facts(self) -> dict[str, Any]:
        """Return the summary for the list of conversations."""
        title = self.title or " ".join(self.turns[0].prompt.split())[:_TITLE_CHARACTERS]
        return {"title": title, "turns": len(self.turns)}


def routes(workbench: Workbench) -> APIRouter:
    """Create the routes below ``/play/chats``."""
    router, chats = APIRouter(prefix="/play/chats"), Chats(workbench.runs / FOLDER)

    @router.get("")
    def listed(visitor: Operating, limit: Annotated[int, Query(ge=1, le=1000)] = 200) -> dict[str, Any]:
        """List the newest conversations with id, title, number of turns and time of the last change."""
        return chats.newest(limit)

    @router.get("/{id}")
    def one(id: str, visitor: Operating) -> dict[str, Any]:
        """Return a conversation."""
        return chats.get(id).model_dump()

    @router.post("")
    def keep(given: SavedChat, visitor: Changing) -> dict[str, Any]:
        """Save a new conversation; return its id."""
        return {"id": chats.add(given)}

    @router.put("/{id}")
    def change(id: str, given: SavedChat, visitor: Changing) -> dict[str, Any]:
        """Replace a conversation with its newer state."""
        chats.replace(id, given)
        return {"id": id}

    @router.delete("/{id}")
    def delete(id: str, visitor: Changing) -> dict[str, Any]:
        """Delete a conversation."""
        chats.delete(id)
        return {}

    return router


class Chats:
    """The conversations in one folder. Safe from any thread.

    Args:
        folder: The folder, which is created with mode 0700 for the first conversation.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[str, tuple[int, dict[str, Any]]] = {}
        """Modification time in nanoseconds and summary, by id."""

    def newest(self, limit: int) -> dict[str, Any]:
        """Return ``{chats, total, unreadable}``, newest first, with the number of unreadable files."""
        files = []
        for file in self._files():
            try:
                files.append((file.stat().st_mtime_ns, file))
            except FileNotFoundError:  # deleted meanwhile
                continue
        files.sort(reverse=True)
        chats, unreadable = [], 0
        for changed, file in files[:limit]:
            try:
                chats.append({"id": file.stem, "at": changed / 1e9, **self._facts(file, changed)})
            except GymError:
                unreadable += 1
        return {"chats": chats, "total": len(files), "unreadable": unreadable}

    def get(self, id: str) -> SavedChat:
        """Return a conversation.

        Raises:
            GymError: ``NOT_FOUND``; ``STATE_CORRUPT``.
        """
        return self._read(self._place(id))

    def add(self, chat: SavedChat) -> str:
        """Save a conversation and return its id.

        Raises:
            GymError: ``QUOTA_EXCEEDED`` for more than ``MAX_CHATS``.
        """
        with self._lock:
            if len(self._files()) >= MAX_CHATS:
                raise GymError(
                    ErrorCode.QUOTA_EXCEEDED,
                    f"{counted(MAX_CHATS, 'conversation')} are saved, which is the maximum",
                    "delete some of them",
                )
            id = f"{int(time.time()):012d}-{secrets.token_hex(6)}"
            make_folder(self._folder, 0o700)
            self._write(id, chat)
        return id

    def replace(self, id: str, chat: SavedChat) -> None:
        """Replace a conversation; an empty title leaves the title unchanged.

        Raises:
            GymError: ``NOT_FOUND`` if it was deleted; ``STATE_CORRUPT``.
        """
        with self._lock:
            before = self._read(self._place(id))
            self._write(id, chat.model_copy(update={"title": chat.title or before.title}))

    def delete(self, id: str) -> None:
        """Delete a conversation.

        Raises:
            GymError: ``NOT_FOUND``.
        """
        with self._lock:
            self._place(id).unlink(missing_ok=True)
            self._known.pop(id, None)

    def _files(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return [file for file in self._folder.glob("*.json") if _ID.fullmatch(file.stem)]

    def _place(self, id: str) -> Path:
        file = self._folder / f"{id}.json"
        if not _ID.fullmatch(id) or not file.is_file():
            raise GymError(ErrorCode.NOT_FOUND, f"there is no conversation {id[:80]!r}", "reload the page")
        return file

    def _facts(self, file: Path, changed: int) -> dict[str, Any]:
        known = self._known.get(file.stem)
        if known is None or known[0] != changed:
            known = self._known[file.stem] = (changed, self._read(file).facts())
        return known[1]

    def _read(self, file: Path) -> SavedChat:
        try:
            return SavedChat.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{file}: not a readable conversation",
                "move the file to another folder",
            ) from error

    def _write(self, id: str, chat: SavedChat) -> None:
        write_atomically(
            self._folder / f"{id}.json", chat.model_dump_json().encode("utf-8", "replace"), mode=0o600
        )
