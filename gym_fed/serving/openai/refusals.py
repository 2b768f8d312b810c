"""Errors in OpenAI's form: one mapping from ``GymError`` to the body, for the HTTP server and for batch files."""

from __future__ import annotations

from typing import Any

from gym_fed.core.errors import ErrorCode, GymError

_NAMES = {
    ErrorCode.BUSY: "rate_limit_exceeded",
    ErrorCode.UNAUTHENTICATED: "invalid_api_key",
    ErrorCode.USAGE: "invalid_value",
}
"""What OpenAI's clients look for; every other code keeps its own name, with underscores as theirs have."""


class RequestError(GymError):
    """A request that is refused, with the field it is about.

    Args:
        message: What is wrong.
        param: The field, as ``messages[0].content``.
        name: OpenAI's ``code``, such as ``unsupported_parameter``; None: derived from ``code``.
        code: Decides the HTTP status.
        hint: What to do.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        name: str | None = None,
        code: ErrorCode = ErrorCode.USAGE,
        hint: str = "",
    ) -> None:
        super().__init__(code, message, hint)
        self.param = param
        self.name = name


def error_body(error: GymError) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``; the status beside it is ``error.code.http_status``."""
    name = getattr(error, "name", None) or _NAMES.get(error.code, error.code.value.replace("-", "_"))
    return {
        "error": {
            "message": str(error),
            "type": _kind(error.code.http_status),
            "param": getattr(error, "param", None),
            "code": name,
        }
    }


def model_not_found(model: str) -> RequestError:
    """The same for a model that does not exist and for one that the caller may not use."""
    return RequestError(
        f"The model {model!r} does not exist, or this key may not use it",
        param="model",
        name="model_not_found",
        code=ErrorCode.NOT_FOUND,
        hint="GET /v1/models lists those that it may",
    )


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    return "invalid_request_error" if status < 500 else "server_error"
