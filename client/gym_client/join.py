"""`gym-client join`, step by step: trust, terms, consent, enrolment, work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from gym_client.address import Address
from gym_client.backoff import patiently
from gym_client.data import load_data
from gym_client.display import Display
from gym_client.home import Home
from gym_client.pins import parse_fingerprint
from gym_client.policy import Policy
from gym_client.transport import HubClient
from gym_client.trust import establish
from gym_client.work import Setup
from gym_fed.errors import ErrorCode, GymError
from gym_fed.identity.invite import parse_invite

if TYPE_CHECKING:
    from gym_client.agent import AgentResult
    from gym_client.offer import Offer

_REMEMBERED = ("data", "data_format", "model", "name")


class Consent:
    """How a person is asked. The command line's asks on the terminal; tests bring their own."""

    def server_key(self, address: Address, fingerprint: str) -> bool:
        """Whether a key that nobody vouches for is the right one."""
        raise NotImplementedError

    def offer(self, offer: Offer) -> bool:
        """Whether to join on these terms."""
        raise NotImplementedError


@dataclass(frozen=True)
class JoinOptions:
    """What the command line says; None leaves it to what was said last time, or to the defaults."""

    server: str | None = None
    invite: str | None = None
    data: Path | None = None
    data_format: str | None = None
    model: str | None = None
    name: str | None = None
    device: str = "auto"
    rounds: int | None = None
    fingerprint: str | None = None
    insecure: bool = False


@dataclass(frozen=True)
class Door:
    """Where to knock, and what was given to vouch for the hub and for the contributor."""

    address: Address
    fingerprint: str | None
    token: str


def find_door(options: JoinOptions) -> Door:
    """Address, fingerprint and token from the options; an invite may stand for all three.

    Raises:
        GymError: ``USAGE`` when there is no address, or two that differ; ``INVITE_INVALID``.
    """
    fingerprint = parse_fingerprint(options.fingerprint) if options.fingerprint else None
    given = Address.parse(options.server) if options.server else None
    text = (options.invite or "").strip()
    if not text.startswith("gym-invite:"):
        if given is None:
            raise GymError(
                ErrorCode.USAGE, "no server given", "pass --server HOST, or --invite with a whole invite"
            )
        return Door(given, fingerprint, text)
    invite = parse_invite(text)
    if fingerprint is not None and fingerprint != invite.fingerprint:
        raise GymError(
            ErrorCode.USAGE,
            f"--fingerprint is {fingerprint}, the invite's is {invite.fingerprint}",
            "leave one away",
        )
    return Door(given or Address(invite.host, invite.port), invite.fingerprint, invite.token)


def join(home: Home, options: JoinOptions, consent: Consent, display: Display) -> AgentResult:
    """Work for a hub, from the first contact to its end. The caller holds the home's lock.

    Raises:
        GymError: ``PERMISSION_DENIED`` when the person declines; ``INTERRUPTED`` after a signal; and whatever trust,
            data, model, policy, enrolment or work refuse.
    """
    from gym_client.agent import Agent
    from gym_client.app import app
    from gym_client.global_model import global_model
    from gym_client.offer import announced, make_offer
    from gym_client.privacy_terms import Promises, check_promises

    door = find_door(options)
    setup, name = _remembered(home, options)
    policy = Policy.load(home.policy_path)
    data = load_data(setup.data, setup.data_format)
    stop = threading.Event()
    with _signals(stop):
        pin = establish(
            home,
            door.address,
            door.fingerprint,
            lambda fingerprint: consent.server_key(door.address, fingerprint),
            options.insecure,
        )
        client = HubClient(home, door.address, pin)

        def away(error: GymError, seconds: float) -> None:
            display.tell("away", f"{error.message}; trying again in {seconds:.0f} s", error=error.to_dict())

        known = bool(pin.server)
        status = patiently(client, stop, away, client.status) if known else client.status()
        recipe, promises = announced(status)[0], Promises.parse(status.privacy_json)
        policy.check_recipe(recipe, status.base_digest)
        check_promises(policy, promises)
        model = global_model(setup.model or status.base_model)
        offer = make_offer(client, status, model, data, setup, name)
        offer.check(policy)
        if not consent.offer(offer):
            raise GymError(ErrorCode.PERMISSION_DENIED, "not joined: the terms were not accepted")
        patiently(client, stop, away, lambda: enter(client, name, door.token))
        _remember(home, setup, options)
        display.tell(
            "joined", f"joined {status.name} as {client.pin.contributor}", contributor=client.pin.contributor
        )
        agent = Agent(
            app,
            home,
            client,
            node_config=_node_config(setup),
            policy=policy,
            announced=recipe,
            promises=promises,
            display=display,
            stop=stop,
        )
        try:
            return agent.run(options.rounds)
        finally:
            display.close()
            client.close()


def enter(client: HubClient, name: str, token: str) -> None:
    """Authenticate, after enrolling where that is still to be done."""
    if client.pin.contributor:
        try:
            client.authenticate()
            return
        except GymError as error:
            if error.code is not ErrorCode.UNAUTHENTICATED:
                raise
    client.enrol(name, token)
    client.authenticate()


def _remembered(home: Home, options: JoinOptions) -> tuple[Setup, str]:
    """What was said now, else last time, else the default."""
    said: dict[str, Any] = home.settings()
    now = {
        "data": str(options.data.expanduser().absolute()) if options.data else None,
        "data_format": options.data_format,
        "model": options.model,
        "name": options.name,
    }
    if now["data"] is not None and now["data_format"] is None:
        said.pop("data_format", None)  # it belonged to another file
    chosen = {key: now[key] if now[key] is not None else said.get(key) for key in _REMEMBERED}
    setup = Setup(
        data=chosen["data"],
        data_format=chosen["data_format"] or "auto",
        model=chosen["model"],
        device=options.device,
    )
    return setup, chosen["name"] or home.key.contributor


def _remember(home: Home, setup: Setup, options: JoinOptions) -> None:
    said = {"data": setup.data, "data_format": setup.data_format, "model": setup.model}
    if options.name:
        said["name"] = options.name
    home.remember(**said)


def _node_config(setup: Setup) -> dict[str, str | bool | int | float]:
    values = {
        "data": setup.data,
        "data-format": setup.data_format,
        "model": setup.model,
        "device": setup.device,
    }
    return {key: value for key, value in values.items() if value is not None}


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks to stop at a checkpoint, the second ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
