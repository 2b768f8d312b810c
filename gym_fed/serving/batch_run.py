"""Run a batch of requests: fill the engine's queue, append answers as they finish, and resume after a stop.

A request without a seed gets one derived from the run's seed and its custom_id, so that a resumed run returns the same
answers as an uninterrupted one. Only complete lines are appended, so the same command resumes after a kill.
``out.jsonl.batch.json``, next to ``out.jsonl``, records the input and the model of the answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.file_lock import LockHeldError, lock
from gym_fed.core.files import drop_torn_line, write_atomically
from gym_fed.core.portable import O_BINARY, opens_folders
from gym_fed.serving.batch_input import BatchInput, BatchRequest
from gym_fed.serving.openai.refusals import error_body

Answer = Callable[[str, dict[str, Any]], dict[str, Any]]
"""A function from URL and body to OpenAI's answer; raises ``GymError``, with ``BUSY`` if the queue is full."""

_LINES_OWN = (ErrorCode.DEADLINE_EXCEEDED,)
"""Server errors that affect only one request. Any other error ends the run, since the next request would also fail."""


@dataclass(frozen=True)
class BatchReport:
    """The progress of a run.

    Attributes:
        total: Number of requests in the input.
        done: Number of requests with an answer or error line, including those from earlier runs.
        failed: Number of done requests that failed.
        resumed: Number of done requests whose line was written before this run.
        prompt_tokens: Prompt tokens of this run.
        completion_tokens: Completion tokens of this run.
        seconds: Seconds since the start of this run.
    """

    total: int
    done: int
    failed: int
    resumed: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.completion_tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """The estimated time left in seconds, from the pace of the requests so far."""
        answered = self.done - self.resumed
        return self.seconds / answered * (self.total - self.done) if answered else None


OnReport = Callable[[BatchReport], None]


@dataclass(frozen=True)
class _Sent:
    request: BatchRequest
    alone: bool


def run_batch(
    given: BatchInput,
    output: BatchOutput,
    answer: Answer,
    *,
    at_once: int,
    seed: int,
    on_report: OnReport = lambda report: None,
    on_stop: Callable[[], None] = lambda: None,
) -> BatchReport:
    """Answer the requests that have no line yet.

    Args:
        given: A checked input.
        output: The output files; lines are appended in order of completion.
        answer: Called from ``at_once`` threads.
        at_once: Maximum number of requests that run or wait in the engine's queue.
        seed: The seed from which missing seeds of requests are derived.
        on_report: Called after every line, and about once a second.
        on_stop: Called when the run ends early; must make active calls of ``answer`` return soon.

    Raises:
        GymError: For an error that affects more than one request.
        KeyboardInterrupt: On Ctrl-C; the written answers stay, and the same call resumes the run.
    """
    began = time.monotonic()
    before = frozenset(output.done)
    prompt_tokens = completion_tokens = 0
    waiting = (request for request in given.requests() if request.custom_id not in before)
    again: deque[BatchRequest] = deque()
    flying: dict[Future[dict[str, Any]], _Sent] = {}
    is_full = False  # True if the engine's queue is full, so that requests wait until one has finished

    def report() -> BatchReport:
        seconds = time.monotonic() - began
        done, failed = len(output.done), output.num_failed
        total, resumed = len(given.custom_ids), len(before)
        return BatchReport(total, done, failed, resumed, prompt_tokens, completion_tokens, seconds)

    with ExitStack() as stack:
        pool = ThreadPoolExecutor(at_once, thread_name_prefix="gym-batch")
        stack.callback(pool.shutdown)
        stack.push(lambda kind, error, trace: on_stop() if kind is not None else None)
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        while True:
            while len(flying) < at_once and not (is_full and flying):
                request = again.popleft() if again else next(waiting, None)
                if request is None:
                    break
                future = pool.submit(answer, request.url, seeded(request, seed))
                flying[future] = _Sent(request, alone=not flying)
            if not flying:
                return report()
            ended, _ = wait(flying, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in ended:
                sent = flying.pop(future)
                error = future.exception()
                if isinstance(error, GymError) and error.code is ErrorCode.BUSY and not sent.alone:
                    again.append(sent.request)
                    is_full = True
                    continue
                if error is not None and not _is_own(error):
                    raise error
                body = error_body(error) if isinstance(error, GymError) else future.result()
                status = error.code.http_status if isinstance(error, GymError) else 200
                output.write(line_of(given, sent.request, status, body), failed=error is not None)
                usage = body.get("usage") or {}
                prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
                completion_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
                failpoint("batch-line")
                on_report(report())
                is_full = False
            if not ended:
                on_report(report())


def _is_own(error: BaseException) -> bool:
    return isinstance(error, GymError) and (error.code.http_status < 500 or error.code in _LINES_OWN)


def seeded(request: BatchRequest, seed: int) -> dict[str, Any]:
    """Return the body with a seed, unless it already has one or its URL does not accept one."""
    if request.body.get("seed") is not None or request.url == "/v1/embeddings":
        return request.body
    digest = hashlib.sha256(f"{seed}\n{request.custom_id}".encode()).digest()
    return {**request.body, "seed": int.from_bytes(digest[:6], "little")}  # 48 bits: exact in any JSON


def line_of(given: BatchInput, request: BatchRequest, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Format an answer or a refusal as a line of OpenAI's output."""
    name = hashlib.sha256(f"{given.sha256}\n{request.custom_id}".encode()).hexdigest()[:24]
    return {
        "id": f"batch_req_{name}",
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
        "error": None,
    }


SYNC_SECONDS = 2.0
"""Seconds between two syncs to disk; a power cut may lose the work in between."""


class BatchOutput:
    """The output files of a run, locked against other processes.

    As a context manager, it leaves no files behind if an error occurs before the first line.

    Args:
        path: The path of the answers, and of the failures if ``errors`` is None.
        errors: The path of the failures; None for ``path``.
        belongs_to: The input and model, as JSON values; the output of a different run is refused unless it is empty.
        custom_ids: The custom ids of the input.

    Attributes:
        done: Ids that already have a line.

    Raises:
        GymError: ``FILE_EXISTS`` for answers of another run, ``STATE_CORRUPT`` for lines that no run wrote,
            ``STATE_LOCKED`` if another process is writing there.
    """

    def __init__(
        self, path: Path, errors: Path | None, *, belongs_to: dict[str, Any], custom_ids: frozenset[str]
    ) -> None:
        self.path = path
        self.errors = errors
        self.done: set[str] = set()
        self.num_failed = 0
        self._description = path.with_name(f"{path.name}.batch.json")
        self._files: list[int] = []
        self._synced = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            begins = self._claim(belongs_to)
            self._answers = self._open(path, custom_ids)
            self._failures = self._open(errors, custom_ids) if errors is not None else self._answers
            if begins and not self.done:
                self._describe(belongs_to)
            elif begins:  # another process has written lines since
                self._require_same(self._described(), belongs_to)
        except BaseException:
            self.close()
            raise

    def write(self, line: dict[str, Any], *, failed: bool) -> None:
        """Append a line, which survives a kill of the process."""
        data = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        file = self._failures if failed else self._answers
        while data:
            data = data[os.write(file, data) :]
        self.done.add(line["custom_id"])
        self.num_failed += failed
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync()

    def pin(self, more: dict[str, Any]) -> None:
        """Record properties of the answers that are known only after the model is loaded.

        Raises:
            GymError: ``FILE_EXISTS`` if there already are answers of another model.
        """
        known = self._described()
        if more.keys() <= known.keys() and self.done:
            self._require_same(known, {**known, **more})
        else:
            self._describe({**known, **more})

    def close(self) -> None:
        """Sync to disk and unlock."""
        if self._files:
            self._sync()
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self.done:
            self._remove()
        self.close()

    def _remove(self) -> None:
        """Remove the files if no request was run."""
        if not opens_folders():  # Windows cannot remove an open file
            self.close()
        for path in (self.path, self.errors, self._description):
            if path is not None:
                path.unlink(missing_ok=True)

    def _claim(self, belongs_to: dict[str, Any]) -> bool:
        """Create the description of the run, or refuse that of a different run.

        Returns:
            True if another run left its description but no lines; it is replaced after the files are locked.
        """
        if self._description.exists():
            known = self._described()
            if not self._has_lines() and any(known.get(key) != belongs_to[key] for key in belongs_to):
                return True
            self._require_same(known, belongs_to)
            return False
        for path in (self.path, self.errors):
            if path is not None and path.exists():
                raise GymError(
                    ErrorCode.FILE_EXISTS,
                    f"{path} already exists, but was not written by a batch run",
                    "choose another file",
                )
        self._describe(belongs_to)
        return False

    def _has_lines(self) -> bool:
        return any(
            path is not None and path.exists() and path.stat().st_size for path in (self.path, self.errors)
        )

    def _require_same(self, known: dict[str, Any], now: dict[str, Any]) -> None:
        for key in now:
            if known.get(key) != now[key]:
                raise GymError(
                    ErrorCode.FILE_EXISTS,
                    f"{self.path} belongs to another run: {key} was {known.get(key)!r}, but is now {now[key]!r}",
                    f"choose another output, or remove {self.path} and {self._description}",
                )

    def _described(self) -> dict[str, Any]:
        try:
            known = json.loads(self._description.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            known = None
        if not isinstance(known, dict):
            raise GymError(
                ErrorCode.STATE_CORRUPT, f"{self._description}: not a JSON object", "choose another output"
            )
        return known

    def _describe(self, belongs_to: dict[str, Any]) -> None:
        text = json.dumps(belongs_to, indent=2, sort_keys=True) + "\n"
        write_atomically(self._description, text.encode())

    def _open(self, path: Path, custom_ids: frozenset[str]) -> int:
        """Lock the file, remove an incomplete last line, and collect the ids of its lines."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | O_BINARY, 0o644)
        self._files.append(file)
        try:
            lock(file)
            if not os.fstat(file).st_nlink:  # the file has been removed since it was opened
                raise LockHeldError
        except LockHeldError as error:
            raise GymError(
                ErrorCode.STATE_LOCKED,
                f"{path}: another process is writing to it",
                "wait for it, or choose another output",
            ) from error
        drop_torn_line(path)
        with path.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                try:
                    line = json.loads(raw)
                    custom_id, response = line["custom_id"], line["response"]
                    status = response["status_code"]
                except (ValueError, RecursionError, KeyError, TypeError) as error:
                    raise GymError(
                        ErrorCode.STATE_CORRUPT, f"{path}: line {number} is not an answer", "remove that line"
                    ) from error
                if custom_id not in custom_ids or custom_id in self.done:
                    problem = "is answered twice" if custom_id in self.done else "is not in the input"
                    raise GymError(
                        ErrorCode.STATE_CORRUPT,
                        f"{path}: line {number}: {custom_id!r} {problem}",
                        "remove that line",
                    )
                self.done.add(custom_id)
                self.num_failed += status != 200
        return file

    def _sync(self) -> None:
        for file in self._files:
            os.fsync(file)
        self._synced = time.monotonic()
