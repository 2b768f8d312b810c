"""Upload a folder to the Hub as a model repository, with huggingface_hub's client and login."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.base.downloads.hub import endpoint
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.registry.card.readme import is_name_of_the_hub

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

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
            f"--repo {plain(repo, 120)}: is not a valid repository name",
            "OWNER/NAME, as on the Hub",
        )
    if constants.HF_HUB_OFFLINE:
        raise GymError(
            ErrorCode.UNAVAILABLE,
            f"{repo}: HF_HUB_OFFLINE forbids uploads to {endpoint()}",
            f"leave --repo out, and where there is a network: {_by_hand(repo, folder)}",
        )
    if get_token() is None:
        raise GymError(
            ErrorCode.UNAUTHENTICATED,
            f"{repo}: there is no token for {endpoint()}",
            "run `hf auth login`, or set HF_TOKEN to a token that may write",
        )


def upload(folder: Path, repo: str, *, public: bool = False) -> str:
    """Upload all files of a folder in one commit; a missing repository is created.

    Files that the Hub has are not sent again. The Hub checks the card before it accepts the commit.

    Args:
        folder: A folder of ``hub_folder_of_model``.
        repo: ``OWNER/NAME``.
        public: Create a public repository; by default only its owner sees it.

    Returns:
        The address of the commit.

    Raises:
        GymError: As ``require_upload``; ``PERMISSION_DENIED`` or ``UNAUTHENTICATED`` for a token without write access;
            ``DATA_INVALID`` for a card that the Hub refuses; ``UNAVAILABLE``.
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

    again = f"the folder is whole at {folder}: run the same upload again with: {_by_hand(repo, folder)}"
    try:
        yield
    except (errors.HfHubHTTPError, RuntimeError) as error:
        refused = _refusal(error)
        if refused is None:
            raise
        status = refused.response.status_code
        login = f"run `hf auth login` with a token that may write to {repo}; " if status in _CODES else ""
        raise GymError(
            _CODES.get(status, ErrorCode.UNAVAILABLE),
            f"{repo}: {endpoint()} answers with status {status}: {_line(refused)}",
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


def _by_hand(repo: str, folder: Path) -> str:
    return f"hf upload {repo} {folder} ."


def _line(error: Exception) -> str:
    return plain(str(error).strip().partition("\n")[0] or type(error).__name__, 300)
