"""Instructions for joining a hub: commands for its coordinator and for contributors."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from gym_fed.config.hub.server import CONFIG_NAME, ServerConfig
from gym_fed.config.schema.endpoint import Endpoint
from gym_fed.core.errors import GymError


def ways_in(folder: Path, config: ServerConfig, fingerprint: str, port: int = 0) -> list[tuple[str, str]]:
    """Return the commands to join, each with a label.

    Args:
        folder: The hub's folder, as the coordinator names it.
        config: The hub's config.
        fingerprint: Fingerprint of the hub's TLS key; empty for plain text.
        port: The hub's port, if the config leaves it open.
    """
    file, address = folder / CONFIG_NAME, _address(config, port)
    if address is None:
        return [("nobody can join yet", f"set advertise: HOST:PORT in {file}, as others reach this machine")]
    plain_text = "" if fingerprint else " --insecure"
    here = Endpoint.parse(address).is_loopback
    friend = "on this machine type" if here else "a friend types"
    if config.enrolment.policy == "invite":
        return [
            ("invite a friend", f"gym-server invites create --dir {shlex.quote(str(folder))}"),
            (friend, f"gym-client join --invite INVITE --data FILE{plain_text}"),
        ]
    known = f" --fingerprint {fingerprint}" if fingerprint else plain_text
    steps = [(friend, f"gym-client join --server {address} --data FILE{known}")]
    if config.enrolment.policy == "allow-list":
        steps.insert(0, ("list a friend", f"what gym-client id prints, under enrolment.allow_list in {file}"))
    return steps


def steps_after_init(folder: Path, config: ServerConfig, fingerprint: str) -> list[tuple[str, str]]:
    """Return the commands that a coordinator runs next, each with a label."""
    return [
        ("serve the hub", f"gym-server run --dir {shlex.quote(str(folder))}"),
        *ways_in(folder, config, fingerprint),
        ("every setting", f"{folder / CONFIG_NAME}, with a comment each"),
    ]


def notes_after_init(config: ServerConfig) -> list[str]:
    """Return notes on consequences of the choices that may be surprising."""
    from gym_fed.base.files import REDISTRIBUTABLE, licence_of
    from gym_fed.base.models import NANO, resolve

    notes = []
    try:
        folder = resolve(config.base_model)
        licence = "" if config.base_model == NANO else licence_of(Path(folder))
        if config.base_model != NANO and config.serve_base == "auto" and licence not in REDISTRIBUTABLE:
            notes.append(
                "the model card names no licence that allows the hub to serve the base: friends need their own copy, "
                "and type --base FOLDER; serve_base: true serves it all the same"
            )
    except GymError as error:
        notes.append(f"the hub cannot run yet: {error.message}; {error.hint}")
    quorum, f = config.rounds.min_contributors, config.soup.num_malicious_nodes
    if f == 0:
        notes.append(
            f"with a quorum of {quorum} nobody can be outvoted, and soup.num_malicious_nodes is 0; "
            "a quorum of 3 outvotes one malicious update"
        )
    if config.gate.heldout is None:
        notes.append("without held-out rows (gate.heldout) each version is kept, better or worse")
    if Endpoint.parse(config.listen, least_port=0).is_loopback:
        notes.append(
            "only this machine reaches the hub; for others: --address HOST:PORT, or `listen` and `advertise`"
        )
    return notes


def way_in(steps: Sequence[tuple[str, str]]) -> str:
    """Return the first step on one line, without the fingerprint, which the client then shows for comparison."""
    label, command = steps[0]
    return f"{label}: {command.partition(' --fingerprint')[0]}"


def _address(config: ServerConfig, port: int) -> str | None:
    """Return the address that others connect to; None if the config has none."""
    if config.advertise is not None:
        return config.advertise
    host, configured = where = Endpoint.parse(config.listen, least_port=0)
    return None if where.is_everywhere or not (configured or port) else f"{host}:{configured or port}"
