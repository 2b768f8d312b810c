"""The base class of aggregators, pre-aggregators and merge methods."""

from __future__ import annotations

from abc import ABC
from typing import Annotated, ClassVar

from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.soup.gram import Needs


class RuleConfig(StrictModel):
    """The settings of every robust rule; rules with more settings derive from it."""

    num_malicious_nodes: Annotated[int, Field(ge=0)] = 0
    """Number of malicious clients to withstand, f."""


class Rule(ABC):
    """A registered rule: one per file, named like the file."""

    name: ClassVar[str]
    needs: ClassVar[Needs] = Needs.NOTHING
    Config: ClassVar[type[RuleConfig]] = RuleConfig

    draws_lots: ClassVar[bool] = False
    """True if ``Config`` has a ``seed`` for random draws; a server adds the round's number to it."""

    @classmethod
    def needs_root(cls) -> bool:
        """True if the rule reads the coordinator's own (root) update."""
        return cls.needs is Needs.ROOT

    @classmethod
    def takes_root(cls) -> bool:
        """True if the rule reads a root update where there is one."""
        return cls.needs >= Needs.EVIDENCE

    def __init__(self, config: RuleConfig) -> None:
        self.config = config

    @property
    def num_malicious_nodes(self) -> int:
        return self.config.num_malicious_nodes
