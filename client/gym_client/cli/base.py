"""Find a hub's base model: in the contributor's folder, an earlier download, a local copy, or the hub's offer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gym_client.agent.global_model import GlobalModel, base_source, global_model, keep_model, needs_a_look
from gym_client.agent.policy import Policy
from gym_client.base.fetching import differences, fetch_files, read_listing, require_own_weights
from gym_client.base.offer import BaseOffer, require_digest
from gym_client.base.store import BaseStore
from gym_client.cli.announced import bytes_to_join, rounds_to_come
from gym_client.cli.terminal import Consent
from gym_client.display import Display
from gym_client.hub.backoff import Retry
from gym_client.hub.traffic import Bandwidth, DownloadPace, Traffic
from gym_client.hub.transport import HubClient
from gym_client.identity.home import Home
from gym_fed.base.files import check_settings, most_bytes
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.trust.wire.v1 import hub_pb2 as pb

if TYPE_CHECKING:
    from gym_fed.base.downloads import DownloadOffer

_DAMAGED = (ErrorCode.MODEL_NOT_FOUND, ErrorCode.MODEL_INVALID, ErrorCode.BASE_MISMATCH)
_ELSEWHERE = (
    *_DAMAGED,
    ErrorCode.UNAVAILABLE,
    ErrorCode.HASH_MISMATCH,
    ErrorCode.PERMISSION_DENIED,  # a gated model that the coordinator is allowed to share
    ErrorCode.DEADLINE_EXCEEDED,
)
_OWN = "pass the folder of the federation's base with --base PATH"


class _Declined(GymError):
    """Raised when the user declines, so that no other source is tried."""


class BaseFinder:
    """Finds the base named in a hub's status, or fetches it after the user's consent.

    Args:
        home: The home that stores fetched files.
        client: Client of the hub.
        status: Status of the hub.
        policy: Limits on downloads.
        consent: Prompts the user.
        display: Displays progress.
        stop: Event that stops a download.
        retrying: Retries calls while the hub is unreachable.
        log_in: Enrols if needed and opens a session.
        rounds: Number of rounds to take part in; None for all.
    """

    def __init__(
        self,
        home: Home,
        client: HubClient,
        status: pb.StatusReply,
        policy: Policy,
        consent: Consent,
        display: Display,
        stop: threading.Event,
        retrying: Retry,
        log_in: Callable[[], None],
        rounds: int | None,
    ) -> None:
        self._client, self._status, self._policy = client, status, policy
        self._consent, self._display, self._stop = consent, display, stop
        self._retrying, self._log_in, self._rounds = retrying, log_in, rounds
        self._home, self._store = home, BaseStore(home)
        self._pace, self._fetched_bytes = DownloadPace(home, policy.max_download_bytes_per_second), 0
        self._digest = require_digest(status.base_digest)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the base that were fetched in this run; 0 if it was already on this machine."""
        return self._fetched_bytes

    @property
    def bandwidth(self) -> Bandwidth | None:
        """The download bandwidth; None if unknown."""
        return self._pace.bandwidth()

    def find(self, given: str | None) -> GlobalModel:
        """Load and verify the base.

        Args:
            given: Value of ``--base``, from this run or an earlier one; if set, no other source is tried.

        Raises:
            GymError: ``BASE_MISMATCH`` with the differences; ``MODEL_NOT_FOUND`` if the hub offers no base;
                ``PERMISSION_DENIED`` if the user declines; errors from ``fetch_files``.
        """
        named = self._status.base_model
        if given is not None:
            return self._load(given)
        if not needs_a_look(given, named):
            base_source(given, named)
        offer = BaseOffer.of(self._status)
        if (fetched := self._store.find(self._digest)) is not None:
            try:
                return self._load(fetched)
            except GymError as error:
                if error.code not in _DAMAGED:
                    raise
                if not self._store.forget(self._digest):
                    if offer is None or not offer.num_files:
                        raise
                    self._display.report("base-damaged", f"{error.message}; damaged files are fetched again")
                    return self._fetch(offer, again=True)
                self._display.report("base-damaged", error.message)
        if offer is None:
            return self._local_copy(base_source(None, named))
        model = None
        if offer.public_name and not (offer.num_files and self._store.is_begun(self._digest)):
            model = self._public(offer)
        return model or self._fetch(offer, again=False)

    def _public(self, offer: BaseOffer) -> GlobalModel | None:
        """Load the base by its public name, from the local cache or the Hugging Face Hub.

        Returns:
            The model; None if only the hub has the base.
        """
        from gym_fed.base.downloads import ensure_model
        from gym_fed.base.models import is_hub_name

        name = offer.public_name
        if not is_hub_name(name):
            problem = f"the hub's base model is {name!r}, but a local file or folder has the same name"
            raise GymError(ErrorCode.POLICY_REFUSED, problem, _OWN)
        self._ask_for_copy(name)
        try:
            folder = ensure_model(
                name, consent=lambda download: self._agrees(offer, download), report=self._report
            )
            if (folder / "adapter_config.json").is_file():
                raise _adapter(name)
            names = [path.name for path in folder.iterdir() if most_bytes(path.name)]
            check_settings(folder, names)
            require_own_weights(folder, names)
            model = self._load(str(folder))
        except GymError as error:
            if isinstance(error, _Declined) or error.code not in _ELSEWHERE or not offer.num_files:
                raise
            self._display.report("base-elsewhere", f"{error.message}; the hub serves its base itself")
            return None
        self._store.note(self._digest, folder)
        return model

    def _agrees(self, offer: BaseOffer, download: DownloadOffer) -> bool:
        if download.name != offer.public_name or any(
            file.path == "adapter_config.json" for file in download.files
        ):
            raise _adapter(offer.public_name)
        self._check_policy(download.missing_bytes)
        self._display.busy("")
        licence, count = download.licence or "", len(download.files)
        shown = replace(
            offer,
            size_bytes=download.missing_bytes,
            num_files=count,
            licence=licence,
            source=download.describe(),
            duration=self._pace.duration(download.missing_bytes),
        )
        if not self._consent.base(shown):
            raise _Declined(
                ErrorCode.PERMISSION_DENIED, "not joined: you declined the download of the base", _OWN
            )
        self._fetched_bytes = download.missing_bytes
        return True

    def _report(self, done: int, total: int, remark: str) -> None:
        if self._stop.is_set():
            problem = f"the download was stopped at byte {done} of {total}"
            raise GymError(ErrorCode.INTERRUPTED, problem, "run the same command again")
        if remark:
            self._display.report("base-remark", remark)
        self._pace.note(done)
        self._display.progress("base", done, total, None)

    def _local_copy(self, source: str) -> GlobalModel:
        """Load a local copy under the hub's name for the base, after consent."""
        if not needs_a_look(None, self._status.base_model):
            return self._load(source)
        from gym_fed.base.models import resolve

        self._ask_for_copy(source)
        model = self._load(source)
        self._store.note(self._digest, Path(resolve(source)))  # so that the user is not asked again
        return model

    def _ask_for_copy(self, source: str) -> None:
        self._display.busy("")
        if not self._consent.local_copy(source):
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"not joined: you declined to read the local copy of {source}",
                _OWN,
            )

    def _load(self, source: str) -> GlobalModel:
        self._display.busy(f"loading {source} to work out the terms")
        model = global_model(source)
        if model.base.digest != self._digest:
            raise self._other(model, source)
        return model

    def _other(self, model: GlobalModel, source: str) -> GymError:
        """Create the error for a model that is not the federation's base, with the differences if known."""
        from gym_fed.base.models import resolve
        from gym_fed.delta.base import digests_by_tensor

        try:
            listing = self._retrying(lambda: read_listing(self._client))
            details = differences(listing, digests_by_tensor(model.model), Path(resolve(source)))
        except GymError as error:  # the listing is only needed for the error message
            details = f"the differences are unknown: {error.message}"
        refusal = model.mismatch(self._digest, self._status.base_model)
        return GymError(
            refusal.code, f"{refusal.message}: {details}" if details else refusal.message, refusal.hint
        )

    def _fetch(self, offer: BaseOffer, again: bool) -> GlobalModel:
        self._check_policy(offer.size_bytes)
        self._display.busy("")
        seeding = self._client.seeding
        words = tuple(seeding.in_words()) if seeding is not None else ()
        duration = self._pace.duration(offer.size_bytes)
        if not self._consent.base(replace(offer, duration=duration, seeding=words)):
            raise GymError(
                ErrorCode.PERMISSION_DENIED, "not joined: you declined the download of the base", _OWN
            )
        self._fetched_bytes = offer.size_bytes
        self._display.busy(f"enrolling at {self._client.address} to fetch the base")
        self._log_in()
        if seeding is not None:
            seeding.start()
        listing = self._retrying(lambda: read_listing(self._client))
        listing.require(offer.listing_sha256, offer.size_bytes)
        if again:
            self._store.reopen(self._digest)
        folder = self._store.partial(self._digest)
        self._display.busy("comparing with the part already downloaded")
        traffic = Traffic(self._home, self._client.pin.server)
        try:
            fetch_files(
                self._client,
                folder,
                listing.files,
                self._retrying,
                lambda done, total: self._report(done, total, ""),
                self._stop.is_set,
                traffic.count_down,
            )
        finally:
            self._pace.save()
            traffic.save()
        return self._checked(folder, [file.name for file in listing.files])

    def _check_policy(self, size_bytes: int) -> None:
        status, rounds = self._status, rounds_to_come(self._status, self._rounds)
        join_bytes = bytes_to_join(self._client, status)
        self._policy.check_base(size_bytes, join_bytes, status.round_download_bytes, rounds)

    def _checked(self, folder: Path, names: list[str]) -> GlobalModel:
        """Load and verify a complete download. It is moved to the store only if it is the base."""
        self._display.busy("checking the base")
        require_own_weights(folder, names)
        model = GlobalModel(str(folder))
        if model.base.digest != self._digest:
            self._store.drop(self._digest)
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{self._client.address} served a model with digest {model.base.digest} instead of its base "
                f"{self._digest}; the files were deleted",
                "the hub is faulty or malicious: report it to the coordinator",
            )
        failpoint("client-base-checked")
        place = self._store.adopt(self._digest)
        keep_model(model, str(place))
        self._display.report("base", f"the base is in {place}", folder=os.fspath(place))
        return model


def _adapter(name: str) -> GymError:
    problem = f"{name}, the hub's base model, is an adapter and not a complete model"
    return GymError(ErrorCode.MODEL_INVALID, problem, _OWN)
