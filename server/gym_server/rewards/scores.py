"""Score each merged update by the method that the config names."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.delta.file import DeltaFile
from gym_fed.evaluation.soup_game import SoupGame, round_coefficients
from gym_fed.soup.building import build_contribution_method
from gym_fed.soup.contribution import CountedGame, Game, Scores, Vector
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_server.rounds.hub_model import HubModel
from gym_server.store.objects import ObjectStore

log = logging.getLogger("gym_server")

DIGITS = 6
"""Decimal places of scores (in nats); computations after this rounding are exact."""

_LUCK = 2.0
"""Minimum score that counts as evidence of work, in standard deviations of a random update's score."""

_LOG_SECONDS = 10.0


class ScoringStopped(Exception):
    """Raised if the hub must stop during scoring; the round is scored again after a restart."""


@dataclass(frozen=True)
class RoundScores:
    """The scores of a round.

    Attributes:
        scores: Score in nats, by update.
        errors: Standard error of the score, by update, if known.
        luck: Score that a random update may get by chance, by update, if the method estimates it.
        chance: Standard deviation of the score of a random direction of the update's size, by update.
        parts: ``[k]`` score by block of held-out rows, by update.
        measurement: Method and settings of the measurement, for the ledger.
    """

    scores: dict[str, float]
    errors: dict[str, float] = field(default_factory=dict)
    luck: dict[str, float] = field(default_factory=dict)
    chance: dict[str, float] = field(default_factory=dict)
    parts: dict[str, Vector] = field(default_factory=dict)
    measurement: dict[str, Any] = field(default_factory=dict)


def score_updates(
    store: ObjectStore,
    model: HubModel,
    rows: Sequence[Any],
    coefficients: Sequence[float] | None,
    weights: Sequence[float] | None,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    recipe: SoupRecipe,
    method: str,
    options: Mapping[str, Any],
) -> RoundScores:
    """Score merged updates by a method of ``gym_fed.soup.contributions``.

    Args:
        store: The hub's objects.
        model: The model that the updates are for.
        rows: Rows of ``updates``.
        coefficients: Coefficient of each update in the aggregate, if the rule weights whole updates. An update with
            coefficient 0 scores 0. None uses the coefficients of the weighted mean.
        weights: Weights of the updates from reputations; None if the recipe sets them.
        should_stop: Called before every evaluation; True stops the scoring.
        recipe: The recipe of the soup.
        method: The name of the scoring method.
        options: Keys of the method's ``Config``.

    Raises:
        ScoringStopped: If ``should_stop`` returned True.
        GymError: ``CONFIG_INVALID`` if the round is too large for the method; ``UPDATE_REFUSED`` for non-finite values.
    """
    rule = build_contribution_method(method, options)
    scores = {row.update_id: 0.0 for row in rows}
    measurement: dict[str, Any] = {"method": method, "options": rule.config.model_dump(mode="json")}
    with ExitStack() as stack:
        files = _opened(stack, store, model, rows)
        counts = _coefficients(recipe, rows, files, coefficients, weights)
        players = [i for i, count in enumerate(counts) if count != 0.0]
        if not players:
            return RoundScores(scores, measurement={**measurement, "evaluations": 0})
        game = model.game([files[i] for i in players], [counts[i] for i in players])
        found = rule.score(_watched(game, should_stop))
    names = [rows[i].update_id for i in players]
    scores |= {name: round(float(value), DIGITS) for name, value in zip(names, found.values, strict=True)}
    measurement |= {"evaluations": found.evaluations, "stopped": found.stopped}
    return RoundScores(
        scores,
        {} if found.errors is None else _finite(names, found.errors),
        _luck(names, found),
        {} if found.chance is None else _finite(names, found.chance),
        dict(zip(names, found.parts, strict=True)),
        measurement,
    )


def _finite(names: Sequence[str], values: Vector) -> dict[str, float]:
    return {
        name: round(float(value), DIGITS)
        for name, value in zip(names, values, strict=True)
        if math.isfinite(value)
    }


def _opened(stack: ExitStack, store: ObjectStore, model: HubModel, rows: Sequence[Any]) -> list[DeltaFile]:
    paths = [store.local_path(row.delta_sha256) for row in rows]
    return [stack.enter_context(DeltaFile.open(path, model.spec, any_version=True)) for path in paths]


def _coefficients(
    recipe: SoupRecipe,
    rows: Sequence[Any],
    files: Sequence[DeltaFile],
    coefficients: Sequence[float] | None,
    weights: Sequence[float] | None,
) -> list[float]:
    """Return each update's coefficient in the soup's step."""
    if coefficients is not None:
        return [recipe.server_learning_rate * c for c in coefficients]
    if weights is None:
        weights = recipe.weights([UpdateManifest.parse(row.manifest).num_examples for row in rows])
    return round_coefficients(files, weights, recipe.max_norm, recipe.server_learning_rate)


def _luck(names: Sequence[str], found: Scores) -> dict[str, float]:
    if found.chance is None:
        return dict.fromkeys(names, 0.0)
    return _finite(names, _LUCK * found.chance)


def _watched(game: SoupGame, should_stop: Callable[[], bool]) -> Game:
    """Wrap a game so that it can be stopped and reports its progress."""
    began = last = time.monotonic()

    def on_evaluation(count: int) -> None:
        nonlocal last
        if should_stop():
            raise ScoringStopped
        now = time.monotonic()
        if now - last >= _LOG_SECONDS:
            last = now
            log.info("scoring: %d evaluations in %.0f s", count, now - began)

    return CountedGame(game, on_evaluation)
