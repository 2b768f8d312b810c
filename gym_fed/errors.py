"""One error family for every role: a code, a message that names the thing, and a hint that says what to do.

Exit codes, gRPC status and HTTP status all derive from the code, so a refusal reads the same wherever it is
met. Codes stand in ranges: 10 config, 20 data, 30 models, 40 deltas, 50 network, 60 identity, 70 hub, 80
installation, 90 state. This module imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class _Meaning:
    exit_code: int
    grpc: str
    http: int
    help: str


class ErrorCode(Enum):
    """Every way in which gym-fed refuses or fails. The value is what crosses the wire."""

    INTERNAL = "internal"
    USAGE = "usage"
    CONFIG_INVALID = "config-invalid"
    FILE_NOT_FOUND = "file-not-found"
    FILE_EXISTS = "file-exists"
    DATA_INVALID = "data-invalid"
    MODEL_INVALID = "model-invalid"
    MODEL_NOT_FOUND = "model-not-found"
    DELTA_INVALID = "delta-invalid"
    BASE_MISMATCH = "base-mismatch"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline-exceeded"
    BUSY = "busy"
    ADDRESS_IN_USE = "address-in-use"
    PROTOCOL_MISMATCH = "protocol-mismatch"
    QUOTA_EXCEEDED = "quota-exceeded"
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission-denied"
    SERVER_KEY_CHANGED = "server-key-changed"
    SIGNATURE_INVALID = "signature-invalid"
    INVITE_INVALID = "invite-invalid"
    KEY_REVOKED = "key-revoked"
    KEY_LOCKED = "key-locked"
    TASKS_DIFFER = "tasks-differ"
    NOT_FOUND = "not-found"
    TOO_LARGE = "too-large"
    HASH_MISMATCH = "hash-mismatch"
    REPLAYED = "replayed"
    STALE = "stale"
    LEASE_LOST = "lease-lost"
    UPDATE_REFUSED = "update-refused"
    POLICY_REFUSED = "policy-refused"
    ROUND_ABORTED = "round-aborted"
    TRANSFER_REFUSED = "transfer-refused"
    MISSING_DEPENDENCY = "missing-dependency"
    STATE_CORRUPT = "state-corrupt"
    STATE_LOCKED = "state-locked"
    LEDGER_FORKED = "ledger-forked"
    DISK_FULL = "disk-full"
    NOT_WRITABLE = "not-writable"
    HUB_RESTORED = "hub-restored"
    INTERRUPTED = "interrupted"

    @property
    def exit_code(self) -> int:
        """Exit status of a command that ends with this error."""
        return _MEANINGS[self].exit_code

    @property
    def grpc_status(self) -> str:
        """Name of the ``grpc.StatusCode`` (a string, so that this module needs no grpc)."""
        return _MEANINGS[self].grpc

    @property
    def http_status(self) -> int:
        return _MEANINGS[self].http

    @property
    def help(self) -> str:
        """One sentence on what the code means, as the documentation prints it."""
        return _MEANINGS[self].help


_MEANINGS: dict[ErrorCode, _Meaning] = {
    ErrorCode.INTERNAL: _Meaning(1, "INTERNAL", 500, "A defect of gym-fed; the log has the trace."),
    ErrorCode.USAGE: _Meaning(2, "INVALID_ARGUMENT", 400, "The command line or the request is off."),
    ErrorCode.CONFIG_INVALID: _Meaning(10, "INVALID_ARGUMENT", 422, "A configuration value is refused."),
    ErrorCode.FILE_NOT_FOUND: _Meaning(11, "NOT_FOUND", 404, "A file that was named does not exist."),
    ErrorCode.FILE_EXISTS: _Meaning(12, "ALREADY_EXISTS", 409, "Writing would overwrite something."),
    ErrorCode.DATA_INVALID: _Meaning(20, "INVALID_ARGUMENT", 422, "A dataset row cannot be used."),
    ErrorCode.MODEL_INVALID: _Meaning(30, "INVALID_ARGUMENT", 422, "A model folder cannot be used."),
    ErrorCode.MODEL_NOT_FOUND: _Meaning(31, "NOT_FOUND", 404, "A model is not on this machine."),
    ErrorCode.DELTA_INVALID: _Meaning(40, "INVALID_ARGUMENT", 422, "A .gymdelta file is malformed."),
    ErrorCode.BASE_MISMATCH: _Meaning(41, "FAILED_PRECONDITION", 409, "A delta was made for another base."),
    ErrorCode.UNAVAILABLE: _Meaning(50, "UNAVAILABLE", 503, "The server cannot be reached."),
    ErrorCode.DEADLINE_EXCEEDED: _Meaning(51, "DEADLINE_EXCEEDED", 504, "A call took too long."),
    ErrorCode.BUSY: _Meaning(52, "RESOURCE_EXHAUSTED", 429, "As many requests wait as may; try later."),
    ErrorCode.ADDRESS_IN_USE: _Meaning(53, "UNAVAILABLE", 503, "Another process listens on the address."),
    ErrorCode.PROTOCOL_MISMATCH: _Meaning(
        54, "FAILED_PRECONDITION", 426, "The two ends speak different versions of the protocol."
    ),
    ErrorCode.QUOTA_EXCEEDED: _Meaning(
        55, "RESOURCE_EXHAUSTED", 429, "An account or address uses more than its share."
    ),
    ErrorCode.UNAUTHENTICATED: _Meaning(60, "UNAUTHENTICATED", 401, "The caller's key is unknown here."),
    ErrorCode.PERMISSION_DENIED: _Meaning(61, "PERMISSION_DENIED", 403, "The caller may not do this."),
    ErrorCode.SERVER_KEY_CHANGED: _Meaning(
        62, "UNAUTHENTICATED", 401, "The server's key is not the pinned one."
    ),
    ErrorCode.SIGNATURE_INVALID: _Meaning(63, "PERMISSION_DENIED", 403, "A signature does not verify."),
    ErrorCode.INVITE_INVALID: _Meaning(
        64, "PERMISSION_DENIED", 403, "An invite is unknown, used or expired."
    ),
    ErrorCode.KEY_REVOKED: _Meaning(
        65, "PERMISSION_DENIED", 403, "The key was revoked, or replaced by another."
    ),
    ErrorCode.KEY_LOCKED: _Meaning(
        66, "PERMISSION_DENIED", 403, "A private key's passphrase is missing or wrong."
    ),
    ErrorCode.TASKS_DIFFER: _Meaning(
        67, "FAILED_PRECONDITION", 409, "A hub gave participants of one secure round different tasks."
    ),
    ErrorCode.NOT_FOUND: _Meaning(70, "NOT_FOUND", 404, "The named thing does not exist on the server."),
    ErrorCode.TOO_LARGE: _Meaning(71, "RESOURCE_EXHAUSTED", 413, "More bytes than declared or allowed."),
    ErrorCode.HASH_MISMATCH: _Meaning(72, "DATA_LOSS", 422, "Bytes do not have the sha256 that names them."),
    ErrorCode.REPLAYED: _Meaning(73, "ALREADY_EXISTS", 409, "A manifest's nonce was used before."),
    ErrorCode.STALE: _Meaning(
        74, "FAILED_PRECONDITION", 409, "The update is for a round or base that is past."
    ),
    ErrorCode.LEASE_LOST: _Meaning(
        75, "FAILED_PRECONDITION", 409, "The task's lease ended or was taken back."
    ),
    ErrorCode.UPDATE_REFUSED: _Meaning(76, "FAILED_PRECONDITION", 422, "Admission refused the update."),
    ErrorCode.POLICY_REFUSED: _Meaning(
        77, "FAILED_PRECONDITION", 403, "The contributor's policy refuses the task."
    ),
    ErrorCode.ROUND_ABORTED: _Meaning(78, "ABORTED", 409, "The round ended without a soup."),
    ErrorCode.TRANSFER_REFUSED: _Meaning(79, "FAILED_PRECONDITION", 409, "Credits cannot be moved so."),
    ErrorCode.MISSING_DEPENDENCY: _Meaning(
        80, "FAILED_PRECONDITION", 501, "An optional package is not installed."
    ),
    ErrorCode.STATE_CORRUPT: _Meaning(90, "DATA_LOSS", 500, "State on disk fails verification."),
    ErrorCode.STATE_LOCKED: _Meaning(91, "FAILED_PRECONDITION", 409, "Another process uses the same folder."),
    ErrorCode.LEDGER_FORKED: _Meaning(
        92, "DATA_LOSS", 409, "A hub's signed ledger contradicts what it signed before."
    ),
    ErrorCode.DISK_FULL: _Meaning(93, "RESOURCE_EXHAUSTED", 507, "No space is left on a disk."),
    ErrorCode.NOT_WRITABLE: _Meaning(
        94, "FAILED_PRECONDITION", 500, "A file or folder cannot be written or read."
    ),
    ErrorCode.HUB_RESTORED: _Meaning(
        95,
        "FAILED_PRECONDITION",
        409,
        "A hub was restored from a backup, which its contributors accept once.",
    ),
    ErrorCode.INTERRUPTED: _Meaning(130, "CANCELLED", 499, "Stopped by the user; can be resumed."),
}


class GymError(Exception):
    """An expected failure, told to the user without a traceback.

    Args:
        code: Which kind of refusal this is.
        message: What is wrong and where, with the offending value.
        hint: What the reader can do about it; empty when there is nothing to say.
    """

    def __init__(self, code: ErrorCode, message: str, hint: str = "") -> None:
        super().__init__(
            code, message, hint
        )  # all three, so that the error survives a copy between processes
        self.code = code
        self.message = message
        self.hint = hint

    @property
    def exit_code(self) -> int:
        return self.code.exit_code

    def to_dict(self) -> dict[str, str]:
        """The form used by ``--json`` output, gRPC trailers and HTTP bodies."""
        return {"code": self.code.value, "message": self.message, "hint": self.hint}

    @classmethod
    def from_dict(cls, data: dict[str, str]) -> GymError:
        """Rebuild an error that crossed the wire; a code unknown to this version becomes ``INTERNAL``."""
        try:
            code = ErrorCode(data.get("code", ""))
        except ValueError:
            code = ErrorCode.INTERNAL
        return cls(code, str(data.get("message") or "unknown error"), str(data.get("hint") or ""))

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message
