"""Errors of the operating system and the database, mapped to messages with a remedy.

Wherever a full disk, a read-only folder or too many open files occur, a command ends with a two-line error, and a call
to the hub with a status.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from typing import NamedTuple

from gym_quant.registry import MemberError

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain


class _ErrorText(NamedTuple):
    code: ErrorCode
    what: str
    hint: str


_FULL = _ErrorText(
    ErrorCode.DISK_FULL,
    "no space is left on the disk",
    "free some space there, and run the same command again",
)
_READ_ONLY = _ErrorText(
    ErrorCode.NOT_WRITABLE,
    "the disk is read-only",
    "mount it for writing, or use another folder",
)
_FORBIDDEN = _ErrorText(
    ErrorCode.NOT_WRITABLE,
    "permission denied for this user",
    "check its owner and mode (ls -l), or use another folder",
)
_TOO_MANY_FILES = _ErrorText(
    ErrorCode.BUSY, "too many files are open", "raise the limit (ulimit -n), or run fewer tasks at once"
)
_IN_USE = _ErrorText(
    ErrorCode.ADDRESS_IN_USE, "the address is in use", "stop the other process, or change the port"
)
_UNREACHABLE = _ErrorText(
    ErrorCode.UNAVAILABLE, "the remote host cannot be reached", "check the address and the network"
)

_BY_ERRNO: dict[int, _ErrorText] = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL._replace(what="the disk quota is used up"),
    errno.EFBIG: _ErrorText(
        ErrorCode.TOO_LARGE, "the file would be too large", "raise the limit (ulimit -f)"
    ),
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EIO: _ErrorText(
        ErrorCode.NOT_WRITABLE, "the disk reports an error", "see the system's log; the disk may be failing"
    ),
    errno.ENOENT: _ErrorText(ErrorCode.FILE_NOT_FOUND, "there is no such file or folder", "check the path"),
    errno.ENOTDIR: _ErrorText(
        ErrorCode.FILE_NOT_FOUND, "a part of the path is not a folder", "check the path"
    ),
    errno.EISDIR: _ErrorText(ErrorCode.FILE_EXISTS, "it is a folder", "use a file name"),
    errno.EEXIST: _ErrorText(ErrorCode.FILE_EXISTS, "it already exists", "choose another name"),
    errno.ENOTEMPTY: _ErrorText(ErrorCode.FILE_EXISTS, "the folder is not empty", "choose another name"),
    errno.ENAMETOOLONG: _ErrorText(ErrorCode.USAGE, "the name is too long", "choose a shorter one"),
    errno.ELOOP: _ErrorText(ErrorCode.USAGE, "symbolic links form a loop", "check the path"),
    errno.EMFILE: _TOO_MANY_FILES,
    errno.ENFILE: _TOO_MANY_FILES,
    errno.EBUSY: _ErrorText(
        ErrorCode.STATE_LOCKED, "another process is using it", "stop the other process first"
    ),
    errno.ETXTBSY: _ErrorText(
        ErrorCode.STATE_LOCKED, "another process is running it", "stop the other process first"
    ),
    errno.ENOMEM: _ErrorText(
        ErrorCode.BUSY, "no memory is left", "close other programs, or run fewer tasks at once"
    ),
    errno.EADDRINUSE: _IN_USE,
    errno.EADDRNOTAVAIL: _ErrorText(
        ErrorCode.USAGE, "this machine does not have that address", "use one of its addresses, or 127.0.0.1"
    ),
    **dict.fromkeys(
        (
            errno.ECONNREFUSED,
            errno.ECONNRESET,
            errno.ECONNABORTED,
            errno.EHOSTUNREACH,
            errno.ENETUNREACH,
            errno.ETIMEDOUT,
            errno.EPIPE,
        ),
        _UNREACHABLE,
    ),
}

_BY_SQLITE: dict[int, _ErrorText] = {
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_READONLY: _ErrorText(ErrorCode.NOT_WRITABLE, "the database is read-only", _FORBIDDEN.hint),
    sqlite3.SQLITE_CANTOPEN: _ErrorText(
        ErrorCode.NOT_WRITABLE, "the database file cannot be opened", _FORBIDDEN.hint
    ),
    sqlite3.SQLITE_PERM: _FORBIDDEN,
    sqlite3.SQLITE_IOERR: _BY_ERRNO[errno.EIO],
    sqlite3.SQLITE_BUSY: _ErrorText(
        ErrorCode.BUSY, "another process has locked the database for too long", "run the same command again"
    ),
    sqlite3.SQLITE_LOCKED: _ErrorText(
        ErrorCode.BUSY, "another process has locked the database for too long", "run the same command again"
    ),
}

_OS_ERROR = re.compile(r"\(os error (\d{1,4})\)")
"""Pattern of an errno in errors of Rust libraries (safetensors, tokenizers, object stores)."""
_TORCH_WRITE = re.compile(
    r"PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+|basic_ios::clear: iostream error"
)
"""Pattern of torch.save's error for a failed write. It has no errno; the usual cause is a full disk."""

_TORCH_MEMORY = re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory")
_NO_THREADS = _ErrorText(
    ErrorCode.BUSY,
    "no more threads or processes can be started",
    "raise the limit (ulimit -u), or close other programs",
)


def system_error(error: BaseException, *, with_place: bool = True) -> GymError | None:
    """Convert a system failure to a ``GymError``; None if it is not one.

    Args:
        error: Any exception: an OSError, an SQLite error (bare or wrapped by SQLAlchemy), a library's error that
            quotes an errno, a failed write or allocation of torch, a thread that did not start, or an unusable codec
            of another package.
        with_place: Include the file's path. False for errors sent over the wire, which must not reveal local paths.
    """
    if isinstance(error, GymError):
        return error
    if any(isinstance(found, MemberError) for found in (error, error.__cause__)):
        return GymError(
            ErrorCode.MISSING_DEPENDENCY, str(error), "gym doctor lists the members of installed packages"
        )
    origin = getattr(error, "orig", None)
    if isinstance(origin, sqlite3.Error):
        return system_error(origin, with_place=with_place)
    found, place = _refusal(error), ""
    if found is None:
        return None
    if with_place and isinstance(error, OSError) and error.filename is not None:
        place = f"{_name(error.filename)}" + (f" or {_name(error.filename2)}" if error.filename2 else "")
    return GymError(found.code, f"{place}: {found.what}" if place else found.what, found.hint)


def is_panic(error: BaseException) -> bool:
    """Return True if this is the panic of a Rust library (tokenizers), which is not a subclass of ``Exception``."""
    return type(error).__name__ == "PanicException"


def is_disk_full(error: BaseException) -> bool:
    """Return True if the error reports a full disk or an exhausted quota."""
    refusal = _refusal(error)
    return refusal is not None and refusal.code is ErrorCode.DISK_FULL


_REMOTE_STORES = ("obstore", "botocore", "s3fs", "gcsfs", "adlfs", "aiohttp", "paramiko")
"""Packages of remote file systems; each raises its own exceptions."""

_S3_CREDENTIALS = (
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
"""Variables that set credentials, or make them unnecessary. Without them, obstore queries the machine's cloud."""


def _refusal(error: BaseException) -> _ErrorText | None:
    package = type(error).__module__.partition(".")[0]
    if (
        package in _REMOTE_STORES
        and isinstance(error, Exception)
        and not isinstance(error, FileNotFoundError)
    ):
        line = plain(str(error).strip().partition("\n")[0] or type(error).__name__)
        if "S3" in line and not any(name in os.environ for name in _S3_CREDENTIALS):
            return _ErrorText(
                ErrorCode.UNAVAILABLE,
                f"S3: no credentials are in the environment: {line}",
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
            )
        return _ErrorText(
            ErrorCode.UNAVAILABLE,
            f"the remote store: {line}",
            "check its address, the network, and the credentials in the environment",
        )
    if isinstance(error, OSError):
        if error.errno in _BY_ERRNO:
            return _BY_ERRNO[error.errno]
        why = error.strerror or str(error) or type(error).__name__
        code = ErrorCode.INTERNAL if error.filename is None else ErrorCode.NOT_WRITABLE
        return _ErrorText(code, why, "")
    if isinstance(error, sqlite3.Error):
        code_number = getattr(error, "sqlite_errorcode", None)
        if (
            code_number == sqlite3.SQLITE_IOERR_SHMSIZE
        ):  # the shared-memory file of the write-ahead log cannot grow
            return _FULL
        return None if code_number is None else _BY_SQLITE.get(code_number & 0xFF)
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _TORCH_MEMORY.search(str(error))
    ):
        return _BY_ERRNO[errno.ENOMEM]
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return _NO_THREADS
    if isinstance(error, RuntimeError) and _TORCH_WRITE.search(str(error)):
        return _refusal(error.__context__) if isinstance(error.__context__, OSError) else _FULL
    named = _OS_ERROR.search(str(error)) if isinstance(error, Exception) else None
    return None if named is None else _BY_ERRNO.get(int(named[1]))


def _name(file: object) -> str:
    return os.fsdecode(file) if isinstance(file, (str, bytes, os.PathLike)) else str(file)
