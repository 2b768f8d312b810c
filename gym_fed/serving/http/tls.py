"""The server's own TLS: its certificate and key are checked at the start, so that no client finds them unusable."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

from gym_fed.config.serving import TlsConfig
from gym_fed.core.errors import ErrorCode, GymError


def require_usable(tls: TlsConfig) -> None:
    """Refuse files that no connection could be made with.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``CONFIG_INVALID`` naming the file that is no certificate or key, has ended, or
            does not belong to the other; ``KEY_LOCKED`` for a key under a passphrase.
    """
    from gym_fed.trust.identity.tls import validity

    for what, path in (("certificate", tls.certificate), ("key", tls.key)):
        if not path.is_file():
            raise GymError(
                ErrorCode.FILE_NOT_FOUND, f"tls.{what}: no file at {path}", "name a PEM file in serving.yaml"
            )
    try:
        begins, ends = validity(_read(tls.certificate))
    except GymError as error:
        raise _invalid(f"tls.certificate: {tls.certificate} is no PEM certificate") from error
    now = datetime.datetime.now(datetime.UTC)
    if not begins <= now < ends:
        said = f"ended at {ends:%Y-%m-%d %H:%M}" if now >= ends else f"begins at {begins:%Y-%m-%d %H:%M}"
        raise _invalid(f"tls.certificate: {tls.certificate} {said} UTC", "renew it")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: _no_passphrase(tls.key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise _invalid(
                f"tls: {tls.key} is not the key of {tls.certificate}",
                "name the two files that belong together",
            ) from error
        raise _invalid(f"tls: {tls.certificate} and {tls.key} cannot be used: {error.reason}") from error
    except PermissionError as error:
        raise _unreadable(Path(str(error.filename or tls.key))) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except PermissionError as error:
        raise _unreadable(path) from error


def _unreadable(path: Path) -> GymError:
    return GymError(ErrorCode.PERMISSION_DENIED, f"{path} may not be read", "let this user read it")


def _no_passphrase(path: Path) -> str:
    raise GymError(
        ErrorCode.KEY_LOCKED,
        f"tls.key: {path} is under a passphrase",
        "decrypt it (openssl pkey), in a file that only this user may read",
    )


def _invalid(message: str, hint: str = "name PEM files in serving.yaml") -> GymError:
    return GymError(ErrorCode.CONFIG_INVALID, message, hint)
