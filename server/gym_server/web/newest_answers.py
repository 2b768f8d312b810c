"""Answers of the newest version and of the one before to the operator's prompts, in a small file next to the model."""

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
"""Of one answer."""
MAX_CHARACTERS = 4000
"""Of one answer that is kept; a token may be many characters."""
MAX_BYTES = 1 << 20

log = logging.getLogger("gym_server")


class FixedAnswer(StrictModel):
    """What a version answered to a prompt."""

    prompt: str
    text: str
    is_cut: bool = False
    """Whether it would have gone on."""
    problem: str = ""
    """Why it has no text."""


class AnsweredVersion(StrictModel):
    """A version, and its answers so far."""

    height: int = Field(ge=0)
    digest: str
    answers: list[FixedAnswer]


class _KeptAnswers(StrictModel):
    versions: list[AnsweredVersion]


class NewestAnswers:
    """The answers of two versions, the newest first.

    Args:
        prompts: What is asked.
        known: The file of a run before; one that cannot be read is none.
        file: Where they are kept.
    """

    def __init__(self, prompts: Sequence[str], known: Path, file: Path) -> None:
        self._prompts, self._file = tuple(prompts), file
        self._versions: tuple[AnsweredVersion, ...] = ()
        with suppress(OSError, ValidationError), known.open("rb") as stream:
            self._versions = tuple(_KeptAnswers.model_validate_json(stream.read(MAX_BYTES)).versions[:2])

    def begin(self, version: Version) -> list[str]:
        """Make a version the newest.

        Returns:
            The prompts that it has not answered.
        """
        others = [one for one in self._versions if one.digest != version.digest and one.answers]
        own = next((one for one in self._versions if one.digest == version.digest), None)
        known = {} if own is None else {one.prompt: one for one in own.answers}
        answers = [known[prompt] for prompt in self._prompts if prompt in known]
        newest = AnsweredVersion(height=version.height, digest=version.digest, answers=answers)
        self._versions = (newest, *others[:1])
        return [prompt for prompt in self._prompts if prompt not in known]

    def add(self, answer: FixedAnswer) -> None:
        """An answer of the newest version."""
        if len(answer.text) > MAX_CHARACTERS:
            answer = answer.model_copy(update={"text": answer.text[:MAX_CHARACTERS], "is_cut": True})
        newest, *others = self._versions
        self._versions = (newest.model_copy(update={"answers": [*newest.answers, answer]}), *others)

    def save(self) -> None:
        """Write them for the next start. Where that fails, the next start has them answered again."""
        try:
            write_atomically(
                self._file, _KeptAnswers(versions=list(self._versions)).model_dump_json().encode()
            )
        except Exception as error:  # noqa: BLE001 (a full disk is the hub's to report)
            log.warning("the answers of the newest version are not kept: %s", error)

    def rows(self) -> list[dict[str, Any]]:
        """For each prompt, who answered what, the newest version first."""
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
