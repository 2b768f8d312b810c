"""The log of a server process on standard error: one line per record, as text or as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from gym_fed.core.console import err
from gym_fed.core.text import plain
from gym_fed.core.tracing import current_trace_id

LogFormat = Literal["text", "json"]

MAX_LOG_LINE = 2000
MAX_LOG_TRACE = 20_000
"""Maximum length of a log line, and of the traceback below it, in characters."""


class LogLine(logging.Formatter):
    """Formats a record as one line, so that untrusted text cannot move the cursor or imitate another record.

    Line breaks inside a message are escaped. A traceback follows on indented lines, which cannot look like a record.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return plain(super().formatMessage(record), MAX_LOG_LINE)

    def formatException(self, ei: Any) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


class JsonLogLine(logging.Formatter):
    """Formats a record as one JSON object: ``at``, ``level``, ``logger``, ``message``; ``trace_id`` and ``exception``
    if there are any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:MAX_LOG_LINE],
        }
        if trace_id := current_trace_id():
            line["trace_id"] = trace_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-MAX_LOG_TRACE:]
        return json.dumps(line)


def _indented(trace: str) -> str:
    return "\n".join("    " + plain(line, MAX_LOG_LINE) for line in trace[-MAX_LOG_TRACE:].splitlines())


def log_to_stderr(levels: Mapping[str, int], log_format: LogFormat = "text") -> None:
    """Write the records of these loggers to standard error, one per line.

    Args:
        levels: The minimum level of each logger.
        log_format: ``json`` applies even if standard error is a terminal.
    """
    from rich.logging import RichHandler

    handler: logging.Handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonLogLine())
    elif err.is_terminal:
        handler = RichHandler(
            console=err, show_path=False, omit_repeated_times=False, log_time_format="%H:%M:%S"
        )
        handler.setFormatter(LogLine("%(message)s"))
    else:
        handler.setFormatter(LogLine("%(asctime)s %(levelname)s %(message)s"))
    # OpenTelemetry logs spans that a receiver did not accept. With JSON, the root logger's lines are JSON too.
    others = {"opentelemetry": logging.WARNING} | ({"": logging.WARNING} if log_format == "json" else {})
    for name, level in {**levels, **others}.items():
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
