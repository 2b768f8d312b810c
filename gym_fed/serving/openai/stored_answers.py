"""Stored answers, which a later request of the same caller may read, continue or delete.

They are kept in memory and lost when the process ends. No key can access another key's answers. Limits are in bytes: if
a key exceeds its own limit, its oldest answers are deleted. Beyond the total limit, answers of the key that stores most
are deleted, so that it never displaces the answers of others.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gym_fed.config.serving import StoredAnswersConfig
from gym_fed.core.errors import ErrorCode
from gym_fed.serving.openai.catalogue import Caller
from gym_fed.serving.openai.refusals import RequestError

Owner = tuple[str, str]
"""The name and digest of a key, since a key that is created again under the same name is a different key."""

_ENTRY_BYTES = 1024
"""Assumed overhead of an answer in bytes, in addition to its text."""


@dataclass(frozen=True)
class StoredAnswer:
    """One stored answer.

    Attributes:
        body: The body of the answer, as JSON.
        messages: The conversation including the answer, without instructions, as JSON.
        until: The time of expiry, in seconds of the store's clock.
    """

    body: bytes
    messages: bytes
    until: float

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.messages) + _ENTRY_BYTES

    def to_dict(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.body)
        return body

    def conversation(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = json.loads(self.messages)
        return messages


class StoredAnswers:
    """The stored answers of all keys; usable from any thread.

    Args:
        config: The limits.
        now: A monotonic clock in seconds.
    """

    def __init__(self, config: StoredAnswersConfig, now: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._now = now
        self._lock = threading.Lock()
        self._owners: dict[Owner, OrderedDict[str, StoredAnswer]] = {}
        self._bytes: dict[Owner, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys together."""
        with self._lock:
            return sum(self._bytes.values())

    def put(self, caller: Caller, answer_id: str, body: dict[str, Any], messages: str = "[]") -> bool:
        """Store an answer; return False if it alone exceeds the key's limit.

        Args:
            caller: The owner.
            answer_id: The id of the answer.
            body: The body of the answer.
            messages: The conversation including the answer, as JSON.
        """
        answer = StoredAnswer(
            json.dumps(body, ensure_ascii=False).encode(),
            messages.encode(),
            self._now() + self.config.keep_seconds,
        )
        if answer.num_bytes > min(self.config.bytes_per_key, self.config.max_bytes):
            return False
        owner = _owner(caller)
        with self._lock:
            self._forget_old()
            self._owners.setdefault(owner, OrderedDict())[answer_id] = answer
            self._bytes[owner] = self._bytes.get(owner, 0) + answer.num_bytes
            while self._bytes[owner] > self.config.bytes_per_key:
                self._drop(owner)
            while sum(self._bytes.values()) > self.config.max_bytes:
                self._drop(max(self._bytes, key=lambda other: (self._bytes[other], other != owner)))
        return True

    def forget_old(self) -> None:
        """Delete expired answers, as do ``put``, ``get`` and ``delete``."""
        with self._lock:
            self._forget_old()

    def get(self, caller: Caller, answer_id: str, prefix: str, param: str | None = None) -> StoredAnswer:
        """Return an answer of this caller.

        Args:
            caller: The owner.
            answer_id: The id of the answer.
            prefix: The prefix of this kind of answer's ids; ids of other kinds are unknown.
            param: The field of the request that has the id.

        Raises:
            RequestError: For an unknown id, or one of another caller: ``NOT_FOUND``, or ``USAGE`` if ``param`` is
                given, as in OpenAI's API.
        """
        with self._lock:
            self._forget_old()
            answer = self._owners.get(_owner(caller), OrderedDict()).get(answer_id)
        if answer is None or not answer_id.startswith(prefix):
            raise _not_stored(answer_id, param)
        return answer

    def delete(self, caller: Caller, answer_id: str, prefix: str) -> None:
        """Delete an answer; arguments and errors are those of ``get``."""
        owner = _owner(caller)
        with self._lock:
            self._forget_old()
            if answer_id not in self._owners.get(owner, {}) or not answer_id.startswith(prefix):
                raise _not_stored(answer_id, None)
            self._drop(owner, answer_id)

    def _forget_old(self) -> None:
        now = self._now()
        for owner in list(self._owners):
            while owner in self._owners and next(iter(self._owners[owner].values())).until <= now:
                self._drop(owner)

    def _drop(self, owner: Owner, answer_id: str | None = None) -> None:
        """Delete one answer, by default the owner's oldest."""
        answers = self._owners[owner]
        dropped = answers.popitem(last=False)[1] if answer_id is None else answers.pop(answer_id)
        self._bytes[owner] -= dropped.num_bytes
        if not answers:
            del self._owners[owner], self._bytes[owner]


def _owner(caller: Caller) -> Owner:
    return caller.name, caller.key_sha256


def _not_stored(answer_id: str, param: str | None) -> RequestError:
    return RequestError(
        f"no answer {answer_id[:80]!r} is stored for this key",
        param=param,
        name="not_found" if param is None else f"{param.removesuffix('_id')}_not_found",
        code=ErrorCode.NOT_FOUND if param is None else ErrorCode.USAGE,
        hint="set store: true; answers are stored for a limited time, at most until the server restarts",
    )
