"""Runs a batch: as many requests at once as the engine takes, answers written as they come, the rest where it stopped.

Each request without a seed gets one that follows from the run's seed and its custom_id, so that a run that was killed
and continued has the answers of one that was not.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from gym_fed.errors import ErrorCode, GymError
from gym_fed.failpoints import failpoint
from gym_fed.serving.batch_input import BatchInput, BatchRequest
from gym_fed.serving.batch_output import BatchOutput
from gym_fed.serving.openai.refusals import error_body

Answer = Callable[[str, dict[str, Any]], dict[str, Any]]
"""URL and body in, OpenAI's answer out; raises ``GymError``, ``BUSY`` when as many wait as may."""

_LINES_OWN = (ErrorCode.DEADLINE_EXCEEDED,)
"""Server errors that are one request's own. Any other ends the run: the next request would meet it, too."""


@dataclass(frozen=True)
class BatchReport:
    """How far a run is, or came.

    Attributes:
        total: Requests of the input.
        done: With a line, from runs before this one too.
        failed: Of these.
        resumed: Of these, those that had a line before this run.
        prompt_tokens: Of this run.
        completion_tokens: Of this run.
        seconds: Of this run.
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
        """As long as the requests until now suggest."""
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
    """Answer what has no line yet.

    Args:
        given: A checked input.
        output: Where lines go, in order of completion.
        answer: Called from ``at_once`` threads.
        at_once: Requests that run or wait in the engine's queue.
        seed: Of requests that name none.
        on_report: Called after every line, and about once a second.
        on_stop: Makes the calls of ``answer`` that are under way return soon; called when the run ends early.

    Raises:
        GymError: What is not one request's own failure.
        KeyboardInterrupt: On Ctrl-C; what was written stays, and the same call goes on.
    """
    began = time.monotonic()
    before = frozenset(output.done)
    prompt_tokens = completion_tokens = 0
    waiting = (request for request in given.requests() if request.custom_id not in before)
    again: deque[BatchRequest] = deque()
    flying: dict[Future[dict[str, Any]], _Sent] = {}
    is_full = False  # the engine's queue: new requests wait until one has ended

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
                prompt_tokens += usage.get("prompt_tokens", 0)
                completion_tokens += usage.get("completion_tokens", 0)
                failpoint("batch-line")
                on_report(report())
                is_full = False
            if not ended:
                on_report(report())


def _is_own(error: BaseException) -> bool:
    return isinstance(error, GymError) and (error.code.http_status < 500 or error.code in _LINES_OWN)


def seeded(request: BatchRequest, seed: int) -> dict[str, Any]:
    """The body, with a seed where none is given and one means something."""
    if request.body.get("seed") is not None or request.url == "/v1/embeddings":
        return request.body
    digest = hashlib.sha256(f"{seed}\n{request.custom_id}".encode()).digest()
    return {**request.body, "seed": int.from_bytes(digest[:6], "little")}  # 48 bits: exact in any JSON


def line_of(given: BatchInput, request: BatchRequest, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's line of an answer or a refusal."""
    name = hashlib.sha256(f"{given.sha256}\n{request.custom_id}".encode()).hexdigest()[:24]
    return {
        "id": f"batch_req_{name}",
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
        "error": None,
    }
