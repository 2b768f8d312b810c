"""What a person is asked on the way into a federation, as an interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gym_client.agent.agreement import Renewal
    from gym_client.base.offer import BaseOffer
    from gym_client.cli.offer import Offer
    from gym_client.identity.address import Address
    from gym_client.ledger.restored import Loss


class Consent:
    """How a person gives consent. The command line prompts on the terminal; tests bring their own."""

    def server_key(self, address: Address, fingerprint: str) -> bool:
        """Whether a key that nobody vouches for is the right one."""
        raise NotImplementedError

    def local_copy(self, name: str) -> bool:
        """Whether to read the local copy of a base model that only the hub has named, to work out the terms."""
        raise NotImplementedError

    def base(self, offer: BaseOffer) -> bool:
        """Whether to fetch a base that this machine lacks, and to be enrolled for that."""
        raise NotImplementedError

    def offer(self, offer: Offer) -> bool:
        """Whether to join on these terms."""
        raise NotImplementedError

    def renewed(self, renewal: Renewal) -> bool:
        """Whether to go on with a hub whose rounds ask for something else now."""
        raise NotImplementedError

    def accepts(self, name: str) -> bool:
        """Whether the terms of this name were accepted on the command line."""
        return False

    def restored(self, loss: Loss) -> bool:
        """Whether to go on with a hub that was restored from a backup, and lost this."""
        raise NotImplementedError
