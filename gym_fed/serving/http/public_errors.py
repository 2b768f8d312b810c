"""What of an error its caller gets: neither paths of the server nor digests, which its log has instead.

An error about the request itself was written for the caller. Every other one may come from any depth of the server.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.openai.refusals import RequestError, error_body

_log = logging.getLogger(__name__)

_ABOUT_THE_SERVER = frozenset(
    {
        ErrorCode.CONFIG_INVALID,
        ErrorCode.DISK_FULL,
        ErrorCode.FILE_NOT_FOUND,
        ErrorCode.INTERNAL,
        ErrorCode.MODEL_INVALID,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.NOT_WRITABLE,
        ErrorCode.STATE_CORRUPT,
        ErrorCode.STATE_LOCKED,
    }
)
"""Codes whose messages name what the server has on its disk; the caller gets the code's own sentence."""
_PATH = re.compile(r"""\s?\(?(?<![\w/.:])~?(?:[A-Za-z]:)?[/\\][^\s'"(),;]*[^\s'"(),;:.]\)?""")
_DIGEST = re.compile(r"(?:sha256:)?(?<![0-9A-Za-z])c?[0-9a-f]{12,}(?![0-9A-Za-z])")
_REMEMBERED = 256


class PublicErrors:
    """Errors as answers' bodies; for one thread."""

    def __init__(self) -> None:
        self._logged: OrderedDict[str, None] = OrderedDict()

    def body(self, error: GymError) -> dict[str, Any]:
        """OpenAI's form of an error. What it leaves out goes to the log, once for the same text."""
        if isinstance(error, RequestError):
            return error_body(error)
        shown = _without_insides(error)
        if str(shown) != str(error):
            self._log(str(error))
        return error_body(shown)

    def _log(self, text: str) -> None:
        if text not in self._logged:
            _log.warning("an error was shortened for its caller: %s", text)
        self._logged[text] = None
        self._logged.move_to_end(text)
        while len(self._logged) > _REMEMBERED:
            self._logged.popitem(last=False)


def _without_insides(error: GymError) -> GymError:
    if error.code in _ABOUT_THE_SERVER:
        message = "the server failed" if error.code is ErrorCode.INTERNAL else error.code.help.rstrip(".")
        return GymError(error.code, message, "the server's log says more")
    return GymError(error.code, _scrubbed(error.message), _scrubbed(error.hint))


def _scrubbed(text: str) -> str:
    return _DIGEST.sub("...", _PATH.sub(" a file of the server", text)).strip()
