"""Answers of the newest and the previous version to the operator's prompts, stored in a file next to the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.files import write_atomically
from gym_server.rounds.versions import Version

MAX_TOKENS = 128
"""Maximum length of one answer, in tokens."""
MAX_CHARACTERS = 4000
"""Maximum length of one stored answer, in characters; a token may be many characters."""
MAX_BYTES = 1 << 20

log = logging.getLogger("gym_server")


class FixedAnswer(StrictModel):
    """A version's answer to a prompt."""

    prompt: str
    text: str
    is_cut: bool = False
    """True if the answer was cut off at its maximum length."""
    problem: str = ""
    """Reason why there is no text; empty if there is text."""


class AnsweredVersion(StrictModel):
    """A version, and its answers so far."""

    height: int = Field(ge=0)
    digest: str
    answers: list[FixedAnswer]


class _KeptAnswers(StrictModel):
    versions: list[AnsweredVersion]


class NewestAnswers:
    """The answers of the newest and the previous version.

    Args:
        prompts: The operator's prompts.
        known: File of an earlier run, which is ignored if it cannot be read.
        file: File to store the answers in.
    """

    def __init__(self, prompts: Sequence[str], known: Path, file: Path) -> None:
        self._prompts, self._file = tuple(prompts), file
        self._versions: tuple[AnsweredVersion, ...] = ()
        with suppress(OSError, ValidationError), known.open("rb") as stream:
            self._versions = tuple(_KeptAnswers.model_validate_json(stream.read(MAX_BYTES)).versions[:2])

    def begin(self, version: Version) -> list[str]:
        """Set the newest version.

        Returns:
            The prompts that the version has not answered yet.
        """
        others = [one for one in self._versions if one.digest != version.digest and one.answers]
        own = next((one for one in self._versions if one.digest == version.digest), None)
        known = {} if own is None else {one.prompt: one for one in own.answers}
        answers = [known[prompt] for prompt in self._prompts if prompt in known]
        newest = AnsweredVersion(height=version.height, digest=version.digest, answers=answers)
        self._versions = (newest, *others[:1])
        return [prompt for prompt in self._prompts if prompt not in known]

    def add(self, answer: FixedAnswer) -> None:
        """Add an answer of the newest version."""
        if len(answer.text) > MAX_CHARACTERS:
            answer = answer.model_copy(update={"text": answer.text[:MAX_CHARACTERS], "is_cut": True})
        newest, *others = self._versions
        self._versions = (newest.model_copy(update={"answers": [*newest.answers, answer]}), *others)

    def save(self) -> None:
        """Store the answers for the next start, which generates them again if storing fails."""
        try:
            write_atomically(
                self._file, _KeptAnswers(versions=list(self._versions)).model_dump_json().encode()
            )
        except Exception as error:  # noqa: BLE001 (reporting a full disk is the hub's task)
            log.warning("the answers of the newest version could not be stored: %s", error)

    def rows(self) -> list[dict[str, Any]]:
        """Return the answers to each prompt, newest version first."""
        found = []
        for prompt in self._prompts:
            answers = [
                {"version": one.height, **answer.model_dump(exclude={"prompt"})}
                for one in self._versions
                for answer in one.answers
                if answer.prompt == prompt
            ]
            found.append({"prompt": prompt, "answers": answers})
        return found
