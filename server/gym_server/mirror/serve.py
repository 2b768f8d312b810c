"""Run a mirror: a child process follows the hub, and this process serves the verified copy."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from gym_fed.config.hub.sections import LimitsConfig
from gym_fed.core.child_process import module_command, start_process
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, raise_file_limit
from gym_fed.core.portable import on_stop_signals
from gym_fed.trust.identity.tls import create_certificate, fingerprint
from gym_fed.trust.mirrors.folder import MirrorFolder
from gym_fed.trust.wire.limits import server_options
from gym_fed.trust.wire.service import add_hub
from gym_server.mirror.accounts import MirrorAccounts
from gym_server.mirror.service import MirrorService
from gym_server.rpc.auth_interceptor import AuthInterceptor
from gym_server.rpc.connections import ConnectionLimiter, require_free
from gym_server.store.hub_lock import locked_file

log = logging.getLogger("gym_server")

_REFRESH_SECONDS = 1.0
_RESTART_SECONDS = 30.0
"""Delay before an ended follower process is restarted, in seconds."""
_GRACE_SECONDS = 5.0
_STOP_SECONDS = 10.0


def run_mirror(
    out: Path,
    hub: str,
    listen: str,
    known_fingerprint: str | None,
    invite: str | None,
    on_listening: Callable[[int, str], None],
) -> None:
    """Follow a hub and serve its copy until SIGINT or SIGTERM.

    Args:
        out: The mirror's folder, which is created if needed.
        hub: Address of the hub.
        listen: Address to serve on.
        known_fingerprint: Fingerprint of the hub's TLS key; optional with an invite or after it has been pinned.
        invite: Invite for the mirror's account.
        on_listening: Called with the port and the fingerprint of the mirror's own TLS key.

    Raises:
        GymError: ``STATE_LOCKED`` if the folder is in use; ``ADDRESS_IN_USE``; the follower's error if it could not
            start.
    """
    folder = MirrorFolder(out.resolve())
    make_folder(folder.keys, 0o700)
    taken = GymError(ErrorCode.STATE_LOCKED, f"another mirror is running on {out}", "use another folder")
    with locked_file(folder.path / "mirror.lock", taken):
        key, certificate = folder.keys / "tls.key", folder.keys / "tls.crt"
        if not certificate.exists():
            create_certificate(key, certificate)
        require_free(listen)
        command = module_command("gym_client.mirror", "--server", hub, "--out", folder.path)
        if known_fingerprint:
            command += ["--fingerprint", known_fingerprint]
        follower = _FollowerProcess(command, invite)
        follower.start()
        try:
            pair = (key.read_bytes(), certificate.read_bytes())
            asyncio.run(_serve(folder, listen, pair, on_listening, follower))
        finally:
            follower.stop()


async def _serve(
    folder: MirrorFolder,
    listen: str,
    pair: tuple[bytes, bytes],
    on_listening: Callable[[int, str], None],
    follower: _FollowerProcess,
) -> None:
    limits, name = LimitsConfig(), fingerprint(pair[1])
    accounts = MirrorAccounts(name)
    service = MirrorService(folder, accounts)
    service.refresh()
    limiter = ConnectionLimiter(limits.connections_per_address)
    interceptor = AuthInterceptor(accounts, limits, on_call=limiter.called)
    options = server_options(limits.handshake_seconds, raise_file_limit(limits.connections, log))
    server = grpc.aio.server(interceptors=[interceptor], options=options)
    add_hub(service, server)
    port = server.add_secure_port(listen, grpc.ssl_server_credentials([pair]))
    stopping = asyncio.Event()
    on_stop_signals(lambda _: stopping.set())
    await server.start()
    limiter.start(port)
    on_listening(port, name)
    while not stopping.is_set():
        try:
            await asyncio.wait_for(stopping.wait(), _REFRESH_SECONDS)
        except TimeoutError:
            service.refresh()
            follower.restart_if_ended(service.content is not None and service.content.halted != "")
            if follower.failure is not None and service.content is None:
                stopping.set()
    await server.stop(_GRACE_SECONDS)
    limiter.stop()
    if follower.failure is not None and service.content is None:
        raise follower.failure


class _FollowerProcess:
    """The child process that follows the hub.

    Attributes:
        failure: Error of the last process that ended by itself; its message is on standard error.
    """

    def __init__(self, command: list[str], invite: str | None) -> None:
        self._command = command
        self._environment = {**os.environ, **({"GYM_INVITE": invite} if invite else {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._again_at = 0.0
        self.failure: GymError | None = None

    def start(self) -> None:
        """Start the process, which exits when its standard input is closed, and so together with this process."""
        self._process = start_process(
            self._command,
            env=self._environment,
            passphrases=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def restart_if_ended(self, halted: bool) -> None:
        """Restart an ended process after a delay, unless it has a permanent reason to stop following the hub."""
        status = None if self._process is None else self._process.poll()
        if self._process is not None and status is None:
            return
        if self._process is not None:
            self._process, self._again_at = None, time.monotonic() + _RESTART_SECONDS
            if status:
                self.failure = GymError(
                    ErrorCode.UNAVAILABLE,
                    f"the mirror cannot follow the hub (status {status}); the error is above",
                )
        elif not halted and time.monotonic() >= self._again_at:
            self.failure = None
            self.start()

    def stop(self) -> None:
        """Stop the process."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
