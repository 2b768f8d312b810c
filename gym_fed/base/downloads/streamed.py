"""Data sets that are streamed: at the commit that was agreed to, whatever the Hub moves on to.

The commit is kept in the environment, from which all processes of a run have it.
"""

from __future__ import annotations

import json
import os

from gym_fed.base.downloads import hub
from gym_fed.base.downloads.offer import DownloadOffer, offer_dataset

COMMITS = "GYM_DATASET_COMMITS"
"""Holds a JSON object: the commit by address and name."""

_offers: dict[tuple[str, str], DownloadOffer] = {}


def agree(offer: DownloadOffer) -> None:
    """From now on, this data set is read at the offer's commit."""
    os.environ[COMMITS] = json.dumps({**_commits(), _key(offer.name): offer.commit})


def agreed_commit(name: str) -> str | None:
    """At which commit a data set is read, by this process or the one that started it; None where no one agreed."""
    return _commits().get(_key(name))


def to_stream(name: str) -> DownloadOffer:
    """What is streamed of a data set: the commit that was agreed to, else the newest, and its files.

    No answer of the Hub is read further than those files go.

    Raises:
        GymError: As ``offer_dataset``.
    """
    commit = agreed_commit(name)
    offer = None if commit is None else _offers.get((_key(name), commit))
    if offer is None:
        offer = offer_dataset(name, commit=commit)
        agree(offer)
        _offers[_key(name), offer.commit] = offer
    from gym_fed.base.downloads import bounds  # brings an HTTP client

    bounds.with_bounds()
    bounds.may_send(name, {file.path: file.size_bytes for file in offer.files})
    return offer


def _commits() -> dict[str, str]:
    found: dict[str, str] = json.loads(os.environ.get(COMMITS, "{}"))
    return found


def _key(name: str) -> str:
    return f"{hub.endpoint()} {name}"
