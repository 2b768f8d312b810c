"""Run the HTTP server: listen immediately, load the model in the background, and drain on a signal.

After the first Ctrl-C or SIGTERM, new requests get 503, and active ones have 20 seconds by default to finish. After
that, or at a second signal, the remaining requests are cancelled. If the process still does not end, it exits
forcibly, by default 25 seconds after the signal, since supervisors usually kill it after 30.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import shlex
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gym_fed.config.serving import ServingConfig, TlsConfig
from gym_fed.core.addresses import listening_socket, url_of
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.portable import on_stop_signals
from gym_fed.serving.http.app import create_app, with_cors
from gym_fed.serving.http.connections import LimitedServer, Tls
from gym_fed.serving.http.gateway import Gateway
from gym_fed.serving.http.keys import Authenticator, KeyFile
from gym_fed.serving.http.proxies import Proxies
from gym_fed.serving.plain_tokenizer import PlainTokenizer
from gym_fed.serving.setup import Serving, open_serving

DRAIN_SECONDS = 20.0
_GRACE_SECONDS = 2
LEAVE_SECONDS = 5.0
"""Maximum time in seconds from the end of draining to the exit of the process, even if a step or a thread hangs."""

_log = logging.getLogger(__name__)

OnListening = Callable[[str], None]
"""Called with the server's address, ``http://host:port`` (``https`` with TLS), when it accepts connections.

Most requests get 503 until the server is ready."""

OnReady = Callable[[str, Serving], None]
"""Called with the address and the loaded parts, when the server is ready."""

OnDraining = Callable[[int], None]
"""Called with the number of active requests, when draining begins."""


def run_server(
    config: ServingConfig,
    *,
    drain_seconds: float = DRAIN_SECONDS,
    on_listening: OnListening = lambda address: None,
    on_ready: OnReady = lambda address, serving: None,
    on_draining: OnDraining = lambda active: None,
) -> bool:
    """Serve until a signal arrives. Must be called on the main thread.

    Args:
        config: The serving config.
        drain_seconds: Seconds for which active requests may continue after the first signal.
        on_listening: See ``OnListening``.
        on_ready: See ``OnReady``.
        on_draining: See ``OnDraining``.

    Returns:
        True if all active answers were finished.

    Raises:
        GymError: If the model cannot be loaded; errors from ``require_folder`` and ``require_usable``;
            ``ADDRESS_IN_USE``; ``USAGE`` for an address that cannot be bound.
    """
    keys = None if config.api_keys is None else KeyFile(config.api_keys)
    if keys is not None:
        keys.all()  # raise for an unreadable file now, not at the first request
    if config.adapters_folder is not None:
        require_folder(config.adapters_folder)
    if config.tls is not None:
        require_usable(config.tls)
    with listen(config) as listener:
        life = _Life(
            config,
            Authenticator(keys, config.cors_origins),
            listener,
            drain_seconds,
            on_listening,
            on_ready,
            on_draining,
        )
        try:
            return asyncio.run(life.run())
        finally:
            life.end()


class _Life:
    """One run of the server."""

    def __init__(
        self,
        config: ServingConfig,
        authenticator: Authenticator,
        listener: socket.socket,
        drain_seconds: float,
        on_listening: OnListening,
        on_ready: OnReady,
        on_draining: OnDraining,
    ) -> None:
        self._config = config
        self._listener = listener
        self._drain_seconds = drain_seconds
        self._on_listening, self._on_ready, self._on_draining = on_listening, on_ready, on_draining
        self._gateway = Gateway(authenticator, request_timeout_seconds=config.request_timeout_seconds)
        self._address = url_of(listener, "http" if config.tls is None else "https")
        self._draining: asyncio.Task[None] | None = None
        self._finished = True
        self._last_moment = threading.Timer(drain_seconds + LEAVE_SECONDS, _force_exit)
        self._last_moment.daemon = True

    def end(self) -> None:
        """Cancel the forced exit, since the process ends by itself."""
        self._last_moment.cancel()

    async def run(self) -> bool:
        config, tls = self._config, self._config.tls
        self._server = LimitedServer(
            with_cors(create_app(self._gateway), config.cors_origins),
            config.connections,
            None if tls is None else Tls(tls.certificate, tls.key),
            stop_seconds=_GRACE_SECONDS,
            proxies=Proxies(config.root_path, tuple(config.trusted_proxies)),
        )
        give_back = on_stop_signals(lambda _: self._on_signal())
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        watching = asyncio.gather(self._server.connections.watch(), self._gateway.watch())
        loading = self._load()
        self._on_listening(self._address)
        try:
            ends: list[asyncio.Future[Any]] = [serving, loading]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                loading.cancel()
            elif loading.exception() is not None:
                self._server.should_exit = True
            else:
                self._gateway.serving = loading.result()
                self._on_ready(self._address, loading.result())
            await serving
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            try:
                if loading.done() and not loading.cancelled() and loading.exception() is None:
                    await asyncio.to_thread(loading.result().close)
            finally:
                give_back()  # last, so that a signal cannot interrupt closing
        if loading.done() and not loading.cancelled():
            loading.result()  # raise the error of a failed load
        return self._finished

    def _load(self) -> asyncio.Future[Serving]:
        """Load the model in a daemon thread, which does not delay the process's exit."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Serving] = loop.create_future()

        def settle(serving: Serving | None, error: BaseException | None) -> None:
            if future.done():  # the server has stopped meanwhile
                if serving is not None:
                    serving.close()
            elif error is not None:
                future.set_exception(error)
            elif serving is not None:
                future.set_result(serving)

        def load() -> None:
            serving, error = None, None
            try:
                serving = open_serving(self._config)
            except Exception as raised:  # noqa: BLE001  # set on the future
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, serving, error)
            if serving is not None and isinstance(serving.tokenizer, PlainTokenizer):
                serving.tokenizer.warm()

        threading.Thread(target=load, name="gym-api-load", daemon=True).start()
        return future

    def _on_signal(self) -> None:
        if self._draining is None:
            self._last_moment.start()
            self._gateway.draining = True
            self._draining = asyncio.ensure_future(self._drain())
            self._on_draining(self._gateway.active)
        else:
            self._stop()

    async def _drain(self) -> None:
        until = asyncio.get_running_loop().time() + self._drain_seconds
        while self._gateway.active and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)
        self._stop()

    def _stop(self) -> None:
        self._finished = self._finished and not self._gateway.active
        self._gateway.stopped.set()
        self._server.should_exit = True


def _force_exit() -> None:
    _log.error("the server did not stop within %g s after draining; exiting", LEAVE_SECONDS)
    os._exit(ErrorCode.INTERRUPTED.exit_code)


def listen(config: ServingConfig) -> socket.socket:
    """Bind a socket to ``host`` and ``port``.

    Raises:
        GymError: ``ADDRESS_IN_USE`` if another process uses the port; ``USAGE``.
    """
    return listening_socket(config.host, config.port, "use another --port, or 0 for any free port")


def require_folder(adapters_folder: Path) -> None:
    """Refuse an ``adapters_folder`` from which no variant could be added.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``PERMISSION_DENIED``.
    """
    folder = adapters_folder.expanduser()
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise GymError(
            ErrorCode.FILE_NOT_FOUND,
            f"adapters_folder: {folder} {problem}",
            f"create it (mkdir {shlex.quote(str(folder))}), set a different folder, or omit adapters_folder",
        )
    if not os.access(folder, os.R_OK | os.X_OK):
        raise _unreadable(folder)


def require_usable(tls: TlsConfig) -> None:
    """Refuse TLS files that cannot be used for connections.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``CONFIG_INVALID`` naming the file that is not a certificate or key, has expired,
            or does not match the other; ``KEY_LOCKED`` for an encrypted key.
    """
    from gym_fed.trust.identity.tls import validity

    for name, path in (("certificate", tls.certificate), ("key", tls.key)):
        if not path.is_file():
            raise GymError(
                ErrorCode.FILE_NOT_FOUND,
                f"tls.{name}: no file at {path}",
                "set it to a PEM file in serving.yaml",
            )
    try:
        begins, ends = validity(_read(tls.certificate))
    except GymError as error:
        raise _invalid(f"tls.certificate: {tls.certificate} is not a PEM certificate") from error
    now = datetime.datetime.now(datetime.UTC)
    if not begins <= now < ends:
        problem = (
            f"expired at {ends:%Y-%m-%d %H:%M}"
            if now >= ends
            else f"is not valid before {begins:%Y-%m-%d %H:%M}"
        )
        raise _invalid(f"tls.certificate: {tls.certificate} {problem} UTC", "renew it")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: _no_passphrase(tls.key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise _invalid(
                f"tls: key {tls.key} does not match certificate {tls.certificate}",
                "set a key and certificate that match",
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
    return GymError(ErrorCode.PERMISSION_DENIED, f"{path} may not be read", "make it readable for this user")


def _no_passphrase(path: Path) -> str:
    raise GymError(
        ErrorCode.KEY_LOCKED,
        f"tls.key: {path} is encrypted",
        "decrypt it (openssl pkey) into a file that only this user can read",
    )


def _invalid(message: str, hint: str = "set PEM files in serving.yaml") -> GymError:
    return GymError(ErrorCode.CONFIG_INVALID, message, hint)
