"""Checks at the start of a hub: the data, model, folders and privacy budget that its rounds need.

A valid config may still name a missing held-out file, or more rounds than its privacy budget allows. Without these
checks the first merge would fail, after all contributors have trained.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gym_fed.config.hub.server import CONFIG_NAME, ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.core.system_errors import system_error
from gym_fed.core.text import counted
from gym_fed.data.encoding import encode_rows
from gym_fed.data.rows import as_kind
from gym_fed.delta.factors import require_matrix_targets
from gym_fed.privacy.accountant import noise_multiplier_for
from gym_server.base.served import ServedBase, record_tensors
from gym_server.evaluations.runner import check_measurable, suites_of
from gym_server.evaluations.safety import check_probable
from gym_server.privacy import budget as privacy
from gym_server.rounds.hub_model import HubModel, coordinator_rows
from gym_server.rounds.recipes import RecipeChanges, check_soup
from gym_server.rounds.round_store import RoundStore
from gym_server.state import HubState
from gym_server.store.database import Database
from gym_server.store.objects import ObjectStore
from gym_server.store.room import shortage

ROWS_FOR_PAY = 200
"""Number of held-out rows in benchmarks/pay.py; fewer rows give less certain scores."""


def check_at_start(state: HubState, config: ServerConfig, recipes: RecipeChanges) -> list[str]:
    """Check everything that a round of this hub needs and that can be checked in advance.

    Returns:
        Warnings, one per line; they do not prevent serving.

    Raises:
        GymError: The first problem that would cause a failure later, with its config key.
    """
    check_soup(config)
    if config.recipe.sends_factors:
        require_matrix_targets(config.recipe, state.base.shapes)
    _check_newest_soup(state.folder, state.store, state.round_store)
    privacy.check_promise(config, state.base, state.database, state.round_store)
    _check_trainer(config)
    notes = _check_budget(config, state.database, state.round_store)
    if (short := shortage(state, config)) is not None:
        notes.append(f"{short.message}; no round opens until there is free space ({short.hint})")
    for folder in (state.folder, state.store.staging):
        _check_writable(folder)
    _check_evals_data(config, state.folder)
    return [*_overridden(recipes), *notes, *_check_model(state, config, _check_data(config, state.folder))]


def _check_newest_soup(folder: Path, store: ObjectStore, round_store: RoundStore) -> None:
    """Check that the newest soup and its sum are stored; they are missing if an earlier run used another location."""
    soups = round_store.soups()
    newest = {soups[-1].sha256, soups[-1].sum_sha256 or soups[-1].sha256} if soups else set()
    if not all(map(store.has, newest)):
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"storage.objects: {store.place} does not have the soup of version {len(soups)} "
            f"({soups[-1].sha256[:12]})",
            f"set the location that earlier runs used: storage.objects in {folder / CONFIG_NAME}, or --set "
            "storage.objects=LOCATION in every command; if the file is lost, restore a backup",
        )


def _overridden(recipes: RecipeChanges) -> list[str]:
    """Return the settings by which `gym-server recipe set` overrides the config, one per line."""
    settings = recipes.settings()
    return [
        f"{key}={value} was set by gym-server recipe set and overrides the config"
        for key, value in settings.items()
    ]


def _check_budget(config: ServerConfig, database: Database, round_store: RoundStore) -> list[str]:
    privacy_config = config.privacy
    if privacy_config is None:
        return []
    num_rounds = config.rounds.num_rounds - round_store.num_committed()
    paid = privacy.rounds_paid(config, database, num_rounds)
    if paid >= num_rounds:
        return []
    what = (
        f"privacy.epsilon {privacy_config.epsilon:g} allows {counted(paid, 'more round')} at noise_multiplier "
        f"{privacy_config.noise_multiplier:g}, but {num_rounds} of rounds.num_rounds {config.rounds.num_rounds} "
        "remain"
    )
    if privacy_config.end_when_spent or privacy.has_begun(database):
        return [f"{what}: the run ends when the budget is spent"]
    more_noise = "a larger privacy.noise_multiplier"
    if privacy_config.mechanism == "gaussian":
        least = noise_multiplier_for(privacy_config.epsilon, privacy_config.target_delta, count=num_rounds)
        more_noise = f"privacy.noise_multiplier: {math.ceil(100 * least) / 100:g}"
    fewer = f"rounds.num_rounds: {paid}, or " if paid else ""
    raise GymError(
        ErrorCode.CONFIG_INVALID,
        what,
        f"set {fewer}{more_noise}, or privacy.end_when_spent: true to stop when the budget is spent",
    )


def _check_writable(folder: Path) -> None:
    """Raise ``NOT_WRITABLE`` or ``DISK_FULL`` if no file can be created in a folder."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".check-") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        refused = system_error(error, with_place=False)
        assert refused is not None
        raise GymError(refused.code, f"{folder}: {refused.message}", refused.hint) from error


def _check_evals_data(config: ServerConfig, folder: Path) -> None:
    """Check the folder of evaluation datasets, even if no suite uses it yet."""
    named = config.gate.evals_data
    if named is not None and not (folder / named).is_dir():
        raise GymError(
            ErrorCode.FILE_NOT_FOUND,
            f"gate.evals_data: no folder at {folder / named}",
            "set a folder of evaluation sets, relative to the hub's folder, or remove the key",
        )


def _check_trainer(config: ServerConfig) -> None:
    """Check for the trainer's packages, which ``requirements-hub.txt`` omits, if the hub itself must train."""
    if config.root is None:
        return
    from gym_fed.core.requirements import require_package

    remedy = (
        "install all requirements of gym-fed (docs/install.md), or remove root and choose a rule without it"
    )
    for package in ("trl", "peft", "accelerate", "datasets"):
        require_package(package, "root (an update that the hub trains)", remedy=remedy)


def _check_data(config: ServerConfig, folder: Path) -> list[Any]:
    """Return the held-out rows that the config names, if any, and check the root data."""
    gate, root = config.gate, config.root
    rows: list[Any] = []
    if gate.heldout is not None:
        with _about("gate.heldout"):
            found = coordinator_rows(gate.heldout, gate.format, gate.max_examples, folder, "heldout")
            rows = as_kind(_some(found, gate.heldout), "supervised")
    if root is not None:
        with _about("root.data"):
            found = coordinator_rows(root.data, root.format, root.max_examples, folder, "train")
            as_kind(_some(found, root.data), ALGORITHMS.new(config.recipe.algorithm).row_kind)
    return rows


def _check_model(state: HubState, config: ServerConfig, heldout: list[Any]) -> list[str]:
    """Check that the base has the weights that the federation started with, and can process the held-out rows."""
    with _about("gate.evals"):
        suites = suites_of(config.gate, state.folder)
    with _about("base_model"):
        model = HubModel.of(state, config)
        ServedBase(config, state.base, state.database)
    record_tensors(state.base, state.database, model.model)
    for suite in suites:
        with _about("gate.evals"):
            check_measurable(suite, model.model, model.tokenizer)
    if (safety := config.gate.safety) is not None:
        with _about("gate.safety"):
            check_probable(safety, state.folder, model)
    if not heldout:
        return []
    longest = config.gate.max_length
    with _about("gate.heldout"):
        num_rows = len(encode_rows(model.tokenizer, heldout, max_length=longest))
        if not num_rows:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"no row has anything to predict within {counted(longest, 'token')} (gate.max_length)",
                "raise gate.max_length, or use shorter rows",
            )
    notes = _pay_notes(config, num_rows)
    if num_rows < len(heldout):
        left_out = len(heldout) - num_rows
        notes.append(
            f"gate.heldout: ignored {left_out} of {counted(len(heldout), 'row')}, which exceed gate.max_length"
        )
    return notes


def _pay_notes(config: ServerConfig, heldout_rows: int) -> list[str]:
    """Return a warning if the held-out data is too small, or missing, to measure contributions."""
    rewards = config.rewards
    if rewards.measures and heldout_rows < ROWS_FOR_PAY:
        return [
            f"rewards.score: scores on {counted(heldout_rows, 'held-out row')} are uncertain, and the pay for "
            f"uncertain gains stays in the pool; use {ROWS_FOR_PAY} rows or more"
        ]
    if not rewards.measures and not config.hides_updates:
        return [
            "rewards.score: participation pays for noise as well as for work; set gate.heldout, and use estimate"
        ]
    return []


def _some(rows: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    if not rows:
        raise GymError(ErrorCode.DATA_INVALID, f"{source} has no rows", "add rows, or remove the key")
    return rows


@contextmanager
def _about(key: str) -> Iterator[None]:
    """Prefix errors inside the block with the config key."""
    try:
        yield
    except GymError as error:
        raise GymError(error.code, f"{key}: {error.message}", error.hint) from error
