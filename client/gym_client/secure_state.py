"""What a contributor keeps of one secure round, so that a kill neither forks nor repeats what it has said."""

from __future__ import annotations

from gym_fed.config.base import StrictModel
from gym_fed.privacy.secure_aggregation.messages import Roster, Shares, SignedAdvert


class SecureState(StrictModel):
    """``state.json`` of a round's folder; ``gym_client.secure`` writes it before it says what follows from it."""

    mask_private: str
    cipher_private: str
    seed: str
    advert: SignedAdvert
    roster: Roster | None = None
    shares: Shares | None = None
    """What was sealed for the others; sent again as it is."""
    own: tuple[str, str] | None = None
    """This contributor's own shares, of its seed and of its mask key."""
    received: dict[str, tuple[str, str]] | None = None
    """Shares of the others' seeds and mask keys; with it the list of who masks is fixed."""
    votes: str | None = None
    """sha256 of the one vector that was masked."""
    survivors: list[str] | None = None
