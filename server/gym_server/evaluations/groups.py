"""Store the result of a search for groups of contributors (``gym_server.evaluations.grouping``)."""

from __future__ import annotations

from sqlalchemy import Connection, select

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.text import counted
from gym_server.state import HubState
from gym_server.store.tables import settings

GROUPS_KEY = "groups"
"""Key of the setting that stores the last result."""


class GroupResult(StrictModel):
    """One group, and its variant's loss on the held-out rows that this variant fits best.

    Attributes:
        contributors: Ids of the members.
        num_rows: Number of held-out rows assigned to the group.
        common: Loss of the current version on these rows, in nats per token.
        own: Loss of the group's variant.
        gain: ``common - own``.
        stderr: Standard error of the gain over rows.
        is_offered: True if the gain exceeds twice its standard error.
        skipped_rounds: Rounds in which the group had too few updates for the rule.
    """

    contributors: list[str]
    num_rows: int
    common: float
    own: float
    gain: float
    stderr: float
    is_offered: bool
    skipped_rounds: list[int]


class CommunityGroups(StrictModel):
    """The result of ``find_groups``.

    Attributes:
        height: Height of the version that the groups are compared with.
        first_round: First of the rounds whose updates were compared.
        last_round: Last of these rounds.
        within: Mean cosine of two updates of one group in the same round.
        between: Mean cosine of two updates of different groups.
        groups: The groups; empty if no split leaves two contributors on each side.
    """

    height: int
    first_round: int
    last_round: int
    within: float
    between: float
    groups: list[GroupResult]

    @property
    def lines(self) -> list[str]:
        """Return the result as text lines."""
        skipped = [
            f"group {number}: {counted(len(group.skipped_rounds), 'round')} skipped: too few updates for the merge rule"
            for number, group in enumerate(self.groups, start=1)
            if group.skipped_rounds
        ]
        compared = (
            f"updates of rounds {self.first_round} to {self.last_round}: mean cosine {self.within:.3f} within a group, "
            f"{self.between:.3f} between groups"
        )
        return [*([compared] if self.groups else []), *skipped, self.sentence]

    @property
    def sentence(self) -> str:
        """Return the result in one sentence."""
        offered = [group for group in self.groups if group.is_offered]
        if not offered:
            return f"no split at version {self.height}: no group of contributors gains from its own variant"
        sizes = [counted(len(group.contributors), "contributor") for group in self.groups]
        gains = " and ".join(f"{group.gain:.3f}" for group in offered)
        return (
            f"two groups at version {self.height}, of {sizes[0]} and {sizes[1]}: "
            f"{'each gains' if len(offered) == 2 else 'one gains'} {gains} nats from its own variant"
        )


def save_groups(state: HubState, found: CommunityGroups) -> None:
    """Store the result for the dashboard, replacing the earlier one."""
    state.database.set(GROUPS_KEY, found.model_dump_json())


def saved_sentence(tx: Connection) -> str:
    """Return the stored result in one sentence; empty if there is none."""
    stored = tx.scalar(select(settings.c.value).where(settings.c.key == GROUPS_KEY))
    return "" if stored is None else CommunityGroups.model_validate_json(stored).sentence
