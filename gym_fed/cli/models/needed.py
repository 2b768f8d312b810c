"""Ensure that the models and datasets of a command are on this machine; offer to download missing ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from gym_fed.core.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from gym_fed.config.train.data_source import DataConfig
    from gym_fed.config.train.training import TrainingConfig


YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Accept downloads and guessed columns.")]
_T = TypeVar("_T")


def ensure_models(names: Iterable[str | None], yes: bool) -> bool:
    """Fetch missing models with consent; return True if any was fetched.

    Raises:
        GymError: Errors of ``gym_fed.base.downloads.ensure_model``.
    """
    from gym_fed.base.downloads import ensure_model
    from gym_fed.base.downloads.ensure import consent, progress

    missing = _missing(names)
    for name in missing:
        print_queried_host(name)
        with progress() as report:
            ensure_model(name, consent=consent(yes), report=report)
    return bool(missing)


def print_queried_host(name: str) -> None:
    """Print the host that is queried, since the Hub's answer can take many seconds."""
    from gym_fed.base.downloads.hub import endpoint
    from gym_fed.core.console import err

    err.print(f"asking {endpoint()} for {name} ...", style="dim", markup=False)


def _missing(names: Iterable[str | None]) -> list[str]:
    from gym_fed.base.downloads import missing_model

    return [name for name in dict.fromkeys(names) if name is not None and missing_model(name)]


def require_rows(config: TrainingConfig) -> None:
    """Refuse a run without rows, with missing files, or with an invalid first row, before a model is loaded.

    Raises:
        GymError: ``CONFIG_INVALID`` for a config without a model or rows; errors of ``source_rows``.
    """
    if config.model is None and config.model_init is None:
        raise GymError(ErrorCode.CONFIG_INVALID, "model: not set", "set model or model_init")
    if config.tokenized_path is not None:
        return
    if not config.data:
        raise GymError(
            ErrorCode.CONFIG_INVALID, "data: no rows to train on", "list at least one path or tasks entry"
        )
    open_rows((*config.data, *config.eval_data))


def open_rows(sources: Iterable[DataConfig]) -> None:
    """Refuse missing files and files with an invalid first row before gigabytes are fetched."""
    from gym_fed.data.sources import source_rows

    for source in sources:
        if source.path is not None or source.dataset is not None:
            next(source_rows(source), None)


def ensure_datasets(sources: Iterable[DataConfig], yes: bool) -> None:
    """Ask for consent to stream Hub datasets that are not in the local cache.

    Raises:
        GymError: Errors of ``gym_fed.base.downloads.ensure_dataset``.
    """
    from gym_fed.base.downloads import ensure_dataset, missing_dataset
    from gym_fed.base.downloads.config_needs import hub_places
    from gym_fed.base.downloads.ensure import consent

    for name, subset in dict.fromkeys(place for source in sources for place in hub_places(source)):
        if missing_dataset(name):
            print_queried_host(name)
        ensure_dataset(name, subset=subset, consent=consent(yes))


def with_models(
    load: Callable[[], _T], first: str | None, names: Callable[[_T], TrainingConfig], yes: bool
) -> _T:
    """Return a config whose models are on this machine.

    Args:
        load: Reads the config. It is called again after a download, because the translation of a
            LLaMA-Factory file reads the model's configuration.
        first: The model that the file names, for a config that cannot be read without it.
        names: Returns the config from the result of ``load``.
        yes: Consent to downloads.

    Raises:
        GymError: Errors of ``load`` and ``ensure_models``.
    """
    try:
        loaded = load()
    except GymError as error:
        if error.code is not ErrorCode.MODEL_NOT_FOUND or not ensure_models([first], yes):
            raise
        loaded = load()
    from gym_fed.base.downloads.config_needs import models_of

    config = names(loaded)
    if _missing(models_of(config)):
        from gym_fed.base.models import pick_device

        pick_device(config.device)
        open_rows((*config.data, *config.eval_data))
    if ensure_models(models_of(config), yes):
        loaded = load()
    ensure_datasets((*config.data, *config.eval_data), yes)
    return loaded
