"""The steps of `gym-client join`: trust, terms, consent, enrolment, work."""

from __future__ import annotations

import shlex
import ssl
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gym_client.agent.data import Data, load_data
from gym_client.agent.pauses import PolicyStamp
from gym_client.agent.policy import Policy
from gym_client.agent.region import RegionalHub, require_region_can
from gym_client.agent.work import use_threads
from gym_client.cli.join_options import JoinOptions, find_target, node_config_of, remember, remembered
from gym_client.cli.terminal import Consent, signals_set
from gym_client.display import Display, warnings_shown
from gym_client.hub.backoff import Outage, is_passing, retry_at_known_hub, retry_while_away
from gym_client.hub.clock import ClockReport
from gym_client.hub.known import last_address
from gym_client.hub.transport import HubClient
from gym_client.identity.copies import adopt_copy
from gym_client.identity.home import Home
from gym_client.identity.pins import ServerPin
from gym_client.identity.trust import establish, vouching_authority
from gym_client.ledger.restored import with_restores
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb

if TYPE_CHECKING:
    from gym_client.agent.agent import AgentResult
    from gym_client.agent.agreement import Agreement
    from gym_client.agent.global_model import GlobalModel
    from gym_client.cli.costs import RoundTime
    from gym_client.cli.offer import Offer
    from gym_fed.config.hub.task import TrainingRecipe

T = TypeVar("T")


def join(home: Home, options: JoinOptions, consent: Consent, display: Display) -> AgentResult:
    """Join a hub and work for it until it finishes. The caller holds the home's lock.

    Raises:
        GymError: ``PERMISSION_DENIED`` if the user declines; ``INTERRUPTED`` after a signal; errors from any of
            the steps (trust, data, model, policy, enrolment, work).
    """
    stop = threading.Event()
    try:
        with signals_set(stop), warnings_shown(display):
            return _Joining(home, options, consent, display, stop).run()
    finally:
        display.close()


class _Joining:
    """One run of ``join``."""

    def __init__(
        self, home: Home, options: JoinOptions, consent: Consent, display: Display, stop: threading.Event
    ) -> None:
        self._home, self._options = home, options
        self._consent, self._display, self._stop = consent, display, stop
        self._outage = Outage(display)
        self._clock_report = ClockReport(display)
        self._target = find_target(options, last_address(home) if options.server is None else None)
        self._setup, self._name = remembered(home, options)
        # Taken before the file is read, since the user may edit the file while the terms are displayed.
        self._policy_stamp = PolicyStamp.of(home)
        self._policy = Policy.load(home.policy_path)
        self._region = RegionalHub(Path(self._setup.region)) if self._setup.region else None
        self._base_folder = ""

    def run(self) -> AgentResult:
        """Establish trust, get consent, enrol and work until the end."""
        data = self._read_data() if self._region is None else self._region.data()
        if copied := adopt_copy(self._home):
            self._display.report("copied", copied)
        if data.contamination:
            self._display.report("contamination", data.contamination)
        with self._connect() as client:
            client.rates.limit(*self._policy.rates)
            status, offer = self._terms(client, data)
            self._display.busy("")
            agreement = self._agreement(client, status, data)
            if not self._agrees(agreement, offer):
                known = (
                    f"this key is already enrolled; to withdraw: gym-client leave --server {client.address}"
                )
                raise GymError(
                    ErrorCode.PERMISSION_DENIED,
                    "not joined: the terms were not accepted",
                    known if client.pin.contributor else "",
                )
            agreement.keep()
            self._enter(client, status)
            return self._work(client, status, agreement)

    def _read_data(self) -> Data:
        self._display.busy(f"reading {self._setup.data or 'the built-in example'}")
        rows = self._policy.contaminated_rows
        try:
            return load_data(self._setup.data, self._setup.data_format, self._setup.columns, rows)
        except GymError as error:
            if error.code is not ErrorCode.FILE_NOT_FOUND or self._options.data is not None:
                raise
            problem = f"{error.message} (used by the last join from this home)"
            raise GymError(
                error.code, problem, "restore the file, or pass another one with --data FILE"
            ) from error

    def _connect(self) -> HubClient:
        """Connect to the hub and establish trust."""
        address = self._target.address
        self._display.busy(f"contacting {address}")

        def confirm(fingerprint: str) -> bool:
            authority = vouching_authority(address, fingerprint)
            self._display.busy("")
            if authority:
                text = f"{authority} certifies that the following key belongs to {address.host}"
                self._display.report("authority", text, authority=authority, fingerprint=fingerprint)
            return self._consent.server_key(address, fingerprint)

        def trusted_pin() -> ServerPin:
            return establish(self._home, address, self._target.fingerprint, confirm, self._options.insecure)

        def worth_waiting(error: GymError) -> bool:
            return is_passing(error) and not _speaks_no_tls(error)

        if not self._options.wait:
            return HubClient(self._home, address, trusted_pin())
        pin = retry_while_away(self._stop, self._outage, trusted_pin, lambda: None, worth_waiting)
        return HubClient(self._home, address, pin)

    def _terms(self, client: HubClient, data: Data) -> tuple[pb.StatusReply, Offer]:
        """Fetch the terms and check them against the policy.

        Before consent, only files that the contributor named are read.
        """
        self._display.busy(f"requesting the terms of {client.address}")
        status: pb.StatusReply = self._with_restores(client, lambda: self._retrying(client, client.status))
        self._clock_report.update(client.clocks)
        from gym_client.cli.announced import (
            announced,
            announced_mirrors,
            announced_seeding,
            bytes_to_join,
            rounds_to_come,
        )
        from gym_client.cli.offer import make_offer, require_rows
        from gym_client.mirror.source import Mirrors
        from gym_client.privacy.terms import Promises, check_promises
        from gym_client.seeding.seeding import Seeding
        from gym_client.seeding.store import remove_leftovers

        if client.seeding is None:
            remove_leftovers(self._home)
        recipe, codec = announced(status)
        if self._region is not None:
            self._region.require_root(client.pin.server)
            require_region_can(recipe, codec)
        self._policy.check_recipe(recipe, status.base_digest)
        if self._policy.seeding is not None and (terms := announced_seeding(status)) is not None:
            client.seeding = Seeding(client, self._policy.seeding, terms, self._display)
        if self._policy.mirrors and (mirrors := announced_mirrors(status)):
            client.mirrors = Mirrors(client, mirrors)
        rounds = rounds_to_come(status, self._options.rounds)
        self._policy.check_terms(bytes_to_join(client, status), status.round_download_bytes, rounds)
        check_promises(self._policy, Promises.parse(status.privacy_json))
        if self._region is None:
            require_rows(data, recipe)
        from gym_client.cli.base import BaseFinder

        finder = BaseFinder(
            self._home,
            client,
            status,
            self._policy,
            self._consent,
            self._display,
            self._stop,
            lambda action: self._retrying(client, action),
            lambda: self._enrol(client),
            self._options.rounds,
        )
        model = finder.find(self._setup.model)
        self._base_folder = model.source
        use_threads(self._policy.threads)
        try:
            offer = make_offer(client, status, model, data, self._setup, self._name, self._options.rounds)
            offer.check(self._policy)
            if self._agreement(client, status, data).is_known() or self._consent.accepts_offer(offer):
                return status, offer  # nobody will read its costs
            time = self._round_time(model, recipe, data)
        finally:
            model.release()  # waiting for consent and for the first task may take a long time
        return status, offer.with_costs(time, finder.fetched_bytes, finder.bandwidth)

    def _round_time(self, model: GlobalModel, recipe: TrainingRecipe, data: Data) -> RoundTime:
        from gym_client.cli.costs import RoundTime, time_round

        if self._region is not None:
            return RoundTime(None, "the region's members train")
        self._display.busy("timing a few training steps on this machine; nothing is saved")
        return time_round(model, recipe, data.rows, self._setup.device, self._stop)

    def _agreement(self, client: HubClient, status: pb.StatusReply, data: Data) -> Agreement:
        """Create the agreement from the hub's current terms and those accepted before."""
        from gym_client.agent.agreement import Agreement, Terms
        from gym_client.cli.announced import announced, announced_audit, announced_pay, announced_region

        recipe, codec = announced(status)
        terms = Terms.of(
            client.pin.server,
            status.base_digest,
            recipe,
            codec,
            status.privacy_json,
            data.digest,
            announced_pay(status),
            announced_audit(status),
            client.seeding is not None,
            announced_region(status),
            client.mirrors.addresses if client.mirrors is not None else (),
        )
        home = shlex.quote(str(self._home.folder))
        again = f"gym-client join --server {client.address} --home {home}"
        return Agreement(self._home, terms, self._consent.renewed, self._display, again)

    def _agrees(self, agreement: Agreement, offer: Offer) -> bool:
        """Return True if the terms were accepted before or are accepted now."""
        if agreement.is_known():
            self._display.report("terms", "the terms have not changed since you accepted them")
            return True
        offer = replace(offer, changes=tuple(agreement.news()))
        is_agreed = self._consent.accepts(agreement.name) or self._consent.offer(offer)
        if is_agreed and offer.changes:
            self._display.report("terms", f"accepted: {'; '.join(offer.changes)}")
        return is_agreed

    def _enter(self, client: HubClient, status: pb.StatusReply) -> None:
        self._display.busy(f"enrolling at {client.address}")
        self._enrol(client)
        remember(self._home, self._setup, self._options, client.address)
        joined = f"joined {status.name} as {client.pin.contributor}"
        self._display.report("joined", joined, contributor=client.pin.contributor)

        if client.seeding is not None:
            from gym_client.seeding.base import share_base

            client.seeding.start()
            share_base(client, status, self._base_folder)

    def _enrol(self, client: HubClient) -> None:
        self._with_restores(client, lambda: self._retrying(client, lambda: self._log_in(client)))

    def _work(self, client: HubClient, status: pb.StatusReply, agreement: Agreement) -> AgentResult:
        self._display.busy("loading the trainer")
        from gym_client.agent.agent import Agent
        from gym_client.app import app
        from gym_client.cli.announced import announced
        from gym_client.privacy.terms import Promises

        agent = Agent(
            app,
            self._home,
            client,
            node_config=node_config_of(self._setup),
            policy=self._policy,
            policy_stamp=self._policy_stamp,
            announced=announced(status)[0],
            promises=Promises.parse(status.privacy_json),
            agreement=agreement,
            region=self._region,
            display=self._display,
            clock_report=self._clock_report,
            stop=self._stop,
        )
        begun = False

        def work() -> AgentResult:
            nonlocal begun
            if begun:  # after a restore, the hub may not know the account
                self._retrying(client, lambda: self._log_in(client))
            begun = True
            return agent.run(self._options.rounds)

        result = self._with_restores(client, work)
        if result.finished and self._region is not None:
            self._region.end(client)
        return result

    def _log_in(self, client: HubClient) -> None:
        enter(client, self._name, self._target.token, self._stop.is_set)

    def _with_restores(self, client: HubClient, action: Callable[[], T]) -> T:
        """Run ``action``; repeat it if the hub was restored from a backup and the user accepts that."""
        agrees = self._consent.restored
        return with_restores(self._home, lambda: bytes.fromhex(client.pin.ledger_key), agrees, action)

    def _retrying(self, client: HubClient, action: Callable[[], T]) -> T:
        if not self._options.wait:
            return action()
        return retry_at_known_hub(client, self._stop, self._outage, action)


def _speaks_no_tls(error: GymError) -> bool:
    """Return True if the server does not use TLS, so that waiting would not help."""
    cause = error.__cause__
    return isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError)


def enter(client: HubClient, name: str, token: str, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Authenticate; enrol first if needed."""
    if client.pin.contributor:
        try:
            client.authenticate()
            return
        except GymError as error:
            if error.code is not ErrorCode.UNAUTHENTICATED:
                raise
    client.enrol(name, token, should_stop)
    client.authenticate()
