"""Convert a ``GymError`` to an error in OpenAI's form, for the HTTP server and for batch files."""

from __future__ import annotations

from typing import Any

from gym_fed.core.errors import ErrorCode, GymError

_NAMES = {
    ErrorCode.BUSY: "rate_limit_exceeded",
    ErrorCode.UNAUTHENTICATED: "invalid_api_key",
    ErrorCode.USAGE: "invalid_value",
}
"""Error codes that OpenAI's clients look for; every other code keeps its own name, with underscores."""


class RequestError(GymError):
    """An error about a request, with the field that causes it.

    Args:
        message: The problem.
        param: The field, such as ``messages[0].content``.
        name: OpenAI's ``code``, such as ``unsupported_parameter``; None: derived from ``code``.
        code: The code, which determines the HTTP status.
        hint: The remedy.
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


def unsupported_parameter(param: str, message: str, hint: str = "") -> RequestError:
    """Return the error for a field of OpenAI's API that this server or model does not support."""
    return RequestError(message, param=param, name="unsupported_parameter", hint=hint)


def error_body(error: GymError) -> dict[str, Any]:
    """Return ``{"error": {"message", "type", "param", "code"}}``; the HTTP status is ``error.code.http_status``."""
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
    """Return the same error for a model that does not exist and for one that the caller may not use."""
    return RequestError(
        f"The model {model!r} does not exist, or this key may not use it",
        param="model",
        name="model_not_found",
        code=ErrorCode.NOT_FOUND,
        hint="GET /v1/models lists the models that it may use",
    )


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    return "invalid_request_error" if status < 500 else "server_error"
