"""Announce the files of a base model that is already on this machine."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from gym_client.base.fetching import read_listing
from gym_client.base.offer import BaseOffer
from gym_client.hub.transport import HubClient
from gym_fed.core.errors import GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb

log = logging.getLogger("gym_client")


def share_base(client: HubClient, status: pb.StatusReply, source: str) -> threading.Thread | None:
    """Announce the files of a base on a separate thread, since hashing them takes long.

    Only files that the hub also offers and serves are announced.

    Args:
        client: Client of the hub, with seeding.
        status: Status of the hub, with its offer.
        source: Source of the base model; nothing is announced if it is not a folder.
    """
    offer, seeding, folder = BaseOffer.of(status), client.seeding, Path(source)
    if offer is None or not offer.num_files or seeding is None or not folder.is_dir():
        return None

    def share() -> None:
        try:
            listing = read_listing(client)
            listing.require(offer.listing_sha256, offer.size_bytes)
            seeding.share_base(folder, listing.files)
        except (GymError, OSError) as error:
            log.info("the base is not served to other contributors: %s", error)

    thread = threading.Thread(target=share, name="share-base", daemon=True)
    thread.start()
    return thread
