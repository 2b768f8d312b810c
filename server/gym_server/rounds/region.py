"""A regional hub: its rounds start from the root's versions, and their result is sent to the root as one update.

The root's version becomes a version of this hub, as one soup on the base that contains the root's integer sum. Members
fetch it like any soup and get exactly the root's weights, and both ledgers name the same digest of the sum. Later
rounds of the region build on it until the root has a newer version. They are then abandoned, as after a rollback, since
the root's version contains what the root merged of them.

Versions are taken over between rounds, on the strategy's thread. ``poll_root`` runs on a different thread and only ends
a round.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection, select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.integer_sum import IntegerSum, require_sum
from gym_fed.trust.identity.keys import server_id
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_fed.trust.regions.exchange import RegionExchange, RegionVersion, RootVersion
from gym_fed.trust.regions.links import ROOT_UPDATE, ROOT_VERSION, receipt_proof
from gym_server.ledger.rows import newest_entry
from gym_server.rounds.recipes import LiveConfig
from gym_server.rounds.soup_record import SoupRecord
from gym_server.rounds.steering import Steering
from gym_server.rounds.versions import head_of, heights_to
from gym_server.state import HubState
from gym_server.store.database import rerun
from gym_server.store.tables import ledger, updates, versions

log = logging.getLogger("gym_server")

NEW_ROOT = "the root has a new version"
"""Reason for ending the current round."""
_POLL_SECONDS = 0.2
_MAX_RECEIPT_CHARS = 64 << 10


@dataclass(frozen=True)
class _TakenOver:
    """The root's version that this hub took over last."""

    version: str
    height: int
    root: str


class Region:
    """The region's side of the exchange with its root.

    Args:
        state: The hub's state.
        live_config: The current config, with ``region``.
        steering: Used to end the current round.
    """

    def __init__(self, state: HubState, live_config: LiveConfig, steering: Steering) -> None:
        self._state, self._live_config, self._steering = state, live_config, steering
        self._exchange = RegionExchange(state.folder)
        self._reported: RegionVersion | None = None
        self._problem = ""

    @classmethod
    def of(cls, state: HubState, live_config: LiveConfig, steering: Steering) -> Region | None:
        """Return the exchange with the root; None for a hub that is not a region."""
        return None if live_config.current.region is None else cls(state, live_config, steering)

    def poll_root(self) -> None:
        """Record receipts, and end the current round if the root has a new version."""
        try:
            self._record_receipts()
            if self._is_new(self._wanted()) and self._steering.skip(NEW_ROOT) is not None:
                log.info("region: %s; the running round ends", NEW_ROOT)
        except GymError as error:
            self._warn(error)

    def may_begin(self, should_stop: Callable[[], bool]) -> bool:
        """Wait until a round may run; return False if the hub stops or the root has no more rounds.

        A round that was interrupted by a restart may continue.
        """
        waiting, current = False, self._state.round_store.current()
        if current is not None and not current.is_over:
            return not should_stop()
        while not should_stop():
            try:
                wanted = self._wanted()
                if wanted is not None and self._is_new(wanted):
                    self._take_over(wanted)
                if wanted is not None:
                    left = self._report(wanted)
                    if wanted.is_last:
                        log.info("region: the root has no more rounds")
                        return False
                    if left > 0:
                        return True
            except GymError as error:
                self._warn(error)
            if not waiting:
                log.info("region: waiting for the root, %s", self._config_root())
                waiting = True
            time.sleep(_POLL_SECONDS)
        return False

    def _config_root(self) -> str:
        region = self._live_config.current.region
        assert region is not None
        return region.root

    def _wanted(self) -> RootVersion | None:
        """Return the root's version from which rounds must start; None before the first.

        Raises:
            GymError: ``CONFIG_INVALID`` for a root other than the config's, to which members agreed; ``BASE_MISMATCH``
                for a different base.
        """
        found = self._exchange.root_version()
        if found is None:
            return None
        if found.root != self._config_root() or server_id(bytes.fromhex(found.root_key)) != found.root:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"the agent works for the root {found.root}, but members agreed to {self._config_root()}",
                f"join the root of the config, or set region.root: {found.root}; members must agree again",
            )
        if found.base_digest != self._state.base.digest:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"the root's base is {found.base_digest}, but this hub's is {self._state.base.digest}",
                "a region and its root need the same base_model",
            )
        return found

    def _is_new(self, wanted: RootVersion | None) -> bool:
        if wanted is None:
            return False
        with self._state.database.reading() as tx:
            held = _taken_over(tx)
            if held is None or (held.version, held.root) != (wanted.version_digest, wanted.root):
                return True
            height = head_of(tx, self._state.base.digest).height
            return held.height != 0 and held.height not in heights_to(tx, height)

    def _take_over(self, wanted: RootVersion) -> None:
        """Make the root's version the current one, in one transaction."""
        path, soup = self._exchange.sum_path(wanted), None
        if path is not None:
            with DeltaFile.open(path, self._state.base) as file:
                total = IntegerSum.of(file)
            require_sum(total, str(wanted.integers))
            integers = {
                "digest": wanted.integers,
                "sum": wanted.sum_sha256,
                "sum_bytes": path.stat().st_size,
            }
            self._state.store.put_file(path)
            soup = SoupRecord(
                str(wanted.sum_sha256), path.stat().st_size, {}, None, None, None, integers=integers
            )
        self._write(wanted, soup)
        log.info("region: rounds start from the root's version %s", wanted.version_digest)

    @rerun
    def _write(self, wanted: RootVersion, soup: SoupRecord | None) -> None:
        with self._state.database.transaction() as tx:
            self._steering.rollback_in(tx, 0, NEW_ROOT)
            height = 0 if soup is None else self._state.round_store.take_over(tx, soup).height
            body = {
                "root": wanted.root,
                "root_key": wanted.root_key,
                "root_round": wanted.root_round,
                "root_size": wanted.root_size,
                "base": wanted.base_digest,
                "version": wanted.version_digest,
                "integers": wanted.integers,
                "height": height,
            }
            self._state.ledger.append(tx, ROOT_VERSION, body)
            self._state.ledger.sign_head(tx)

    def _report(self, wanted: RootVersion) -> int:
        """Write the region's newest version for the agent; return the number of rounds before the region must wait."""
        store, most = self._state.round_store, self._live_config.current.rounds.num_rounds
        with self._state.database.reading() as tx:
            held = _taken_over(tx)
            assert held is not None
            head = head_of(tx, self._state.base.digest)
            own = heights_to(tx, head.height) - heights_to(tx, held.height)
            num_updates, num_examples = _merged_in(tx, own)
        soups = store.soups(head.height)
        last = soups[-1] if soups else None
        made = RegionVersion(
            server=self._state.server,
            base_digest=self._state.base.digest,
            version_digest=head.digest,
            integers=None if last is None else last.integers,
            sum_sha256=None if last is None else last.sum_sha256,
            root_version=wanted.version_digest,
            num_rounds=len(own),
            max_rounds=most,
            num_updates=num_updates,
            num_examples=num_examples,
        )
        if made != self._reported:
            path = None if last is None else self._state.store.local_path(str(last.sum_sha256))
            self._exchange.put_region_version(made, path)
            self._reported = made
        return most - len(own)

    def _record_receipts(self) -> None:
        """Write the root's receipts into the ledger, each once, and delete their files.

        A receipt that the root did not sign is set aside, so that those of a former root do not block the others.
        """
        paths = self._exchange.receipts()
        wanted = self._wanted() if paths else None
        if wanted is None:
            return
        for path in paths:
            try:
                document = self._exchange.receipt(path)
                receipt_proof(document, bytes.fromhex(wanted.root_key))
                if len(json.dumps(document)) > _MAX_RECEIPT_CHARS:
                    raise GymError(ErrorCode.TOO_LARGE, f"{path} is too large for the receipt of an update")
            except GymError as error:
                kept_as = self._exchange.set_aside(path)
                log.error("region: a receipt was not recorded; it is kept as %s: %s", kept_as, error)
                continue
            self._record(wanted, document)
            path.unlink()

    @rerun
    def _record(self, wanted: RootVersion, receipt: dict[str, object]) -> None:
        with self._state.database.transaction() as tx:
            bodies = tx.scalars(select(ledger.c.body).where(ledger.c.kind == ROOT_UPDATE))
            if any(json.loads(body)["update"] == receipt["update"] for body in bodies):
                return
            body = {
                "root": wanted.root,
                "root_key": wanted.root_key,
                "update": receipt["update"],
                "verdict": receipt["verdict"],
                "receipt": receipt,
            }
            self._state.ledger.append(tx, ROOT_UPDATE, body)
            self._state.ledger.sign_head(tx)

    def _warn(self, error: GymError) -> None:
        """Log an error unless it is the same as the last one."""
        if str(error) != self._problem:
            self._problem = str(error)
            log.error("region: %s", error)


def _taken_over(tx: Connection) -> _TakenOver | None:
    row = newest_entry(tx, ROOT_VERSION)
    if row is None:
        return None
    body = json.loads(row.body)
    return _TakenOver(body["version"], body["height"], body["root"])


def _merged_in(tx: Connection, heights: set[int]) -> tuple[int, int]:
    """Return the number of updates merged in these versions, and their contributors' total examples."""
    made = select(versions.c.server_round).where(versions.c.height.in_(heights))
    rows = tx.execute(
        select(updates.c.contributor, updates.c.manifest).where(
            updates.c.server_round.in_(made) & (updates.c.verdict == "merged")
        )
    ).all()
    examples: dict[str, int] = {}
    for row in rows:
        count = UpdateManifest.parse(row.manifest).num_examples
        examples[row.contributor] = max(count, examples.get(row.contributor, 0))
    return len(rows), sum(examples.values())
