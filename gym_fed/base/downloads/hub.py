"""Requests to the Hub, or the mirror in ``HF_ENDPOINT``, with bounded responses and errors as ``GymError``.

Uses huggingface_hub's client, tokens, errors and cache; its proxy and offline settings apply.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from gym_fed.base.downloads.limits import MAX_INFO_BYTES as MAX_INFO_BYTES
from gym_fed.base.downloads.limits import READ_SECONDS, SLOWEST_BYTES_PER_SECOND
from gym_fed.base.downloads.requests import answer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain, readable_bytes

Kind = Literal["model", "dataset"]

# Silence retry warnings; a final failure is reported as a ``GymError``.
logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)


def endpoint() -> str:
    """Return the Hub's address, without a trailing slash."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def storage(kind: Kind, name: str) -> Path:
    """Return the repository's folder in the Hugging Face cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=name, repo_type=kind)


def file_url(kind: Kind, name: str, commit: str, path: str) -> str:
    """Return the Hub's URL of a file at a commit."""
    prefix = "datasets/" if kind == "dataset" else ""
    return f"{endpoint()}/{prefix}{name}/resolve/{commit}/{quote(path)}"


def read(place: str, kind: Kind, name: str, *, limit: int) -> bytes:
    """Fetch the response body of ``place``, a path below the endpoint.

    Raises:
        GymError: ``TOO_LARGE`` for more than ``limit`` bytes; ``DEADLINE_EXCEEDED`` if the body arrives too slowly;
            errors of ``hub_errors``.
    """
    with hub_errors(kind, name):
        return _body(place, name, limit)


def _body(place: str, name: str, limit: int) -> bytes:
    from huggingface_hub import constants

    body, began = bytearray(), time.monotonic()
    with answer(f"{endpoint()}/{place}", timeout=constants.HF_HUB_ETAG_TIMEOUT) as response:
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > limit:
                raise GymError(
                    ErrorCode.TOO_LARGE,
                    f"{name}: the response of {endpoint()} to {plain(place, 120)} exceeds {readable_bytes(limit)}",
                    "check HF_ENDPOINT, or choose another repository",
                )
            if time.monotonic() - began > READ_SECONDS + len(body) / SLOWEST_BYTES_PER_SECOND:
                raise GymError(
                    ErrorCode.DEADLINE_EXCEEDED,
                    f"{name}: {endpoint()} sent {readable_bytes(len(body))} in {time.monotonic() - began:.0f} s",
                    "check HF_ENDPOINT, or run the same command again later",
                )
    return bytes(body)


@contextmanager
def hub_errors(kind: Kind, name: str) -> Iterator[None]:
    """Convert huggingface_hub's exceptions to a ``GymError`` with the repository, the endpoint and a remedy.

    Raises:
        GymError: ``UNAVAILABLE`` offline, or if the Hub fails; ``PERMISSION_DENIED`` for a gated or disabled
            repository and for 403; ``UNAUTHENTICATED`` for a rejected token; ``STALE`` for a commit that no longer
            exists; ``MODEL_NOT_FOUND`` or ``NOT_FOUND``; ``BUSY`` for too many requests.
    """
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise GymError(
            ErrorCode.UNAVAILABLE,
            f"{name}: is not on this machine, but HF_HUB_OFFLINE forbids requests to {endpoint()}",
            f"unset HF_HUB_OFFLINE; {alternatives(kind, name)}",
        ) from error
    except errors.GatedRepoError as error:
        raise _gated(kind, name) from error
    except errors.RevisionNotFoundError as error:
        raise GymError(
            ErrorCode.STALE,
            f"{name}: {endpoint()} no longer has the commit that it offered",
            "run the same command again to get a new offer",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise _not_found(kind, name) from error
    except errors.HfHubHTTPError as error:
        raise _refused(kind, name, error.response.status_code) from error
    except (httpx2.RequestError, httpx2.InvalidURL) as error:
        raise GymError(
            ErrorCode.UNAVAILABLE,
            f"{name}: no local folder has this name, the local cache does not have the whole repository, "
            f"and {endpoint()} cannot be reached: {_line(error)}",
            f"run the same command again when online, to resume; {alternatives(kind, name)}",
        ) from error


@dataclass(frozen=True)
class FoundModel:
    """A model that a search of the Hub found.

    Attributes:
        name: Repository name, ``owner/name``.
        bytes: Size of the safetensors weights; None if the Hub does not state it.
        downloads: Downloads of the last 30 days; None if the Hub does not state them.
        gated: True if an account must accept terms first.
    """

    name: str
    bytes: int | None
    downloads: int | None
    gated: bool


def search_models(query: str, limit: int = 20) -> list[FoundModel]:
    """Search the Hub for models that write text, most downloaded first.

    Raises:
        GymError: ``UNAVAILABLE`` if the Hub does not answer as a Hub does; errors from ``read``.
    """
    place = (
        f"api/models?search={quote(query[:96], safe='')}&filter=text-generation&sort=downloads&limit={limit}"
        "&expand[]=safetensors&expand[]=downloads&expand[]=gated"
    )
    try:
        rows = json.loads(read(place, "model", query, limit=MAX_INFO_BYTES))
    except (ValueError, RecursionError) as error:
        raise GymError(
            ErrorCode.UNAVAILABLE, f"{endpoint()} did not return JSON for a search", "check HF_ENDPOINT"
        ) from error
    objects = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [_parse_model(row) for row in objects if isinstance(row.get("id"), str)][:limit]


def _parse_model(row: dict[str, Any]) -> FoundModel:
    weights = row.get("safetensors")
    counts = weights.get("parameters") if isinstance(weights, dict) else None
    size = None
    if isinstance(counts, dict) and all(type(count) is int and count >= 0 for count in counts.values()):
        size = sum(math.ceil(count * _bits_of(str(dtype)) / 8) for dtype, count in counts.items())
    downloads = row.get("downloads")
    return FoundModel(
        plain(row["id"], 200),
        size,
        downloads if type(downloads) is int else None,
        row.get("gated", False) is not False,
    )


def _bits_of(dtype: str) -> int:
    """Return the bits per value of a safetensors type by its name, such as 16 for ``BF16``; 32 if unknown."""
    number = re.match(r"[A-Z]+(\d+)", dtype)
    return int(number[1]) if number and int(number[1]) <= 64 else 8 if dtype == "BOOL" else 32


def alternatives(kind: Kind, name: str) -> str:
    """Return a hint for working without the Hub: use a local model folder, or a cached dataset."""
    if kind == "dataset":
        folder = storage(kind, name)
        return (
            f"or fetch it on another machine with: hf download --repo-type dataset {name} --cache-dir FOLDER, and copy "
            f"FOLDER/{folder.name} with its links (cp -a) to {folder}; or use your own files with path; or set "
            "HF_ENDPOINT to a mirror"
        )
    return (
        f"or fetch it on another machine with: hf download {name} --local-dir FOLDER, copy FOLDER here and use it "
        "instead; or set HF_ENDPOINT to a mirror"
    )


def cached_dataset(name: str) -> str | None:
    """Return the snapshot folder of a dataset in the Hugging Face cache; None if it is not cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def page(kind: Kind, name: str) -> str:
    """Return the URL of the repository's web page."""
    return f"{endpoint()}/{'datasets/' if kind == 'dataset' else ''}{name}"


def _gated(kind: Kind, name: str) -> GymError:
    from huggingface_hub.utils import get_token  # type: ignore[attr-defined]  # exported lazily

    token = "the account of the token that is set has no access" if get_token() else "no token is set"
    return GymError(
        ErrorCode.PERMISSION_DENIED,
        f"{name}: is gated: only accounts that accepted its terms have access, and {token}",
        f"accept them at {page(kind, name)}, set HF_TOKEN to a token of that account, and run the same command again",
    )


def _not_found(kind: Kind, name: str) -> GymError:
    code, noun = (ErrorCode.NOT_FOUND, "dataset")
    if kind == "model":
        code, noun = ErrorCode.MODEL_NOT_FOUND, "model"
    near = _near_names(kind, name)
    hint = f"did you mean {', '.join(near)}? Otherwise for" if near else "check the name; for"
    message = f"no {noun} called {name!r} on this machine or at {endpoint()}"
    return GymError(code, message, f"{hint} a private one, set HF_TOKEN")


def _near_names(kind: Kind, name: str) -> list[str]:
    """Return names on the Hub similar to ``name``; empty if the search fails."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    owner, _, last = name.rpartition("/")
    by_key: dict[str, str] = {}
    for query in dict.fromkeys(word for word in (last, last.split("-")[0], owner) if word):
        try:
            rows = json.loads(_body(f"api/{kind}s?search={quote(query[:96])}&limit=50", name, MAX_INFO_BYTES))
        except (
            httpx2.HTTPError,
            httpx2.InvalidURL,
            HfHubHTTPError,
            OfflineModeIsEnabled,
            GymError,
            ValueError,
            RecursionError,
        ):
            return []
        for row in rows if isinstance(rows, list) else []:
            if isinstance(row, dict) and isinstance(row.get("id"), str):
                shown = plain(row["id"], 100)
                by_key.setdefault(shown.lower(), shown)
    keys = difflib.get_close_matches(name.lower(), by_key, n=3, cutoff=0.6)
    if not keys and not owner:
        keys = difflib.get_close_matches(last.lower(), [key.rpartition("/")[2] for key in by_key], n=3)
        keys = [key for key in by_key if key.rpartition("/")[2] in keys][:3]
    return [by_key[key] for key in keys]


def _refused(kind: Kind, name: str, status: int) -> GymError:
    if status == 401:
        return GymError(
            ErrorCode.UNAUTHENTICATED,
            f"{name}: {endpoint()} does not accept the token that is set",
            "set HF_TOKEN to a valid token, or unset it; `hf auth login` stores one",
        )
    if status == 403:
        return GymError(
            ErrorCode.PERMISSION_DENIED,
            f"{name}: {endpoint()} refuses access to this account or token",
            f"see {page(kind, name)}, and set HF_TOKEN to a token with read access",
        )
    if status == 429:
        return GymError(
            ErrorCode.BUSY,
            f"{name}: {endpoint()} reports too many requests from this machine",
            "wait, then run the same command again",
        )
    return GymError(
        ErrorCode.UNAVAILABLE,
        f"{name}: {endpoint()} returned status {status}",
        f"run the same command again later; {alternatives(kind, name)}",
    )


def _line(error: Exception) -> str:
    return plain(str(error).strip().partition("\n")[0] or type(error).__name__, 200)
