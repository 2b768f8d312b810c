"""The options of `gym-client join`, merged with those of the last join, which are stored in the home."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gym_client.agent.work import Setup
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.pins import LAST_SERVER, parse_fingerprint
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import require_utf8
from gym_fed.trust.identity.login import INVITE_SCHEME, find_invite, parse_invite

_REMEMBERED = ("data", "data_format", "columns", "region", "model", "name")


@dataclass(frozen=True)
class JoinOptions:
    """Options of the command. None means the value from the last join, or the default."""

    server: str | None = None
    invite: str | None = None
    data: Path | None = None
    data_format: str | None = None
    columns: str | None = None
    region: Path | None = None
    """Folder of a regional hub, whose merged rounds are sent in place of updates trained on data."""
    model: str | None = None
    name: str | None = None
    device: str = "auto"
    rounds: int | None = None
    fingerprint: str | None = None
    insecure: bool = False
    wait: bool = True
    """True to wait for a hub that is unreachable."""


@dataclass(frozen=True)
class JoinTarget:
    """The hub to join: address, TLS fingerprint and admission token."""

    address: Address
    fingerprint: str | None
    token: str


def find_target(options: JoinOptions, last: Address | None = None) -> JoinTarget:
    """Determine address, fingerprint and token from the options; an invite can provide all three.

    Args:
        options: The command's options.
        last: The hub that this home joined last, used if the options specify none.

    Raises:
        GymError: ``USAGE`` if there is no address, or two different ones; ``INVITE_INVALID``.
    """
    fingerprint = parse_fingerprint(options.fingerprint) if options.fingerprint else None
    address = Address.parse(options.server) if options.server else None
    text = find_invite(options.invite or "")
    if not text.startswith(INVITE_SCHEME):
        address = address or last
        if address is None:
            raise GymError(
                ErrorCode.USAGE, "no server given", "pass --server HOST, or --invite with a complete invite"
            )
        return JoinTarget(address, fingerprint, text)
    invite = parse_invite(text)
    if fingerprint is not None and fingerprint != invite.fingerprint:
        raise GymError(
            ErrorCode.USAGE,
            f"--fingerprint {fingerprint} differs from the invite's fingerprint {invite.fingerprint}",
            "pass only one of them",
        )
    return JoinTarget(
        address or Address.parse(f"{invite.host}:{invite.port}"), invite.fingerprint, invite.token
    )


def remembered(home: Home, options: JoinOptions) -> tuple[Setup, str]:
    """Merge the options with those of the last join and the defaults. Also return the contributor's name."""
    settings: dict[str, Any] = home.settings()
    require_utf8("the name", options.name or "", "choose another with --name")
    require_utf8("the file", options.data or "", "rename it, then pass it with --data")
    require_utf8("the base model", options.model or "", "rename the folder, then pass it with --base")
    if options.region is not None and options.data is not None:
        raise GymError(ErrorCode.USAGE, "--region and --data cannot be used together", "pass one of them")
    now = {
        "region": str(options.region.expanduser().absolute()) if options.region else None,
        "data": str(options.data.expanduser().absolute()) if options.data else None,
        "data_format": options.data_format,
        "columns": options.columns,
        "model": options.model,
        "name": options.name,
    }
    for key in ("data_format", "columns"):
        if now["data"] is not None and now[key] is None:
            settings.pop(key, None)  # the stored value is for a different file
    for given, other in (("data", "region"), ("region", "data")):
        if now[given] is not None:
            settings.pop(other, None)
    chosen = {key: now[key] if now[key] is not None else settings.get(key) for key in _REMEMBERED}
    setup = Setup(
        data=chosen["data"],
        data_format=chosen["data_format"] or "auto",
        columns=chosen["columns"],
        model=chosen["model"],
        device=options.device,
        region=chosen["region"],
    )
    return setup, chosen["name"] or home.key.contributor


def remember(home: Home, setup: Setup, options: JoinOptions, address: Address) -> None:
    """Store the options of a join for the next one."""
    settings: dict[str, Any] = {LAST_SERVER: str(address), **asdict(setup)}
    del settings["device"]  # not stored
    if options.name:
        settings["name"] = options.name
    home.remember(**settings)


def node_config_of(setup: Setup) -> dict[str, str | bool | int | float]:
    """Convert the setup to the node config of the Flower app."""
    return {key.replace("_", "-"): value for key, value in asdict(setup).items() if value is not None}
