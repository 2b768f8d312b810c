"""`gym models push --to hf`: a folder as the Hugging Face Hub takes it, and its upload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.console import err, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain

if TYPE_CHECKING:
    from gym_fed.registry.signers import Confirm


def push_to_hub(
    name: str,
    model: Path | None,
    output: Path | None,
    *,
    facts: dict[str, Any],
    registry: str | None,
    base: str | None,
    repo: str | None,
    public: bool,
    as_is: bool,
    signer: str | None,
    confirm: Confirm | None,
    as_json: bool,
) -> None:
    """Write the folder of a model, or of a registry's version, and upload it where a repository is named.

    Raises:
        GymError: ``USAGE`` without a folder; as ``hub_folder_of_model``, ``hub_folder_of_version`` and ``upload``.
    """
    from gym_fed.registry import ModelRegistry
    from gym_fed.registry.hub_folder import hub_folder_of_model, hub_folder_of_version
    from gym_fed.registry.hub_upload import require_upload, upload
    from gym_fed.registry.preparing import StatedFacts

    if output is None:
        raise GymError(ErrorCode.USAGE, "--to hf needs a folder", "name it with --output FOLDER")
    if public and repo is None:
        raise GymError(ErrorCode.USAGE, "--public goes with --repo", "leave it out, or name the repository")
    if repo is not None:
        require_upload(repo, output)
    if model is None:
        made = hub_folder_of_version(
            ModelRegistry(registry), name, output, confirm=confirm, signer=signer, base=base, as_is=as_is
        )
    else:
        stated = StatedFacts(base=base, **facts)
        made = hub_folder_of_model(name, model, output, stated, as_is=as_is, note=err.print)
    for problem in made.problems:
        err.print(f"look at: {plain(problem, 500)}")
    commit = None if repo is None else upload(made.folder, repo, public=public)
    place = f"; it is at {commit}" if commit else ""
    print_result(
        as_json,
        {
            "name": name,
            "folder": str(made.folder),
            "files": made.files,
            "kind": made.manifest.kind,
            "problems": made.problems,
            "repo": repo,
            "commit": commit,
        },
        f"{made.folder}: {counted(len(made.files), 'file')} for the Hub{place}",
        note="" if commit else f"upload it with: hf upload OWNER/NAME {made.folder} .",
    )
