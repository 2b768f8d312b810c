"""Write a model as a repository of the Hub (weights or adapter, tokenizer, card, licence, results), and upload it.

A delta is merged into its base unless `as_is`, since nothing on the Hub reads deltas.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from gym_fed.base.downloads.hub import endpoint
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.files import whole_or_not_at_all, write_atomically
from gym_fed.core.text import plain
from gym_fed.evaluation.records.document import HubDataset, eval_results_yaml
from gym_fed.evaluation.results import EvalResults, Figure, TaskResult
from gym_fed.evaluation.suites.definitions import members
from gym_fed.evaluation.suites.store import listing
from gym_fed.registry.card.facts import EVALS, CardFigure, figures_in
from gym_fed.registry.card.readme import conflicts, is_name_of_the_hub
from gym_fed.registry.contents import base_model, rebuild
from gym_fed.registry.fetching import RECORD
from gym_fed.registry.manifest import DELTA_FILE, ModelManifest
from gym_fed.registry.models import ModelRegistry
from gym_fed.registry.preparing import Note, StatedFacts, prepared
from gym_fed.registry.signers import Confirm

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError


@dataclass(frozen=True)
class HubFolder:
    """A folder that is ready to be uploaded.

    Attributes:
        manifest: The manifest of the model; its number, sizes and digests are valid only for a version of a registry.
        problems: Points to check before publishing, one sentence each.
        kept: Share of a merged delta in the weights; 1 for an adapter or an unmerged delta; None for weights.
    """

    folder: Path
    manifest: ModelManifest
    problems: list[str]
    kept: float | None

    @property
    def files(self) -> list[str]:
        """The paths in the folder, sorted."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in paths)


def hub_folder_of_model(
    name: str,
    model: Any,
    folder: str | Path,
    stated: StatedFacts,
    *,
    as_is: bool = False,
    note: Note = lambda line: None,
) -> HubFolder:
    """Write a model of this machine.

    Args:
        name: The title of the card; as for ``ModelRegistry.push``.
        model: See ``ModelRegistry.push``.
        folder: The target folder, which must be missing or empty.
        stated: Facts stated by the user.
        as_is: True to keep a delta as a ``.gymdelta``.
        note: Called with the names of omitted files.

    Raises:
        GymError: ``FILE_EXISTS``; as ``prepared`` and ``rebuild``; ``MODEL_NOT_FOUND`` for a base that is not here.
    """
    target = _free(folder)
    with prepared(name, model, stated, note=note) as ready:
        base = stated.base or (ready.draft.base.name if ready.draft.base is not None else None)
        return _written(ready.draft, ready.files, target, None if as_is else base)


def hub_folder_of_version(
    registry: ModelRegistry,
    reference: str,
    folder: str | Path,
    *,
    confirm: Confirm | None = None,
    signer: str | None = None,
    base: str | None = None,
    as_is: bool = False,
) -> HubFolder:
    """Write a version of a registry, with its signed manifest as ``.gym-model.json``.

    Raises:
        GymError: ``FILE_EXISTS``; as ``ModelRegistry.pull``.
    """
    target = _free(folder)
    version = registry.trusted(reference, confirm=confirm, signer=signer)
    used = None
    if version.manifest.kind == "delta" and not as_is:
        used = registry.base_of(version, base, confirm)
    with tempfile.TemporaryDirectory() as scratch:
        pulled = registry.fetch(version.reference, Path(scratch) / "model", signer=signer, as_is=True).folder
        files = {path: pulled / path for path in (RECORD, *(file.path for file in version.manifest.files))}
        return _written(version.manifest, files, target, used)


def _written(manifest: ModelManifest, files: Mapping[str, Path], target: Path, base: str | None) -> HubFolder:
    records = [file for path, file in files.items() if path.startswith(f"{EVALS}/")]
    results = _hub_results(figures_in(records))
    kept = None if manifest.kind == "weights" else 1.0
    with whole_or_not_at_all(target) as part:
        for path, file in files.items():
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, part / path)
        if manifest.kind == "delta" and base is not None:
            assert manifest.base is not None
            loaded = base_model(base, manifest.base.digest or "")
            kept = rebuild(loaded, part / DELTA_FILE, manifest.digest, part)
        for path, text in results.items():
            (part / path).parent.mkdir(exist_ok=True)
            write_atomically(part / path, text.encode())
        failpoint("registry-hub-folder-written")
    return HubFolder(target, manifest, [*conflicts(manifest), *_problems(manifest)], kept)


def _problems(manifest: ModelManifest) -> list[str]:
    """Return problems that readers of the folder on the Hub would have."""
    if manifest.kind != "adapter" or manifest.base is None or is_name_of_the_hub(manifest.base.name):
        return []
    return [
        f"base {manifest.base.name} is not a name on the Hub, so PEFT cannot find the adapter's base: pass --base "
        "OWNER/NAME"
    ]


def _free(folder: str | Path) -> Path:
    target = Path(folder).expanduser()
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
        raise GymError(
            ErrorCode.FILE_EXISTS, f"{target} exists, but is not an empty folder", "choose another with -o"
        )
    return target


FOLDER = ".eval_results"


def _hub_results(figures: Sequence[CardFigure]) -> dict[str, str]:
    """Return YAML by file path, one file for each record with a task whose dataset is on the Hub.

    Figures without a stated number of examples in the prompt are omitted, since they cannot be compared.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` for tasks of the harness if it is not installed.
    """
    files = {}
    for record in dict.fromkeys(figure.record for figure in figures):
        of_it = [item for item in figures if item.record == record and item.num_fewshot is not None]
        tasks = _tasks(of_it)
        if datasets := _hub_datasets(tasks):
            results = EvalResults("", {}, tasks, 0.0)
            text = eval_results_yaml(results, datasets, date=of_it[0].date or None)
            files[f"{FOLDER}/{PurePath(record).stem}.yaml"] = text
    return files


def _hub_datasets(tasks: Iterable[str]) -> dict[str, HubDataset]:
    """Return the Hub datasets of tasks that are not built in."""
    datasets, task_names = {}, list(tasks)
    for name, entry in listing().tasks.items():
        hub = None if entry.dataset is None else listing().datasets[entry.dataset].hub
        if hub is None or not any(task.startswith(name) for task in task_names):
            continue
        for task, (subset, _) in members(name).items():
            if task in task_names:
                datasets[task] = HubDataset(hub, subset or "default")
    return datasets


def _tasks(figures: Sequence[CardFigure]) -> Mapping[str, TaskResult]:
    by_task: dict[str, dict[str, Figure]] = {}
    shots: dict[str, int] = {}
    for card_figure in figures:
        assert card_figure.num_fewshot is not None
        figure = Figure(card_figure.value, card_figure.stderr, card_figure.num_samples or 0, True)
        by_task.setdefault(card_figure.task, {})[card_figure.metric] = figure
        shots[card_figure.task] = card_figure.num_fewshot
    return {task: TaskResult(task, "", shots[task], metrics, (), "") for task, metrics in by_task.items()}


_CODES = {401: ErrorCode.UNAUTHENTICATED, 403: ErrorCode.PERMISSION_DENIED}


def require_upload(repo: str, folder: Path) -> None:
    """Refuse an impossible upload before anything is written.

    Raises:
        GymError: ``USAGE`` for an invalid name; ``UNAVAILABLE`` if ``HF_HUB_OFFLINE`` is set;
            ``UNAUTHENTICATED`` without a token.
    """
    from huggingface_hub import constants, get_token

    if not is_name_of_the_hub(repo):
        raise GymError(
            ErrorCode.USAGE,
            f"--repo {plain(repo, 120)} is not a valid repository name",
            "use OWNER/NAME, as on the Hub",
        )
    if constants.HF_HUB_OFFLINE:
        raise GymError(
            ErrorCode.UNAVAILABLE,
            f"{repo}: HF_HUB_OFFLINE forbids uploads to {endpoint()}",
            f"omit --repo, and run this where there is a network: {_upload_command(repo, folder)}",
        )
    if get_token() is None:
        raise GymError(
            ErrorCode.UNAUTHENTICATED,
            f"{repo}: there is no token for {endpoint()}",
            "run `hf auth login`, or set HF_TOKEN to a token with write access",
        )


def upload(folder: Path, repo: str, *, public: bool = False) -> str:
    """Upload all files of a folder in one commit; a missing repository is created.

    Files that the Hub has are not sent again. The Hub checks the card before it accepts the commit.

    Args:
        folder: A folder of ``hub_folder_of_model``.
        repo: ``OWNER/NAME``.
        public: True to create a public repository; by default only its owner can see it.

    Returns:
        The address of the commit.

    Raises:
        GymError: Errors of ``require_upload``; ``PERMISSION_DENIED`` or ``UNAUTHENTICATED`` for a token without write
            access; ``DATA_INVALID`` for a card that the Hub refuses; ``UNAVAILABLE``.
    """
    from huggingface_hub import HfApi

    require_upload(repo, folder)
    api = HfApi(endpoint=endpoint())
    with _errors(repo, folder):
        api.create_repo(repo, private=not public, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Add the model by gym-fed"
        )
    return str(commit.commit_url)


@contextmanager
def _errors(repo: str, folder: Path) -> Iterator[None]:
    import httpx2
    from huggingface_hub import errors

    again = (
        f"the folder {folder} is complete: run the same upload again with: {_upload_command(repo, folder)}"
    )
    try:
        yield
    except (errors.HfHubHTTPError, RuntimeError) as error:
        refused = _refusal(error)
        if refused is None:
            raise
        status = refused.response.status_code
        login = (
            f"run `hf auth login` with a token that has write access to {repo}; " if status in _CODES else ""
        )
        raise GymError(
            _CODES.get(status, ErrorCode.UNAVAILABLE),
            f"{repo}: {endpoint()} answered with status {status}: {_line(refused)}",
            f"{login}{again}",
        ) from error
    except ValueError as error:  # the Hub's message about the card
        raise GymError(ErrorCode.DATA_INVALID, f"{folder}: {_line(error)}", again) from error
    except (httpx2.RequestError, httpx2.InvalidURL, OSError) as error:
        raise GymError(
            ErrorCode.UNAVAILABLE, f"{repo}: {endpoint()} cannot be reached: {_line(error)}", again
        ) from error


def _refusal(error: BaseException | None) -> HfHubHTTPError | None:
    """Return the Hub's response; huggingface_hub wraps it for large files."""
    from huggingface_hub.errors import HfHubHTTPError

    while error is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    return error


def _upload_command(repo: str, folder: Path) -> str:
    return f"hf upload {repo} {folder} ."


def _line(error: Exception) -> str:
    return plain(str(error).strip().partition("\n")[0] or type(error).__name__, 300)
