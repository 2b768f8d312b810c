"""A malicious hub: it copies everything that another hub says, and passes every call on to it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from gym_fed.trust.identity.tls import TLS_NAME, create_certificate
from gym_fed.trust.wire.limits import CHANNEL_OPTIONS
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.wait import SECONDS


class Relay(grpc.GenericRpcHandler):
    """Serves on a port of its own, under its own TLS key, the answers of the hub at ``address``.

    Attributes:
        sessions: The tokens of every login that it passed on, which are now its own to use.
    """

    def __init__(self, folder: Path, address: str, certificate: bytes) -> None:
        folder.mkdir()
        self.fingerprint = create_certificate(folder / "tls.key", folder / "tls.crt")
        self.sessions: list[str] = []
        self._there = grpc.secure_channel(
            address,
            grpc.ssl_channel_credentials(root_certificates=certificate),
            options=[*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", TLS_NAME)],
        )
        self._server = grpc.server(ThreadPoolExecutor(8), options=CHANNEL_OPTIONS)
        self._server.add_generic_rpc_handlers((self,))
        pair = ((folder / "tls.key").read_bytes(), (folder / "tls.crt").read_bytes())
        port = self._server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        self._server.start()
        self.address = f"127.0.0.1:{port}"

    def service(self, details: Any) -> Any:
        def call(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            metadata = [pair for pair in context.invocation_metadata() if pair[0].startswith("gym-")]
            try:
                yield from self._pass_on(details.method, requests, metadata)
            except grpc.RpcError as error:
                context.set_trailing_metadata(error.trailing_metadata() or ())  # type: ignore[attr-defined]
                context.abort(error.code(), error.details())  # type: ignore[attr-defined]

        return grpc.stream_stream_rpc_method_handler(call)

    def _pass_on(self, method: str, requests: Any, metadata: Any) -> Iterator[bytes]:
        for reply in self._there.stream_stream(method)(requests, metadata=metadata, timeout=SECONDS):
            if method.endswith("/Authenticate"):
                self.sessions.append(pb.AuthenticateReply.FromString(reply).session)
            yield reply

    def close(self) -> None:
        self._server.stop(None).wait()
        self._there.close()
