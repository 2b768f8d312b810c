"""`gym models`: fetch models of the Hub, and list what is on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gym_fed.cli.models.needed import YesOption
from gym_fed.console import AsJson, err, print_json, print_result, print_table

app = typer.Typer(
    help="Fetch models of the Hugging Face Hub, and list those on this machine.", no_args_is_help=True
)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the Hub, such as Qwen/Qwen3-0.6B.")],
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a model, or its newest commit; what is here already is not fetched again. Ctrl-C keeps what came."""
    from gym_fed.downloads import pull_model
    from gym_fed.downloads.terminal import consent, progress

    with progress() as report:
        offer, folder = pull_model(name, consent=consent(yes), report=report)
    print_result(
        as_json,
        {
            "name": name,
            "commit": offer.commit,
            "folder": str(folder),
            "bytes": offer.total_bytes,
            "fetched_bytes": offer.missing_bytes,
            "licence": offer.licence,
        },
        f"{name} is here: {folder}",
        note=f"commit {offer.commit[:12]}; use it as model: {name}",
    )


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the models on this machine: gym-nano, and those in the Hugging Face cache."""
    from gym_fed.tables import TextTable
    from gym_fed.text import readable_bytes

    found = _found()
    if as_json:
        print_json(found)
        return
    table = TextTable("name", "bytes", "commit", "whole")
    for one in found:
        commit = (one["commit"] or "")[:12]
        table.add_row(one["name"], readable_bytes(one["bytes"]), commit, "yes" if one["whole"] else "no")
    print_table(table)
    if not all(one["whole"] for one in found):
        err.print("those that are not whole go on with: gym models pull NAME", style="dim")


def _found() -> list[dict[str, Any]]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    from gym_fed.downloads.selection import is_whole
    from gym_fed.models import NANO, nano_path

    size = sum(file.stat().st_size for file in nano_path().rglob("*") if file.is_file())
    found: list[dict[str, Any]] = [
        {"name": NANO, "bytes": size, "commit": None, "whole": True, "folder": str(nano_path())}
    ]
    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return found
    for repo in sorted(repos, key=lambda repo: str(repo.repo_id)):
        main = next((revision for revision in repo.revisions if "main" in revision.refs), None)
        if repo.repo_type != "model":
            continue
        found.append(
            {
                "name": repo.repo_id,
                "bytes": repo.size_on_disk,
                "commit": None if main is None else main.commit_hash,
                "whole": main is not None and is_whole(main.snapshot_path),
                "folder": None if main is None else str(main.snapshot_path),
            }
        )
    return found
