"""Follow a hub: verify its ledger against signed heads, and fetch the public objects that its versions refer to.

A hub that shows two ledgers, an older ledger or a different key is no longer followed. Verified data is kept; the
contradicting heads are stored in the home's ``proofs/``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from gym_client.agent.pauses import DiskRoom
from gym_client.base.fetching import read_listing
from gym_client.base.offer import BaseOffer
from gym_client.display import Display
from gym_client.hub.backoff import Outage, retry_at_known_hub
from gym_client.hub.transfers import ObjectCache, download
from gym_client.hub.transport import HubClient
from gym_client.ledger.copy import LedgerCopy, LedgerVariant
from gym_client.variants import list_public
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder
from gym_fed.core.text import counted
from gym_fed.trust.identity.history import History
from gym_fed.trust.identity.variant import SignedVariant
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.ledger.export import verify_file
from gym_fed.trust.ledger.lineage import VERSION
from gym_fed.trust.mirrors.folder import MirrorContent, MirrorFolder
from gym_fed.trust.wire.v1 import hub_pb2 as pb

FOLLOW_SECONDS = 5.0
"""Polling interval in seconds."""
_RECENT = 64
"""Number of versions for which additive soups are kept; contributors who missed more versions fetch the sum."""
HALTS = frozenset(
    {
        ErrorCode.LEDGER_FORKED,
        ErrorCode.STATE_CORRUPT,
        ErrorCode.HUB_RESTORED,
        ErrorCode.SERVER_KEY_CHANGED,
        ErrorCode.SIGNATURE_INVALID,
    }
)
"""Errors after which the hub is no longer followed."""


class Follower:
    """Updates a mirror's folder from a hub.

    Args:
        folder: The mirror's folder.
        client: Client of the hub, which uses the mirror folder's home and is enrolled on the hub.
        display: Displays what is fetched, and outages.
        stop: Event that ends ``follow``.
    """

    def __init__(
        self, folder: MirrorFolder, client: HubClient, display: Display, stop: threading.Event
    ) -> None:
        self._folder, self._client, self._display, self._stop = folder, client, display, stop
        self._outage = Outage(display)
        self._room = DiskRoom(client.home, display, stop)
        self._cache = ObjectCache(folder.objects)
        self._facts: _PublicFacts | None = None
        self._base: dict[str, int] | None = None

    def follow(self) -> None:
        """Follow the hub until ``stop`` is set.

        Raises:
            GymError: An error in ``HALTS``, after it is recorded in the folder; ``INTERRUPTED``.
        """
        while not self._stop.is_set():
            try:
                self._room.needed(self.take)
            except GymError as error:
                if error.code in HALTS:
                    self._halt(error)
                raise
            self._stop.wait(FOLLOW_SECONDS)

    def take(self) -> MirrorContent:
        """Update the folder to the hub's newest head, and return the content that may be served."""
        status = self._retrying(self._client.status)
        key = bytes.fromhex(self._client.pin.ledger_key)
        copy = LedgerCopy(self._client.home, key)
        head = self._retrying(lambda: copy.sync(self._client))
        if self._facts is None or self._facts.entries != head.size:
            facts = _PublicFacts()
            verify_file(copy.path, key, facts)
            self._facts = facts
        variants = self._retrying(lambda: list(self._variants(copy, key)))
        make_folder(self._folder.objects)
        named = {**self._base_files(status), **self._facts.objects(status.version_digest)}
        named |= {v.manifest.delta_sha256: v.manifest.size_bytes for _, v in variants}
        named = {sha256: size for sha256, size in named.items() if self._fetch(sha256, size)}
        content = MirrorContent(
            server=self._client.pin.server,
            ledger_key=key.hex(),
            hub=str(self._client.address),
            entries=head.size,
            objects=named,
            variants=[
                info.SerializeToString(deterministic=True).hex()
                for info, signed in variants
                if signed.manifest.delta_sha256 in named
            ],
        )
        if content != self._folder.content():
            self._folder.put(content)
            self._display.report(
                "mirror",
                f"{counted(len(named), 'object')}, {counted(head.size, 'entry')}",
                **_counts(content),
            )
        self._drop_others(named)
        return content

    def _fetch(self, sha256: str, size: int) -> bool:
        """Fetch an object. Return False if the hub no longer has it, or if it is no longer public."""
        if self._cache.has(sha256, size):
            return True

        def bring() -> Any:
            return download(self._client, self._cache, sha256, size, should_stop=self._stop.is_set)

        try:
            self._retrying(bring)
        except GymError as error:
            if error.code not in (ErrorCode.NOT_FOUND, ErrorCode.PERMISSION_DENIED):
                raise
            self._display.report("mirror", f"object {sha256[:12]} is not served: {error.message}")
            return False
        return True

    def _base_files(self, status: pb.StatusReply) -> dict[str, int]:
        """Return the size of each file of the base that the hub serves to its contributors, by sha256."""
        if self._base is None:
            offer, found = BaseOffer.of(status), dict[str, int]()
            if offer is not None and offer.num_files:
                listing = self._retrying(lambda: read_listing(self._client))
                listing.require(offer.listing_sha256, offer.size_bytes)
                found = {file.sha256: file.size_bytes for file in listing.files}
            self._base = found
        return self._base

    def _variants(self, copy: LedgerCopy, key: bytes) -> Iterator[tuple[pb.VariantInfo, SignedVariant]]:
        """Yield the public variants whose newest revision is recorded in the ledger under their owner's key."""
        server, records = self._client.pin.server, dict[str, list[LedgerVariant]]()
        history, public = History(server), list[tuple[pb.VariantInfo, SignedVariant, LedgerVariant]]()
        for info, signed in list_public(self._client):
            record = LedgerVariant(server, signed, history)
            records.setdefault(signed.manifest.owner, []).append(record)
            public.append((info, signed, record))
        if not public:
            return

        def visit(entry: Entry, body: dict[str, Any]) -> None:
            history.add(entry.kind, body)
            for record in records.get(str(body.get("contributor")), ()):
                record(entry, body)

        verify_file(copy.path, key, visit)  # one pass over the ledger for all variants
        for info, signed, record in public:
            try:
                record.checked()
            except GymError as error:
                self._display.report("mirror", f"a variant is not served: {error.message}")
                continue
            yield info, signed

    def _drop_others(self, named: dict[str, int]) -> None:
        for path in self._folder.objects.iterdir():
            if path.name.partition(".")[0] not in named:
                path.unlink(missing_ok=True)

    def _halt(self, error: GymError) -> None:
        content = self._folder.content()
        if content is not None:
            reason = f"{error.code.value}: {error.message}"[:2000]
            self._folder.put(content.model_copy(update={"halted": reason}))

    def _retrying(self, action: Callable[[], Any]) -> Any:
        return retry_at_known_hub(self._client, self._stop, self._outage, action)


class _PublicFacts:
    """Ledger visitor that collects the objects that versions refer to."""

    def __init__(self) -> None:
        self.entries = 0
        self._versions: dict[str, dict[str, Any]] = {}

    def __call__(self, entry: Entry, body: dict[str, Any]) -> None:
        """Process the next entry."""
        self.entries = entry.sequence
        if entry.kind == VERSION:
            self._versions[body["digest"]] = body

    def objects(self, current: str) -> dict[str, int]:
        """Return the sizes of the soups that lead to a version, and of its sum, by sha256."""
        found, depth = dict[str, int](), 0
        digest = current
        while (body := self._versions.get(digest)) is not None:
            integers = body.get("integers")
            if integers is not None and not depth:
                found[integers["sum"]] = integers["sum_bytes"]
            if integers is None or depth < _RECENT:
                found[body["soup"]] = body["soup_bytes"]
            digest, depth = body["parent"], depth + 1
        return found


def _counts(content: MirrorContent) -> dict[str, Any]:
    return {
        "entries": content.entries,
        "objects": len(content.objects),
        "bytes": sum(content.objects.values()),
        "variants": len(content.variants),
    }
