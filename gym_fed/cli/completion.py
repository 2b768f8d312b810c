"""Names for the shell's Tab completion, one function per kind. Imports nothing heavy and never raises.

Other words are left to the shell, which completes paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import typer

_PLAIN = re.compile(r"[\w./:@%+=,-]+")


def runs(incomplete: str) -> list[str]:
    """Complete the run folders below ``runs``."""
    return _matching(_run_folders, incomplete)


def models(incomplete: str) -> list[str]:
    """Complete gym-nano, the models of the Hugging Face cache, and run folders."""
    return _matching(_model_names, incomplete)


def variants(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the variants of the store on the command line, or of this machine's store."""
    store = ctx.params.get("store") or ctx.params.get("variants")
    return _matching(lambda: _variant_names(None if store is None else Path(store)), incomplete)


def recipes(incomplete: str) -> list[str]:
    """Complete the recipes of `gym configs list`."""

    def names() -> list[str]:
        from gym_fed.config.recipes import recipes

        return [recipe.name for recipe in recipes()]

    return _matching(names, incomplete)


def rules(incomplete: str) -> list[str]:
    """Complete aggregators and merge methods."""

    def names() -> tuple[str, ...]:
        from gym_fed.core.registries import AGGREGATORS, METHODS

        return (*AGGREGATORS.names(), *METHODS.names())

    return _matching(names, incomplete)


def tasks(incomplete: str) -> list[str]:
    """Complete the tasks of `gym data tasks`."""

    def names() -> tuple[str, ...]:
        from gym_fed.core.registries import TASKS

        return TASKS.names()

    return _matching(names, incomplete)


def suites(incomplete: str) -> list[str]:
    """Complete the suites of `gym eval list`."""
    return _matching(_suite_names, incomplete)


def _matching(names: Callable[[], Iterable[str]], incomplete: str) -> list[str]:
    """Return the names with this prefix; none if they cannot be read, since completion cannot report errors.

    Names with shell metacharacters are left out: bash inserts names unquoted, and zsh runs them
    through ``eval``, so a folder's name could be executed as a command.
    """
    try:
        return sorted({name for name in names() if name.startswith(incomplete) and _PLAIN.fullmatch(name)})
    except Exception:  # noqa: BLE001 (the shell continues, whatever the error)
        return []


def _run_folders() -> Iterator[str]:
    # Unlike `gym runs list`, not at every depth, since a run may have thousands of files.
    for pattern in ("*/run.json", "*/*/run.json"):
        for file in Path("runs").glob(pattern):
            yield file.parent.as_posix()


def _model_names() -> Iterator[str]:
    from huggingface_hub import constants

    yield "gym-nano"
    yield from _run_folders()
    for folder in Path(constants.HF_HUB_CACHE).glob("models--*"):
        yield folder.name.removeprefix("models--").replace("--", "/")


def _variant_names(store: Path | None) -> list[str]:
    # The store's class would import everything that serves variants.
    import sqlite3

    from gym_fed.serving.store.naming import variants_folder

    file = variants_folder(store).resolve() / "variants.db"
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=0.2)) as database:
        return [str(name) for (name,) in database.execute("SELECT name FROM variants")]


def _suite_names() -> list[str]:
    # Only the first section is parsed, since validating the whole file takes too long for completion.
    import yaml

    file = Path(__file__).parents[1] / "assets" / "suites" / "registry.yaml"
    first = file.read_text(encoding="utf-8").partition("\ntasks:")[0]
    return [str(name) for name in yaml.safe_load(first)["suites"]]
