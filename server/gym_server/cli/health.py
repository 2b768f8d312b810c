"""The `gym-server health` command: check over TLS that a hub serves, for container health probes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gym_fed.core.console import AsJson, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import ProbeSeconds
from gym_server.cli.options import DEFAULT_FOLDER, Folder

_CERTIFICATE = Path("keys", "tls.crt")


def health(
    folder: Folder = DEFAULT_FOLDER,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address of the hub.", show_default="from the config"),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Check only that the process answers, not its database.")
    ] = False,
    timeout: ProbeSeconds = 5.0,
    as_json: AsJson = False,
) -> None:
    """Check that the running hub answers: exit code 0 if it does. Reads the config and the certificate only."""
    endpoint = _endpoint(folder, address)
    _check(folder, endpoint, live, timeout)
    text = f"the hub at {endpoint} answers" + ("" if live else ", and so does its database")
    print_result(as_json, {"address": endpoint, "live": True, "ready": None if live else True}, text)


def _endpoint(folder: Path, address: str | None) -> str:
    """Return the given address, or the config's address as reached from this machine.

    Raises:
        GymError: ``FILE_NOT_FOUND`` if there is no hub; ``CONFIG_INVALID``; ``USAGE`` for an invalid address.
    """
    from gym_fed.config.hub.server import CONFIG_NAME, ServerConfig
    from gym_fed.config.schema.endpoint import Endpoint
    from gym_fed.config.yaml.strict import parse_config, read_config_text

    path = folder / CONFIG_NAME
    if not path.is_file() or not (folder / _CERTIFICATE).is_file():
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"no hub in {folder}", f"create one: gym-server init --dir {folder}"
        )
    if address is None:  # reads one key only, since validating the whole config would import torch
        values, _ = parse_config(path, read_config_text(path))
        address = str(values.get("listen", ServerConfig.model_fields["listen"].default))
        where, code = f"{path}: listen", ErrorCode.CONFIG_INVALID
    else:
        where, code = "--address", ErrorCode.USAGE
    try:
        found = Endpoint.parse(address)
    except ValueError as error:
        raise GymError(code, f"{where}: {error}", "pass --address HOST:PORT") from error
    if not found.is_everywhere:
        return address
    return f"{'[::1]' if ':' in found.host else '127.0.0.1'}:{found.port}"


def _check(folder: Path, address: str, live: bool, timeout: float) -> None:
    """Call ``grpc.health.v1.Health`` over TLS, trusting only the certificate in the hub's folder.

    Raises:
        GymError: ``UNAVAILABLE`` if the hub does not serve.
    """
    import grpc
    from grpc_health.v1 import health_pb2

    from gym_fed.trust.identity.tls import certificate_host
    from gym_fed.trust.wire.errors import from_rpc_error
    from gym_fed.trust.wire.limits import CHANNEL_OPTIONS
    from gym_fed.trust.wire.service import HUB, HealthStub

    pem = (folder / _CERTIFICATE).read_bytes()
    options = [
        *CHANNEL_OPTIONS,
        ("grpc.enable_http_proxy", 0),
        ("grpc.ssl_target_name_override", certificate_host(pem)),
    ]
    credentials = grpc.ssl_channel_credentials(root_certificates=pem)
    with grpc.secure_channel(address, credentials, options=options) as channel:
        request = health_pb2.HealthCheckRequest(service="" if live else HUB.full_name)
        try:
            reply = HealthStub(channel).Check(request, timeout=timeout)
        except grpc.RpcError as error:
            refused = from_rpc_error(error, address)
            if refused.code is ErrorCode.BUSY:  # the hub answers, but limits the calls of this address
                return
            raise GymError(
                ErrorCode.UNAVAILABLE, f"the hub is not healthy: {refused.message}", refused.hint
            ) from error
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise GymError(
            ErrorCode.UNAVAILABLE,
            f"the hub at {address} runs, but its database does not answer",
            "see the hub's log",
        )
