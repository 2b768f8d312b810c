"""`gym api health`: check that the running server of a config answers, for container probes."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated
from urllib.error import HTTPError, URLError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import typer

from gym_fed.core.addresses import host_port
from gym_fed.core.console import AsJson, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import ProbeSeconds
from gym_fed.core.text import plain

_MAX_ANSWER_BYTES = 2000


def health(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file of the server; the defaults of gym api without one.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where the server listens.", show_default="that of the config"
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Check only that the process answers, not that a model is loaded.")
    ] = False,
    timeout: ProbeSeconds = 5.0,
    as_json: AsJson = False,
) -> None:
    """Check that the running server answers: exit code 0 if it does, and its model is loaded."""
    from gym_fed.cli.api.settings import serving_config

    settings = serving_config(config, [])
    host, port = settings.host, settings.port
    if address is not None:
        host, _, number = address.rpartition(":")
        if not host or not number.isdecimal() or not 0 < int(number) < 65536:
            raise GymError(ErrorCode.USAGE, f"--address {address}: not HOST:PORT", "such as 127.0.0.1:8000")
        host, port = host.strip("[]"), int(number)
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    place = host_port(everywhere.get(host, host), port)
    scheme = "http" if settings.tls is None else "https"
    url = f"{scheme}://{place}/{'health' if live else 'ready'}"
    _get(url, None if settings.tls is None else settings.tls.certificate, timeout)
    text = f"the server at {place} answers" + ("" if live else ", and its model is loaded")
    print_result(as_json, {"url": url, "live": True, "ready": None if live else True}, text)


def _get(url: str, certificate: Path | None, timeout: float) -> None:
    """Request a URL; over TLS only the server's own certificate is trusted, whatever host it names.

    Raises:
        GymError: ``UNAVAILABLE`` if there is no answer, or none with status 200.
    """
    context = ssl.create_default_context(cafile=certificate) if certificate else ssl.create_default_context()
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the file may lack the root that signed it
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
    try:
        with opener.open(Request(url), timeout=timeout):
            return
    except HTTPError as error:
        problem = f"{error.code} {plain(error.read(_MAX_ANSWER_BYTES).decode('utf-8', 'replace'), 400)}"
    except (URLError, OSError) as error:
        problem = str(getattr(error, "reason", error))
    raise GymError(ErrorCode.UNAVAILABLE, f"{url}: {problem}", "see the server's log; is it running?")
