"""Suggest the next command after train, chat, eval, export, webui and variant create."""

from __future__ import annotations

import shlex
from pathlib import Path

from gym_fed.core.console import err

SUITE = "tiny"
"""A suite of `gym eval` that needs no download."""


def print_next(what: str) -> None:
    """Print the next command, or how to use the result, to standard error; not with ``--json``."""
    if what:
        err.print(f"next: {what}", style="dim")


def command(*words: str | Path | None) -> str:
    """Quote a command for a shell; words that are None are left out."""
    return shlex.join(str(word) for word in words if word is not None)


def after_chat(model: str, variant: str | None, store: Path | None) -> str:
    """Suggest evaluating the user's own model, or creating a variant of any other."""
    if variant is not None or Path(model).exists():
        return command("gym", "eval", model, *_store_options(variant, store), "--suite", SUITE)
    return command("gym", "variant", "create", "--base", model, "--data", "my.jsonl", "--user", "ada")


def after_eval(model: str, variant: str | None, store: Path | None) -> str:
    """Suggest exporting the model that was evaluated."""
    named = variant or Path(model).name.partition(":")[2] or Path(model).stem
    return command("gym", "export", model, *_store_options(variant, store), "-o", f"exported/{named}")


def after_create(base: str, variant: str, store: Path | None, *, is_chat: bool) -> str:
    """Suggest `gym chat` for a variant trained on chats, and `gym api` for one trained on plain text."""
    if is_chat:
        return command("gym", "chat", base, *_store_options(variant, store))
    return command("gym", "api", "--base", base, *(() if store is None else ("--variants", store)))


def after_webui(runs: Path) -> str:
    """Suggest chatting with the newest finished run, or training the first one."""
    finished = [
        path
        for path in runs.rglob("result.json")
        if any(path.with_name(name).is_file() for name in ("config.json", "adapter_config.json"))
    ]
    if finished:
        return command("gym", "chat", max(finished, key=lambda path: path.stat().st_mtime).parent)
    return command("gym", "train", "--model", "gym-nano", "--data", "my.jsonl")


def _store_options(variant: str | None, store: Path | None) -> tuple[str | Path, ...]:
    named = () if variant is None else ("--variant", variant)
    return named if store is None else (*named, "--variants", store)
