"""List the models on this machine: gym-nano, the Hugging Face cache, and imports from other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def local_models() -> list[dict[str, Any]]:
    """Return one row per model: ``{name, where, bytes, commit, whole, folder, version, problem}``."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    from gym_fed.base.downloads.selection import is_whole
    from gym_fed.base.imports.folder import imported_models
    from gym_fed.base.models import NANO, nano_path

    size = sum(file.stat().st_size for file in nano_path().rglob("*") if file.is_file())
    rows = [_row(NANO, "package", size, nano_path())]
    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        repos = frozenset()
    for repo in sorted(repos, key=lambda repo: str(repo.repo_id)):
        if repo.repo_type == "model":
            main = next((revision for revision in repo.revisions if "main" in revision.refs), None)
            row = _row(repo.repo_id, "cache", repo.size_on_disk, main.snapshot_path if main else None)
            row["commit"] = main.commit_hash if main else None
            row["whole"] = main is not None and is_whole(main.snapshot_path)
            rows.append(row)
    return rows + [_row(m.source, f"imported {m.format}", m.bytes, m.folder) for m in imported_models()]


def _row(name: str, where: str, num_bytes: int, folder: Path | None) -> dict[str, Any]:
    return {
        "name": name,
        "where": where,
        "bytes": num_bytes,
        "commit": None,
        "whole": True,
        "folder": None if folder is None else str(folder),
        "version": None,
        "problem": None,
    }
