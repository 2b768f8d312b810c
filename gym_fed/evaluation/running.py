"""The outcomes of a running evaluation, written line by line so that an interrupted one can be resumed.

Every model has a file, named by a digest of everything that its outcomes depend on. Only the same evaluation, with or
without other models, resumes from it. Each line is one request; a truncated last line is computed again.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.file_lock import lock
from gym_fed.core.files import drop_torn_line, full_disk_named
from gym_fed.evaluation.harness.sources import Outcome, RequestKey
from gym_fed.evaluation.records.document import record_id
from gym_fed.evaluation.scoring.scorer import AnswerResult, Loglikelihood

FOLDER = ".running"


@contextmanager
def evaluation_lock(folder: Path | None, options: Mapping[str, Any]) -> Iterator[None]:
    """Prevent concurrent evaluations with the same options, before a model is loaded.

    Args:
        folder: The folder of records; None disables the check, since nothing is written.
        options: The options that results depend on.

    Raises:
        GymError: ``BUSY``.
    """
    if folder is None:
        yield
        return
    digest = hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest()
    path = folder / FOLDER / f"options-{digest[:32]}.lock"
    try:
        lock = _locked(path)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS):
            raise
        yield  # reading records still works; ``RunningFile`` refuses to write
        return
    with lock:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


class RunningFile:
    """The outcomes of one evaluation. Use as a context manager; ``remove`` a model after its results are written.

    Args:
        folder: The folder of records; None keeps outcomes in memory only.
        identities: The identity of every model, by its name in the scorer.

    Attributes:
        outcomes: Outcomes by model and request, including those of earlier runs.

    Raises:
        GymError: ``BUSY`` while another process runs the same evaluation; ``STATE_CORRUPT`` for a damaged line.
    """

    def __init__(self, folder: Path | None, identities: Mapping[str, Mapping[str, str]]) -> None:
        self.outcomes: dict[str, dict[RequestKey, Outcome]] = {name: {} for name in identities}
        self._paths: dict[str, Path] = {}
        self._files: dict[str, IO[str]] = {}
        with ExitStack() as stack:
            if folder is not None:
                for name, identity in identities.items():
                    self._paths[name] = folder / FOLDER / f"{record_id(identity)}.jsonl"
                    self._files[name] = stack.enter_context(_locked(self._paths[name]))
                    self._read(name)
            self._stack = stack.pop_all()

    def __enter__(self) -> RunningFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def has(self, key: RequestKey) -> bool:
        """Return True if a request is done under every model."""
        return all(key in outcomes for outcomes in self.outcomes.values())

    def add(self, key: RequestKey, new_outcomes: Mapping[str, Outcome]) -> None:
        """Write a request's outcomes to the operating system's buffers, which survive a kill of this process."""
        for name, outcomes in self.outcomes.items():
            if key in outcomes:
                continue
            if (file := self._files.get(name)) is not None:
                with full_disk_named(self._paths[name]):
                    file.write(json.dumps({"key": list(key), "found": _plain(new_outcomes[name])}) + "\n")
                    file.flush()
            outcomes[key] = new_outcomes[name]
        failpoint("evaluated-request")

    def remove(self, name: str) -> None:
        """Delete the file of a model whose results are written."""
        if name in self._paths:
            self._paths[name].unlink(missing_ok=True)

    def _read(self, model: str) -> None:
        path, outcomes = self._paths[model], self.outcomes[model]
        drop_torn_line(path)
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    row = json.loads(line)
                    task, place, index, repetition = row["key"]
                    key = (str(task), int(place), int(index), int(repetition))
                    outcomes[key] = _outcome(row["found"])
                except (ValueError, RecursionError, KeyError, TypeError) as error:
                    raise GymError(
                        ErrorCode.STATE_CORRUPT,
                        f"{path}: line {number} is damaged",
                        "remove the file: the evaluation then starts again",
                    ) from error


def _locked(path: Path) -> IO[str]:
    """Open and lock a file for appending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8")
    try:
        lock(file)
    except OSError as error:
        file.close()
        raise GymError(
            ErrorCode.BUSY,
            f"another process runs this evaluation; its file is {path}",
            "wait until it ends, and run the same command again; or use another folder with --output",
        ) from error
    return file


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
        outcome.thought,
        outcome.is_unfinished,
    ]


def _outcome(value: Any) -> Outcome:
    kind, *fields = value
    if kind == "l":
        logprob, is_greedy, cut = fields
        return Loglikelihood(float(logprob), bool(is_greedy), int(cut))
    text, ids, reason, cut, margins, thought, is_unfinished = fields
    return AnswerResult(
        str(text),
        tuple(int(item) for item in ids),
        str(reason),
        int(cut),
        tuple(float(item) for item in margins),
        str(thought),
        bool(is_unfinished),
    )
