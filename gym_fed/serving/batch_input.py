"""The input of `gym batch`: OpenAI's batch format, checked completely before anything runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import strict_json

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_LINE_BYTES = 16 << 20
MAX_ID_CHARACTERS = 512
SHOWN_PROBLEMS = 20
SHOWN_MODELS = 20
_KEYS = ("custom_id", "method", "url", "body")

CheckBody = Callable[[str, dict[str, Any]], None]
"""A function that checks a body for its URL; raises a ``GymError``, which may have a ``param``."""


@dataclass(frozen=True)
class BatchRequest:
    """A line of the input."""

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BatchInput:
    """An input file whose lines have all been checked.

    Attributes:
        path: The path of the file.
        sha256: The SHA-256 of its bytes.
        custom_ids: The ids of the requests, in the order of the lines.
        models: The distinct ``body.model`` values, sorted.
    """

    path: Path
    sha256: str
    custom_ids: tuple[str, ...]
    models: tuple[str, ...]

    def requests(self) -> Iterator[BatchRequest]:
        """Read the requests again from the file, one at a time."""
        for number, raw in _lines(self.path):
            yield _parse(number, raw)

    def require_models(self, resolve: Callable[[str], object], known: Callable[[], list[str]]) -> None:
        """Refuse an input with a model name that ``resolve`` does not accept.

        Args:
            resolve: Function that raises for an unknown name.
            known: Function that returns the existing names, for the hint.

        Raises:
            GymError: ``DATA_INVALID`` naming the first line with each such model.
        """
        refused: dict[str, str] = {}
        for name in self.models:
            try:
                resolve(name)
            except GymError as error:
                refused[name] = error.message
        if not refused:
            return
        problems = []
        for request in self.requests():
            if (why := refused.pop(request.body["model"], None)) is not None:
                problems.append(f"line {request.line} (custom_id {request.custom_id!r}): body.model: {why}")
        raise _refused(self.path, problems, f"fix these lines; available models: {_listed(known())}")


class _LineProblem(Exception):
    """Raised for a problem with one line; contains the field that causes it."""

    def __init__(self, field: str, text: str, custom_id: object = None) -> None:
        super().__init__(field, text)
        self.field, self.text, self.custom_id = field, text, custom_id


def check_input(path: Path, check_body: CheckBody) -> BatchInput:
    """Check every line of a file, and refuse the file if any line is invalid.

    Raises:
        GymError: ``FILE_NOT_FOUND``, or ``DATA_INVALID`` naming the number, custom_id and field of each such line.
    """
    digest = hashlib.sha256()
    places: dict[str, int] = {}
    models: set[str] = set()
    problems: list[str] = []
    for number, raw in _lines(path, digest.update):
        try:
            request = _parse(number, raw)
            if (first := places.setdefault(request.custom_id, number)) != number:
                raise _LineProblem("custom_id", f"is also used in line {first}", request.custom_id)
            if request.body.get("stream"):
                raise _LineProblem(
                    "body.stream", "must be false: answers are written to a file", request.custom_id
                )
            try:
                check_body(request.url, request.body)
            except GymError as error:
                field = f"body.{param}" if (param := getattr(error, "param", None)) else "body"
                raise _LineProblem(field, str(error), request.custom_id) from error
            models.add(str(request.body["model"]))
        except _LineProblem as problem:
            named = f" (custom_id {problem.custom_id!r})" if problem.custom_id is not None else ""
            problems.append(f"line {number}{named}: {problem.field}: {problem.text}")
    if problems:
        raise _refused(path, problems)
    if not places:
        raise GymError(ErrorCode.DATA_INVALID, f"{path} has no requests", "write one JSON line per request")
    return BatchInput(path, digest.hexdigest(), tuple(places), tuple(sorted(models)))


def check_body(url: str, body: dict[str, Any]) -> None:
    """Validate a body as the API does; the model's name is looked up later.

    Raises:
        RequestError: For an invalid body, with the field.
    """
    from gym_fed.serving.openai.fields import parse
    from gym_fed.serving.openai.responses import check_response, store_of
    from gym_fed.serving.openai.schemas import (
        CHAT_NEUTRAL,
        COMPLETION_NEUTRAL,
        ChatRequest,
        CompletionRequest,
        EmbeddingRequest,
    )

    if url == "/v1/chat/completions":
        store_of(parse(ChatRequest, body, CHAT_NEUTRAL).store, None, default=False)
    elif url == "/v1/completions":
        parse(CompletionRequest, body, COMPLETION_NEUTRAL)
    elif url == "/v1/responses":
        check_response(body)
    else:
        parse(EmbeddingRequest, body, {})


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN_MODELS]) + (", ..." if len(names) > SHOWN_MODELS else "")


def _refused(path: Path, problems: list[str], hint: str = "fix these lines") -> GymError:
    hidden = len(problems) - SHOWN_PROBLEMS
    shown = [
        f"{path}: nothing was run",
        *problems[:SHOWN_PROBLEMS],
        *([f"and {hidden} more"] if hidden > 0 else []),
    ]
    return GymError(ErrorCode.DATA_INVALID, "\n  ".join(shown), hint)


def _lines(path: Path, seen: Callable[[bytes], None] = lambda raw: None) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines with their numbers; ``seen`` is called with all bytes."""
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                seen(raw)
                if raw.strip() or len(raw) > MAX_LINE_BYTES:
                    yield number, raw
                if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                        seen(rest)
                    seen(rest)
    except OSError as error:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"{path}: {error.strerror}", "use a JSONL file") from error


def _parse(number: int, raw: bytes) -> BatchRequest:
    if len(raw) > MAX_LINE_BYTES:
        raise _LineProblem("line", f"is longer than {MAX_LINE_BYTES} bytes")
    try:
        value = strict_json(raw)
    except ValueError as error:
        raise _LineProblem("line", f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _LineProblem("line", "is not a JSON object")
    custom_id = value.get("custom_id")
    for key in _KEYS:
        if key not in value:
            raise _LineProblem(key, "is missing", custom_id)
    for key in value:
        if key not in _KEYS:
            raise _LineProblem(key, f"is unknown; valid keys are {', '.join(_KEYS)}", custom_id)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARACTERS:
        raise _LineProblem("custom_id", f"must be a string of 1 to {MAX_ID_CHARACTERS} characters", custom_id)
    if value["method"] != "POST":
        raise _LineProblem("method", f"is {value['method']!r}, but must be POST", custom_id)
    if value["url"] not in URLS:
        raise _LineProblem("url", f"is {value['url']!r}, but must be one of {', '.join(URLS)}", custom_id)
    if not isinstance(value["body"], dict):
        raise _LineProblem("body", "must be an object", custom_id)
    return BatchRequest(number, custom_id, value["url"], value["body"])
