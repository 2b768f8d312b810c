"""The error class of all packages: a code, a message and a hint.

Exit codes, gRPC status and HTTP status are derived from the code. Exit codes are in ranges: 10 config, 20 data, 30
models, 40 deltas, 50 network, 60 identity, 70 hub, 80 installation, 90 state. This module has no heavy imports.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any


class ErrorCode(Enum):
    """Error codes. The value is sent over the wire.

    Attributes:
        exit_code: Exit status of a command that ends with this error.
        grpc_status: Name of the ``grpc.StatusCode`` (a string, so that this module does not import grpc).
        http_status: HTTP status code.
        help: One sentence that explains the code, printed in the documentation.
    """

    _value_: str
    exit_code: int
    grpc_status: str
    http_status: int
    help: str

    def __new__(cls, value: str, *meaning: Any) -> ErrorCode:
        code = object.__new__(cls)
        code._value_ = value
        code.exit_code, code.grpc_status, code.http_status, code.help = meaning
        return code

    INTERNAL = "internal", 1, "INTERNAL", 500, "A bug in gym-fed; the log has the traceback."
    USAGE = "usage", 2, "INVALID_ARGUMENT", 400, "The command line or the request is invalid."
    CONFIG_INVALID = "config-invalid", 10, "INVALID_ARGUMENT", 422, "A configuration value is refused."
    FILE_NOT_FOUND = "file-not-found", 11, "NOT_FOUND", 404, "A given file does not exist."
    FILE_EXISTS = "file-exists", 12, "ALREADY_EXISTS", 409, "Writing would overwrite an existing file."
    DATA_INVALID = "data-invalid", 20, "INVALID_ARGUMENT", 422, "A dataset row cannot be used."
    MODEL_INVALID = "model-invalid", 30, "INVALID_ARGUMENT", 422, "A model folder cannot be used."
    MODEL_NOT_FOUND = "model-not-found", 31, "NOT_FOUND", 404, "A model is not on this machine."
    EXPORT_DIFFERS = (
        "export-differs",
        32,
        "DATA_LOSS",
        500,
        "The outputs of an exported model differ from those of its source.",
    )
    EXPORT_UNCHECKED = (
        "export-unchecked",
        33,
        "DATA_LOSS",
        500,
        "An exported model could not be compared with its source; it was kept under another name.",
    )
    DELTA_INVALID = "delta-invalid", 40, "INVALID_ARGUMENT", 422, "A .gymdelta file is malformed."
    BASE_MISMATCH = "base-mismatch", 41, "FAILED_PRECONDITION", 409, "A delta was made for another base."
    AUDIT_INVALID = (
        "audit-invalid",
        42,
        "INVALID_ARGUMENT",
        422,
        "The answer to an audit, or its verdict, cannot be used.",
    )
    UNAVAILABLE = "unavailable", 50, "UNAVAILABLE", 503, "The server cannot be reached."
    DEADLINE_EXCEEDED = "deadline-exceeded", 51, "DEADLINE_EXCEEDED", 504, "A call took too long."
    BUSY = "busy", 52, "RESOURCE_EXHAUSTED", 429, "The request queue is full."
    ADDRESS_IN_USE = "address-in-use", 53, "UNAVAILABLE", 503, "Another process listens on the address."
    PROTOCOL_MISMATCH = (
        "protocol-mismatch",
        54,
        "FAILED_PRECONDITION",
        426,
        "The two ends use different protocol versions.",
    )
    QUOTA_EXCEEDED = (
        "quota-exceeded",
        55,
        "RESOURCE_EXHAUSTED",
        429,
        "An account or address uses more than its share.",
    )
    CLOCK_SKEWED = (
        "clock-skewed",
        56,
        "UNAVAILABLE",
        503,
        "The clocks of the two ends differ by more than a signature or a certificate allows.",
    )
    UNAUTHENTICATED = "unauthenticated", 60, "UNAUTHENTICATED", 401, "The caller's key is unknown here."
    PERMISSION_DENIED = "permission-denied", 61, "PERMISSION_DENIED", 403, "The caller may not do this."
    SERVER_KEY_CHANGED = (
        "server-key-changed",
        62,
        "UNAUTHENTICATED",
        401,
        "The server's key is not the pinned one.",
    )
    SIGNATURE_INVALID = "signature-invalid", 63, "PERMISSION_DENIED", 403, "A signature does not verify."
    INVITE_INVALID = "invite-invalid", 64, "PERMISSION_DENIED", 403, "An invite is unknown, used or expired."
    KEY_REVOKED = "key-revoked", 65, "PERMISSION_DENIED", 403, "The key was revoked, or replaced by another."
    KEY_LOCKED = "key-locked", 66, "PERMISSION_DENIED", 403, "A private key's passphrase is missing or wrong."
    TASKS_DIFFER = (
        "tasks-differ",
        67,
        "FAILED_PRECONDITION",
        409,
        "A hub gave participants of one secure round different tasks.",
    )
    TERMS_CHANGED = (
        "terms-changed",
        68,
        "FAILED_PRECONDITION",
        409,
        "A hub changed the terms of its rounds, and the contributor must agree again.",
    )
    NOT_FOUND = "not-found", 70, "NOT_FOUND", 404, "The named thing does not exist on the server."
    TOO_LARGE = "too-large", 71, "RESOURCE_EXHAUSTED", 413, "More bytes than declared or allowed."
    HASH_MISMATCH = "hash-mismatch", 72, "DATA_LOSS", 422, "Bytes do not match the sha256 that names them."
    REPLAYED = "replayed", 73, "ALREADY_EXISTS", 409, "A manifest's nonce was used before."
    STALE = "stale", 74, "FAILED_PRECONDITION", 409, "The update is for an earlier round or base."
    LEASE_LOST = "lease-lost", 75, "FAILED_PRECONDITION", 409, "The task's lease expired or was revoked."
    UPDATE_REFUSED = "update-refused", 76, "FAILED_PRECONDITION", 422, "Admission refused the update."
    POLICY_REFUSED = (
        "policy-refused",
        77,
        "FAILED_PRECONDITION",
        403,
        "The contributor's policy refuses the task.",
    )
    ROUND_ABORTED = "round-aborted", 78, "ABORTED", 409, "The round ended without a soup."
    TRANSFER_REFUSED = "transfer-refused", 79, "FAILED_PRECONDITION", 409, "The transfer is not allowed."
    MISSING_DEPENDENCY = (
        "missing-dependency",
        80,
        "FAILED_PRECONDITION",
        501,
        "An optional package is not installed.",
    )
    STATE_CORRUPT = "state-corrupt", 90, "DATA_LOSS", 500, "State on disk fails verification."
    STATE_LOCKED = "state-locked", 91, "FAILED_PRECONDITION", 409, "Another process uses the same folder."
    LEDGER_FORKED = (
        "ledger-forked",
        92,
        "DATA_LOSS",
        409,
        "A hub's signed ledger contradicts what it signed before.",
    )
    DISK_FULL = "disk-full", 93, "RESOURCE_EXHAUSTED", 507, "No space is left on a disk."
    NOT_WRITABLE = (
        "not-writable",
        94,
        "FAILED_PRECONDITION",
        500,
        "A file or folder cannot be written or read.",
    )
    HUB_RESTORED = (
        "hub-restored",
        95,
        "FAILED_PRECONDITION",
        409,
        "A hub was restored from a backup, which each contributor must accept once.",
    )
    INTERRUPTED = "interrupted", 130, "CANCELLED", 499, "Stopped by the user; can be resumed."
    TERMINATED = "terminated", 143, "CANCELLED", 499, "Stopped by SIGTERM; can be resumed."


class GymError(Exception):
    """An expected failure, shown to the user without a traceback.

    Args:
        code: The error code.
        message: What is wrong and where, with the offending value.
        hint: What the user can do about it; may be empty.
    """

    def __init__(self, code: ErrorCode, message: str, hint: str = "") -> None:
        super().__init__(code, message, hint)  # pass all three, so that the error can be pickled
        self.code = code
        self.message = message
        self.hint = hint

    @property
    def exit_code(self) -> int:
        return self.code.exit_code

    def to_dict(self) -> dict[str, str]:
        """Return the dict for ``--json`` output, gRPC trailers and HTTP bodies."""
        return {"code": self.code.value, "message": self.message, "hint": self.hint}

    @classmethod
    def from_dict(cls, data: dict[str, str]) -> GymError:
        """Rebuild an error from its dict; a code unknown to this version becomes ``INTERNAL``."""
        try:
            code = ErrorCode(data.get("code", ""))
        except ValueError:
            code = ErrorCode.INTERNAL
        return cls(code, str(data.get("message") or "unknown error"), str(data.get("hint") or ""))

    def to_json_line(self) -> str:
        """Return the JSON document that a command with ``--json`` prints to standard error."""
        return json.dumps({"error": self.to_dict()})

    @classmethod
    def last_in(cls, text: str) -> GymError | None:
        """Return the last error in the standard error of a command run with ``--json``; None if there is none.

        The text may also contain warnings and log lines of libraries.
        """
        for line in reversed(text.splitlines()):
            try:
                return cls.from_dict(json.loads(line)["error"])
            except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
                continue
        return None

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


Refusal = tuple[object, str, str | Callable[[], str]] | tuple[object, str]
"""``(applies, reason, remedy)``. Without a remedy, that of the whole table is used. A remedy that is slow to build,
such as the members of a registry, is given as a function."""


def refuse_first(
    *refusals: Refusal,
    code: ErrorCode = ErrorCode.CONFIG_INVALID,
    prefix: str = "",
    suffix: str = "",
    remedy: str = "",
) -> None:
    """Raise the first refusal whose condition is true. All conditions and reasons are evaluated first.

    Args:
        refusals: The refusals in order.
        code: The error's code.
        prefix: Text before every reason.
        suffix: Text after every reason.
        remedy: Remedy for refusals that have none.

    Raises:
        GymError: With the refusal's reason and remedy.
    """
    for applies, reason, *own in refusals:
        if applies:
            hint = own[0] if own else remedy
            text = hint if isinstance(hint, str) else hint()
            raise GymError(code, f"{prefix}{reason}{suffix}", text)


def refuse_set(config: Any, keys: Iterable[str], reason: str, remedy: str = "remove the key") -> None:
    """Refuse a pydantic ``config`` in which one of ``keys`` is neither None nor its default.

    Raises:
        GymError: ``CONFIG_INVALID`` with ``KEY: reason``.
    """
    for key in keys:
        is_set = getattr(config, key) not in (None, type(config).model_fields[key].default)
        refuse_first((is_set, f"{key}: {reason}", remedy))
