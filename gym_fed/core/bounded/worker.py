"""The child process that answers requests: one JSON object per line on standard input, one line of output for each.

``gym_fed.core.bounded.pool`` starts it. It has no secrets, opens no network connection and writes no file.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from gym_fed.core.bounded import pool
from gym_fed.core.bounded.errors import MEMORY_BYTES, OUTPUT_CHARS, LimitExceededError
from gym_fed.core.errors import GymError

_MAX_ERROR_CHARS = 2000
_MAX_RETURNED_BYTES = 8 * OUTPUT_CHARS


def main() -> None:
    """Answer requests until standard input ends."""
    pool.in_child = True
    with suppress(ImportError):  # imported now, so that the first request's time limit does not include it
        import_module("transformers.utils.chat_template_utils")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    sys.stdout.buffer.write(b"{}\n")
    sys.stdout.buffer.flush()
    _limit_process()
    for line in sys.stdin.buffer:
        try:
            answer = _answer(json.loads(line))
        except MemoryError:
            answer = b'{"limit": "memory"}'
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def _answer(request: dict[str, Any]) -> bytes:
    """Return the reply to one request: ``value``, ``limit``, ``refused``, or ``error`` with its ``message``."""
    _limit_cpu(request["seconds"])
    reply: dict[str, Any]
    try:
        reply = {"value": _function(request["function"])(**request["arguments"])}
    except MemoryError:
        reply = {"limit": "memory"}
    except LimitExceededError as error:
        reply = {"limit": error.limit}
    except GymError as error:
        reply = {"refused": [error.code.value, error.message, error.hint]}
    except Exception as error:  # noqa: BLE001  # a template can raise anything
        kinds = [kind.__name__ for kind in type(error).__mro__[:-2]]
        line = getattr(error, "lineno", None)
        reply = {"error": kinds, "message": _message(error), "line": line}
    text = json.dumps(reply, ensure_ascii=False)
    if len(text) > _MAX_RETURNED_BYTES:
        return b'{"limit": "output"}'
    return text.encode("utf-8", "surrogatepass")


def _message(error: Exception) -> str:
    """Return an error's message without the line number that Jinja appends; the parent's copy appends it again."""
    return str(getattr(error, "message", None) or error)[:_MAX_ERROR_CHARS]


def _function(name: str) -> Callable[..., Any]:
    """Import and return a function that the parent names as ``module:function``."""
    module, _, function = name.partition(":")
    if not module.startswith("gym_fed."):
        raise ValueError(f"{module} is not a module of gym_fed")
    resolved: Callable[..., Any] = getattr(import_module(module), function)
    return resolved


def _limit_process() -> None:
    """Limit the memory, and forbid core dumps and writing files."""
    with suppress(ImportError):  # on Windows only the parent's deadline applies
        import resource

        for kind, most in (
            (resource.RLIMIT_AS, MEMORY_BYTES),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, 0),
        ):
            with suppress(ValueError, OSError):  # macOS refuses RLIMIT_AS
                resource.setrlimit(kind, (most, most))


def _limit_cpu(seconds: float) -> None:
    """Limit the CPU time of one request, in case the parent has died and cannot enforce its deadline."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 2, hard))


if __name__ == "__main__":
    main()
