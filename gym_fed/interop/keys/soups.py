"""Settings of quantisers and soups in Python: switches that are none here, and privacy without its numbers."""

from __future__ import annotations

from gym_fed.interop.keys.draft import Draft, KeyWord
from gym_fed.interop.row import RefusedWord


def _soup_switch(draft: Draft) -> None:
    draft.take("enable_deltasoup")
    draft.note("enable_deltasoup", "not needed (every delta can go into a soup)")


BITDELTA = [
    KeyWord(
        "enable_deltasoup",
        "not needed: every delta can go into a soup",
        _soup_switch,
        where="Python",
        shown="BitDeltaConfig(bits=1, group_size=128, safety_threshold=0.6, enable_deltasoup=True)",
    ),
]

_PRIVACY = RefusedWord(
    "how much noise hides whom is for you to say; True says neither",
    (
        "from gym_fed.config.hub.privacy import ReleasePrivacy",
        "differential_privacy=ReleasePrivacy(noise_multiplier=1.0, clipping_norm=1.0),",
    ),
)


DELTA_SOUP = [
    KeyWord(
        "differential_privacy",
        "",
        meant=lambda value: value is True,
        refusal=_PRIVACY,
        where="Python",
        shown="DeltaSoupConfig(differential_privacy=True)",
    ),
]
