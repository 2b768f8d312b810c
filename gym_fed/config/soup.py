"""How a round's updates become one soup: the rule, clipping, weights, and the codec of the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from gym_fed.config.base import StrictModel
from gym_fed.config.delta import CodecPolicy
from gym_fed.errors import ErrorCode, GymError

_AGGREGATORS = Path(__file__).resolve().parents[1] / "soup" / "aggregators"


class SoupRecipe(StrictModel):
    """The rules of a merge. Together with the updates it determines the soup's bytes."""

    aggregator: str = "mean"
    """A file of ``gym_fed/soup/aggregators``."""

    aggregator_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further keys of the aggregator's own ``Config``."""

    num_malicious_nodes: Annotated[int, Field(ge=0)] = 0
    """How many liars the merge must withstand, f. A round needs at least 2f + 1 updates."""

    server_learning_rate: Annotated[float, Field(gt=0)] = 1.0
    """The aggregate is multiplied by this before it is encoded."""

    max_norm: Annotated[float, Field(gt=0)] | None = None
    """An update with a larger L2 norm is scaled down to it; absent means no clipping."""

    weighting: Literal["uniform", "num_examples"] = "uniform"
    """One contributor one vote, or by the number of examples each says it trained on."""

    num_examples_cap: Annotated[int, Field(ge=1)] | None = None
    """num_examples: nobody counts for more examples than this, whatever is claimed; required there."""

    codec: CodecPolicy = CodecPolicy()
    """How the soup is written down; with ``error_feedback`` the server keeps the residual."""

    @field_validator("aggregator")
    @classmethod
    def _known(cls, name: str) -> str:
        known = sorted(info.name for info in iter_modules([str(_AGGREGATORS)]))
        if name not in known:
            raise ValueError(f"unknown aggregator (known: {', '.join(known)})")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> SoupRecipe:
        if (self.weighting == "num_examples") != (self.num_examples_cap is not None):
            raise ValueError(
                "num_examples_cap is required for weighting: num_examples and belongs to no other"
            )
        return self

    def check_feasible(self, contributors: int) -> None:
        """Whether ``contributors`` updates are enough to outvote ``num_malicious_nodes``.

        Raises:
            GymError: ``CONFIG_INVALID`` with the number that is needed.
        """
        needed = 2 * self.num_malicious_nodes + 1
        if contributors < needed:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"num_malicious_nodes: {self.num_malicious_nodes} needs at least {needed} updates a round, "
                f"not {contributors}",
                "lower num_malicious_nodes, or wait for more contributors",
            )

    def weights(self, num_examples: Sequence[int]) -> list[float]:
        """A weight for each update from the number of examples its contributor claims."""
        if self.num_examples_cap is None:
            return [1.0] * len(num_examples)
        return [float(max(1, min(count, self.num_examples_cap))) for count in num_examples]
