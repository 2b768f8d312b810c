"""The base of `gym soup merge`: the one that the updates name, found on this machine and held against its digest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.models import LoadedModel

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
"""What may be looked up: one word, or an owner and a name. A file that somebody sent names no path of this machine."""


def base_of(updates: Sequence[str], base: str | None) -> tuple[LoadedModel, BaseSpec]:
    """Load the base that is given, or that the updates were made for.

    A ``.gymdelta`` names its base and the digest of its weights, a LoRA run where its base lies. Looked at are, in this
    order, gym-nano, a folder of that name here or beside the updates, and the Hugging Face cache, there by the last
    part of the name and by revision too. The digest decides.

    Args:
        updates: As given to the command; those that cannot be read name nothing.
        base: A model folder or name, or None.

    Raises:
        GymError: ``USAGE`` when nothing names a base, ``BASE_MISMATCH`` when the updates name different ones,
            ``MODEL_NOT_FOUND`` naming the base and where it was looked for.
    """
    from gym_fed.delta.base import BaseSpec
    from gym_fed.models import load_model, model_name

    if base is not None:
        loaded = load_model(base)
        return loaded, BaseSpec.of(loaded.model, model_name(base))
    named, run_base = _named(updates)
    if named is None:
        if run_base is None:
            raise GymError(
                ErrorCode.USAGE,
                "no update names its base: there is no .gymdelta that can be read, and no LoRA run",
                "name the base they were made from with --base",
            )
        loaded = load_model(run_base)
        return loaded, BaseSpec.of(loaded.model, model_name(run_base))
    name, digest = named
    tried: list[str] = []
    for candidate in _candidates(name, updates, run_base):
        try:
            loaded = load_model(candidate)
        except GymError as error:
            tried.append(f"{candidate}: {error.message}")
            continue
        spec = BaseSpec.of(loaded.model, name)
        if spec.digest == digest:
            return loaded, spec
        tried.append(f"{candidate}: has the digest {spec.digest[:19]}...")
    looked = "; ".join(tried) or "nothing of that name here, beside the updates or in the Hugging Face cache"
    raise GymError(
        ErrorCode.MODEL_NOT_FOUND,
        f"the updates were made for base {_short(name)} with digest {digest}, which is not on this machine ({looked})",
        "give its folder or name with --base"
        + (f", or fetch it once with: hf download {name}" if "/" in name and _NAME.fullmatch(name) else ""),
    )


def _named(updates: Sequence[str]) -> tuple[tuple[str, str] | None, str | None]:
    """Name and digest of the base of all deltas, and where a LoRA run has its base; None for what nobody says."""
    from gym_fed.delta.file import DeltaFile

    found: dict[str, tuple[str, str]] = {}
    run_base: str | None = None
    for update in updates:
        path = Path(update).expanduser()
        adapter = path / "adapter_config.json"
        if adapter.is_file():
            run_base = run_base or _base_of_run(adapter)
        elif path.is_file():
            try:
                with DeltaFile.open(path) as delta:
                    found.setdefault(delta.manifest.base_digest, (update, delta.manifest.base_model))
            except GymError:
                continue  # opened again with the others, where it is refused by name, or left out by --skip-broken
    if len(found) > 1:
        (one, (first, name)), (other, (second, another)) = list(found.items())[:2]
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"{first} was made for base {_short(name)} with digest {one}, {second} for {_short(another)} with digest "
            f"{other}",
            "merge updates of one base",
        )
    for digest, (_, name) in found.items():
        return (name, digest), run_base
    return None, run_base


def _base_of_run(adapter: Path) -> str | None:
    try:
        name = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None  # loading the run says what is wrong with it
    return str(name) if name else None


def _candidates(name: str, updates: Sequence[str], run_base: str | None) -> Iterator[str]:
    """Models of this machine that may be the base, each once."""
    from gym_fed.models import NANO

    places: list[str] = []
    if _NAME.fullmatch(name):
        folders = [Path(), *(Path(update).expanduser().parent for update in updates)]
        if name == NANO:
            places.append(NANO)
        places += [str(folder / name) for folder in folders if (folder / name / "config.json").is_file()]
        places += _cached(name)
    yield from dict.fromkeys([*places, *([run_base] if run_base else [])])


def _cached(name: str) -> list[str]:
    """Names and snapshot folders in the Hugging Face cache that end in ``name``, or have it as their revision."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    found = []
    for repo in sorted(repos, key=lambda repo: str(repo.repo_id)):
        if repo.repo_type != "model":
            continue
        same = name in (repo.repo_id, repo.repo_id.rpartition("/")[2])
        for revision in sorted(repo.revisions, key=lambda revision: -revision.last_modified):
            if same or revision.commit_hash == name:
                found.append(str(revision.snapshot_path))
    return found


def _short(name: str) -> str:
    text = repr(name)
    return text if len(text) <= 80 else f"{text[:77]}..."
