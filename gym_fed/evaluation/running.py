"""What is done of an evaluation, appended line by line, so that a killed one goes on where it was.

A file's name is a digest of all that its outcomes depend on, so that another evaluation never continues it. Each line
is one request under every model; the last may be torn, and is then computed again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from gym_fed.errors import ErrorCode, GymError
from gym_fed.evaluation.harness.requests import Outcome, RequestKey
from gym_fed.evaluation.scoring.scorer import AnswerResult, Loglikelihood
from gym_fed.files import drop_torn_line

FOLDER = ".running"


class RunningFile:
    """The outcomes of one evaluation. Use as a context manager; ``remove`` it when the results are written.

    Args:
        folder: Of the records; None keeps outcomes in memory only.
        identities: Of every model, by its name in a scorer.

    Attributes:
        outcomes: By model and request, those of earlier runs too.

    Raises:
        GymError: ``BUSY`` while another process runs the same evaluation; ``STATE_CORRUPT`` for a damaged line.
    """

    def __init__(self, folder: Path | None, identities: Mapping[str, Mapping[str, str]]) -> None:
        self.models = tuple(identities)
        self.outcomes: dict[str, dict[RequestKey, Outcome]] = {name: {} for name in self.models}
        self.path: Path | None = None
        self._file: IO[str] | None = None
        if folder is not None:
            text = json.dumps({name: dict(identities[name]) for name in identities}, sort_keys=True)
            self._open(folder / FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.jsonl")

    def __enter__(self) -> RunningFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def has(self, key: RequestKey) -> bool:
        """Whether a request is done."""
        return key in self.outcomes[self.models[0]]

    def add(self, key: RequestKey, found: Mapping[str, Outcome]) -> None:
        """Keep a request's outcomes; they are with the system on return, so that a kill leaves them."""
        if self._file is not None:
            line = {"key": list(key), "found": {name: _plain(found[name]) for name in self.models}}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        for name in self.models:
            self.outcomes[name][key] = found[name]

    def remove(self) -> None:
        """The results are written: this file is no longer needed."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._file = path, path.open("a", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise GymError(
                ErrorCode.BUSY, "another process runs this evaluation", f"wait for it; its file is {path}"
            ) from error
        drop_torn_line(path)
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                self._read(number, line)

    def _read(self, number: int, line: str) -> None:
        try:
            row = json.loads(line)
            task, place, index, repetition = row["key"]
            key = (str(task), int(place), int(index), int(repetition))
            for name in self.models:
                self.outcomes[name][key] = _outcome(row["found"][name])
        except (ValueError, KeyError, TypeError) as error:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{self.path}: line {number} is damaged",
                "remove the file: it starts anew",
            ) from error


def _plain(outcome: Outcome) -> list[Any]:
    if isinstance(outcome, Loglikelihood):
        return ["l", outcome.logprob, outcome.is_greedy, outcome.cut]
    return [
        "a",
        outcome.text,
        list(outcome.token_ids),
        outcome.finish_reason,
        outcome.cut,
        list(outcome.margins),
    ]


def _outcome(value: Any) -> Outcome:
    kind, *fields = value
    if kind == "l":
        logprob, is_greedy, cut = fields
        return Loglikelihood(float(logprob), bool(is_greedy), int(cut))
    text, ids, reason, cut, margins = fields
    return AnswerResult(
        str(text), tuple(int(one) for one in ids), str(reason), int(cut), tuple(float(one) for one in margins)
    )
