"""Stream datasets at the commit that the user agreed to, even if the Hub has a newer one.

The commit is stored in the environment, which all processes of a run inherit.
"""

from __future__ import annotations

import json
import os

from gym_fed.base.downloads import hub
from gym_fed.base.downloads.offer import DownloadOffer, offer_dataset

COMMITS = "GYM_DATASET_COMMITS"
"""Environment variable with a JSON object of commits by address and name."""

_offers: dict[tuple[str, str], DownloadOffer] = {}


def agree(offer: DownloadOffer) -> None:
    """Record the offer's commit as the one at which its dataset is read from now on."""
    os.environ[COMMITS] = json.dumps({**_commits(), _key(offer.name): offer.commit})


def agreed_commit(name: str) -> str | None:
    """Return the commit agreed to for a dataset in this process or its parent; None if there is none."""
    return _commits().get(_key(name))


def to_stream(name: str) -> DownloadOffer:
    """Describe a streamed dataset: the agreed commit, or the newest one, and its files.

    Responses of the Hub are limited to the sizes of those files.

    Raises:
        GymError: Errors from ``offer_dataset``.
    """
    commit = agreed_commit(name)
    offer = None if commit is None else _offers.get((_key(name), commit))
    if offer is None:
        offer = offer_dataset(name, commit=commit)
        agree(offer)
        _offers[_key(name), offer.commit] = offer
    from gym_fed.base.downloads import bounds  # imports an HTTP client

    bounds.with_bounds()
    bounds.may_send(name, {file.path: file.size_bytes for file in offer.files})
    return offer


def _commits() -> dict[str, str]:
    commits: dict[str, str] = json.loads(os.environ.get(COMMITS, "{}"))
    return commits


def _key(name: str) -> str:
    return f"{hub.endpoint()} {name}"
