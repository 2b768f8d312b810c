"""Contribution scores: a round as a cooperative game, and the interface of the methods that divide its value.

The players are the n merged updates of a round. The value of a coalition S is the drop in held-out loss due to its
soup, in which every member has the same coefficient as in the round's full soup::

    v(S) = loss(base) - loss(base + sum_{i in S} c_i u_i),     v({}) = 0,     c_i = server_learning_rate * clip_i * w_i

The weights are not renormalised when an update is absent. With the coalition's own mean (w renormalised over S), an
update of zeros would dilute the others, and would be paid for it if the server's step overshoots. Here zeros add
exactly nothing to any coalition, all scores sum to the gain of the round, and splitting an update into two halves does
not increase its score. The drawback is that v measures what an update gave to *this* soup, not its value on its own.

The game is linear, unlike the soup's rule: robust rules need 2f + 1 updates and are undefined on small coalitions.
Score only updates that the rule kept. An excluded update is not in the soup: it is neither paid for a gain that it
would have given nor charged for harm that the rule prevented. For a coordinate-wise rule, the game is the nearest
linear soup, not the soup itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.soup.credit import standard_error

Coalition: TypeAlias = "frozenset[int]"
Vector: TypeAlias = "NDArray[np.float64]"
Stopped: TypeAlias = Literal["exact", "tolerance", "budget", "model"]

GRADIENT_COST = 3
"""Cost of a gradient in evaluations: one forward pass, and a backward pass that costs as much as two."""


class Game(Protocol):
    """A cooperative game of ``n`` players; ``value`` is in nats, and 0 for the empty coalition."""

    @property
    def n(self) -> int: ...

    def value(self, coalition: Coalition) -> float: ...


@runtime_checkable
class RowGame(Game, Protocol):
    """A game measured on held-out rows in k blocks; the spread between blocks gives the sampling error."""

    @property
    def block_weights(self) -> Vector:
        """``[k]`` shares of the held-out tokens per block; they sum to 1."""

    def parts(self, coalition: Coalition) -> Vector:
        """Return the ``[k]`` contributions of the blocks to the coalition's value."""


@runtime_checkable
class SmoothGame(Game, Protocol):
    """A game whose players may take part fractionally, so that it has gradients."""

    def slopes(self, shares: Vector) -> Vector:
        """Return the value's derivative with respect to each player's share: ``[n]``, or ``[n, k]`` by block of rows.

        Args:
            shares: ``[n]`` fraction of each player's participation, 0 to 1.
        """

    def chance(self) -> Vector:
        """Return the ``[n]`` standard deviations of the slope of a random direction with the norm of each update."""


@dataclass(frozen=True)
class Scores:
    """The score of each player, with its cost and error.

    Attributes:
        method: The method's name.
        values: ``[n]`` float64, nats of held-out loss; for an exact method they sum to the value of the full coalition.
        evaluations: Number of evaluated coalitions, plus three for each gradient.
        stopped: ``exact``; ``tolerance`` or ``budget``, the reason why sampling ended; or ``model`` for scores of a
            modelled game.
        errors: ``[n]`` float64 standard errors from the held-out rows and the sampled orders; None if neither is known,
            infinite for a single sample.
        parts: ``[n, k]`` float64 contribution of each block of held-out rows to the scores.
        block_weights: ``[k]``: the blocks' shares of the held-out tokens.
        chance: ``[n]`` float64 standard deviation of the score of a random update of this size, if the game has
            gradients; a score below twice this is not evidence of work.
    """

    method: str
    values: Vector
    evaluations: int
    stopped: Stopped
    errors: Vector | None = None
    chance: Vector | None = None
    parts: Vector = field(default_factory=lambda: np.zeros((0, 1)))
    block_weights: Vector = field(default_factory=lambda: np.ones(1))


class CountedGame:
    """A wrapper that evaluates each coalition of a game once, and counts evaluations.

    Args:
        game: The game.
        on_evaluation: Called with the count before each evaluation; may raise to stop the scoring.
    """

    def __init__(self, game: Game, on_evaluation: Callable[[int], None] = lambda _: None) -> None:
        self._game = game
        self._known: dict[Coalition, Vector] = {frozenset(): np.zeros(len(self.block_weights))}
        self._on_evaluation = on_evaluation
        self._sloped = False
        self.evaluations = 0

    @property
    def n(self) -> int:
        return self._game.n

    @property
    def everyone(self) -> Coalition:
        return frozenset(range(self.n))

    @property
    def block_weights(self) -> Vector:
        """The game's block weights; a single one for a game without rows."""
        return _block_weights(self._game)

    def value(self, coalition: Coalition) -> float:
        """Return the game's value. Raises the errors of ``parts``."""
        return float(self.parts(coalition).sum())

    def parts(self, coalition: Coalition) -> Vector:
        """Return the ``[k]`` parts of the game; a game without rows has one part, its value.

        Raises:
            GymError: ``UPDATE_REFUSED`` for a value that is not finite.
        """
        if coalition not in self._known:
            self._on_evaluation(self.evaluations)
            parts = _parts(self._game, coalition)
            self._known[coalition] = _finite(parts, f"the soup of updates {sorted(coalition)}")
            self.evaluations += 1
        return self._known[coalition]

    def slopes(self, shares: Vector) -> Vector:
        """Return the ``[n, k]`` slopes of the game; costs ``GRADIENT_COST`` evaluations."""
        self._on_evaluation(self.evaluations)
        slopes = _finite(self._smooth.slopes(shares), "the gradient")
        self.evaluations += GRADIENT_COST
        self._sloped = True
        return slopes.reshape(self.n, -1)

    @property
    def smooth(self) -> bool:
        """True if the innermost game has gradients."""
        return _is_smooth(self._game)

    def chance(self) -> Vector:
        """Return the game's chance level; computes a gradient if none has been computed yet."""
        smooth = self._smooth
        if not self._sloped:
            self.slopes(np.full(self.n, 0.5))
        return _finite(smooth.chance(), "the gradient")

    def scores(
        self, method: ContributionMethod, parts: Vector, stopped: Stopped, sampled: Vector | None = None
    ) -> Scores:
        """Collect the scores of a method with their errors, cost and chance level.

        Args:
            method: Name of the scoring method.
            parts: ``[n, k]`` scores by block of held-out rows.
            stopped: The reason why scoring stopped.
            sampled: ``[n]`` standard errors of sampled orders.
        """
        chance = self.chance() if self.smooth else None
        weights = self.block_weights
        errors = standard_error(parts, weights) if len(weights) > 1 else None
        if sampled is not None:
            errors = sampled if errors is None else np.hypot(errors, sampled)
        values = np.asarray(parts.sum(axis=1))
        return Scores(method.name, values, self.evaluations, stopped, errors, chance, parts, weights)

    @property
    def _smooth(self) -> SmoothGame:
        if not self.smooth or not isinstance(self._game, SmoothGame):
            raise GymError(
                ErrorCode.USAGE,
                f"{type(self._game).__name__} supports only whole updates, but the method needs gradients",
                "score with shapley, monte_carlo, gtg or leave_one_out",
            )
        return self._game


class GroupedGame:
    """A game in which several players act as one: near copies, or several keys of one person.

    Args:
        game: The game.
        groups: Players of each group; every player is in exactly one group.
    """

    def __init__(self, game: Game, groups: list[list[int]]) -> None:
        if sorted(i for group in groups for i in group) != list(range(game.n)):
            raise GymError(
                ErrorCode.USAGE, f"groups {groups} do not contain each of {game.n} players exactly once"
            )
        self._game, self._groups = game, groups

    @property
    def n(self) -> int:
        return len(self._groups)

    @property
    def smooth(self) -> bool:
        """True if the innermost game has gradients."""
        return _is_smooth(self._game)

    @property
    def block_weights(self) -> Vector:
        return _block_weights(self._game)

    def value(self, coalition: Coalition) -> float:
        return float(self.parts(coalition).sum())

    def parts(self, coalition: Coalition) -> Vector:
        return _parts(self._game, frozenset(i for group in coalition for i in self._groups[group]))

    def slopes(self, shares: Vector) -> Vector:
        spread = np.zeros(self._game.n)
        for group, share in zip(self._groups, shares, strict=True):
            spread[group] = share
        slopes = self._smooth.slopes(spread)
        return np.array([slopes[group].sum(axis=0) for group in self._groups])

    def chance(self) -> Vector:
        """Return the chance level of groups whose members are perfectly correlated, like copies."""
        chances = self._smooth.chance()
        return np.array([chances[group].sum() for group in self._groups])

    @property
    def _smooth(self) -> SmoothGame:
        if not self.smooth or not isinstance(self._game, SmoothGame):
            raise GymError(ErrorCode.USAGE, f"{type(self._game).__name__} has no gradients")
        return self._game


class ContributionMethod(ABC):
    """A method that divides a round's value among its updates; one per file in ``contributions``.

    ``Config`` holds its settings, which the registry validates. A sampling method uses its own seed, so the same game
    always gets the same scores.
    """

    name: ClassVar[str]
    Config: ClassVar[type[StrictModel]] = StrictModel

    measures: ClassVar[bool] = True
    """True if scores come from held-out data, so that a part of the pool can be split by them."""

    def __init__(self, config: StrictModel) -> None:
        self.config = config

    @abstractmethod
    def score(self, game: Game) -> Scores:
        """Compute the score of each player.

        Raises:
            GymError: ``CONFIG_INVALID`` for a game too large for the method, ``UPDATE_REFUSED`` for values that are not
                finite, and errors from the game.
        """


def _is_smooth(game: Game) -> bool:
    return game.smooth if isinstance(game, CountedGame | GroupedGame) else isinstance(game, SmoothGame)


def _block_weights(game: Game) -> Vector:
    return game.block_weights if isinstance(game, RowGame) else np.ones(1)


def _parts(game: Game, coalition: Coalition) -> Vector:
    return game.parts(coalition) if isinstance(game, RowGame) else np.array([float(game.value(coalition))])


def _finite(values: Vector, what: str) -> Vector:
    if not bool(np.isfinite(values).all()):
        raise GymError(ErrorCode.UPDATE_REFUSED, f"{what} has a value that is not finite")
    return values
