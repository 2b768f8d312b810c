"""List the models on this machine: gym-nano, the Hugging Face cache, and imports from other formats."""

from __future__ import annotations

from typing import Any


def local_models() -> list[dict[str, Any]]:
    """Return one row per model: ``{name, where, bytes, commit, whole, folder, version, problem}``."""
    return [*_cached(), *_imported()]


def _cached() -> list[dict[str, Any]]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    from gym_fed.base.downloads.selection import is_whole
    from gym_fed.base.models import NANO, nano_path

    size = sum(file.stat().st_size for file in nano_path().rglob("*") if file.is_file())
    rows: list[dict[str, Any]] = [_row(NANO, "package", size, None, True, str(nano_path()))]
    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return rows
    for repo in sorted(repos, key=lambda repo: str(repo.repo_id)):
        main = next((revision for revision in repo.revisions if "main" in revision.refs), None)
        if repo.repo_type != "model":
            continue
        rows.append(
            _row(
                repo.repo_id,
                "cache",
                repo.size_on_disk,
                None if main is None else main.commit_hash,
                main is not None and is_whole(main.snapshot_path),
                None if main is None else str(main.snapshot_path),
            )
        )
    return rows


def _imported() -> list[dict[str, Any]]:
    """Return imports from other formats by source file; a removed folder is recreated when needed."""
    from gym_fed.base.imports.folder import imported_models

    return [
        _row(model.source, f"imported {model.format}", model.bytes, None, True, str(model.folder))
        for model in imported_models()
    ]


def _row(
    name: str, where: str, num_bytes: int, commit: str | None, whole: bool, folder: str | None
) -> dict[str, Any]:
    return {
        "name": name,
        "where": where,
        "bytes": num_bytes,
        "commit": commit,
        "whole": whole,
        "folder": folder,
        "version": None,
        "problem": None,
    }
