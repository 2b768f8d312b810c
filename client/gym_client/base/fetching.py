"""Fetch and verify the files of a base model from a hub, with resumable and bounded downloads."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gym_client.hub.transfers import SPARE_BYTES, ObjectCache, Progress, download
from gym_client.hub.transport import HubClient
from gym_fed.base.files import (
    MAX_FILES,
    MAX_TENSORS,
    BaseFile,
    check_listing,
    check_settings,
    listing_sha256,
    most_bytes,
)
from gym_fed.base.modeling.config_checks import load_config, require_harmless
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.files import file_sha256, fsync_folder
from gym_fed.core.json_files import read_object
from gym_fed.core.text import counted, plain, readable_bytes
from gym_fed.trust.wire.limits import CALL_SECONDS
from gym_fed.trust.wire.v1 import hub_pb2 as pb

_SPARE_VALUES = 1 << 24
"""Maximum number of values in buffers that are not stored in any file, such as position tables."""


MAX_VALUE = 1 << 30
"""Maximum integer in a config; public models need at most tens of millions (positions, RoPE)."""
MAX_EXPERTS = 4096
_LAYERS = re.compile(r"(^|_)(n|num)_(.*_)?(layer|block|stage)s?$|depth", re.ASCII)
_EXPERTS = re.compile(r"(^|_)(n|num)_(.*_)?experts?$", re.ASCII)

_DIGEST_BYTES = 16
_MAX_BYTES = 64 << 20
"""Maximum size of a listing in bytes; one with 20,000 tensors has about 2 MB."""


@dataclass(frozen=True)
class Listing:
    """The hub's list of base files, and the 16-byte digests of the base's tensors. Either may be empty."""

    files: tuple[BaseFile, ...]
    tensors: Mapping[str, bytes]

    def require(self, sha256: str, size_bytes: int) -> None:
        """Check that this is the offered list of files and that the files may be transferred.

        Raises:
            GymError: ``HASH_MISMATCH`` for a different list; ``MODEL_INVALID`` as in ``check_listing``.
        """
        check_listing(self.files, "the hub")
        total = sum(file.size_bytes for file in self.files)
        if listing_sha256(self.files) != sha256 or total != size_bytes:
            raise GymError(
                ErrorCode.HASH_MISMATCH,
                f"the hub now lists other files for its base ({counted(total, 'byte')}) than it offered "
                f"({counted(size_bytes, 'byte')})",
                "join again to see the new offer",
            )


def read_listing(client: HubClient) -> Listing:
    """Request the listing of a hub's base model.

    Raises:
        GymError: ``TOO_LARGE`` if it exceeds the size limit; ``UNAVAILABLE`` if the connection breaks.
    """
    files: list[BaseFile] = []
    tensors: dict[str, bytes] = {}
    num_bytes = 0
    call = client.stream("Base", pb.BaseRequest(), CALL_SECONDS)
    try:
        with client.errors():
            for part in call:
                num_bytes += part.ByteSize()
                files += [BaseFile(file.name, file.size_bytes, file.sha256) for file in part.files]
                tensors |= {tensor.name: tensor.digest[:_DIGEST_BYTES] for tensor in part.tensors}
                if len(files) > MAX_FILES or len(tensors) > MAX_TENSORS or num_bytes > _MAX_BYTES:
                    raise GymError(
                        ErrorCode.TOO_LARGE,
                        f"{client.address} lists more for its base than {MAX_FILES} files, {MAX_TENSORS} tensors or "
                        f"{readable_bytes(_MAX_BYTES)}",
                    )
    finally:
        call.cancel()
    return Listing(tuple(files), tensors)


def differences(listing: Listing, tensors: Mapping[str, bytes], folder: Path | None) -> str:
    """Describe how a local model differs from the hub's base; empty if the differences are unknown.

    Args:
        listing: The hub's listing.
        tensors: Digests of the local model's tensors, from ``digests_by_tensor``.
        folder: Folder of the local model; None if unknown.
    """
    if listing.tensors:
        theirs, names = listing.tensors, sorted(listing.tensors.keys() | tensors.keys())
        unlike = [name for name in names if theirs.get(name) != tensors.get(name)]
        return _in_words(unlike, len(names), theirs, tensors) if unlike else ""
    for file in listing.files if folder is not None else ():
        if not most_bytes(file.name) or not file.name.endswith(".safetensors"):
            continue
        path = Path(folder or "") / file.name
        if not path.is_file() or path.stat().st_size != file.size_bytes or file_sha256(path) != file.sha256:
            return f"{path} is missing, or differs from the hub's file"
    return ""


def _in_words(unlike: list[str], count: int, theirs: Mapping[str, bytes], ours: Mapping[str, bytes]) -> str:
    first = unlike[0]
    how = "differs in values, dtype or shape"
    if first not in ours:
        how = "is not in the local model"
    elif first not in theirs:
        how = "is not in the hub's base"
    more = f"; {len(unlike)} of {count} tensors differ" if len(unlike) > 1 else ""
    return f"tensor {plain(first, 140)!r} {how}{more}"


T = TypeVar("T")


def fetch_files(
    client: HubClient,
    folder: Path,
    files: Sequence[BaseFile],
    retry: Callable[[Callable[[], Path]], Path],
    progress: Progress,
    should_stop: Callable[[], bool],
    count: Callable[[int], None],
) -> None:
    """Download the files that are missing from ``folder``; call again to resume.

    Args:
        client: Client of the hub; the caller must have an account there.
        folder: A folder that is used only for this base: files that are not in the listing are deleted.
        files: The verified listing.
        retry: Retries a download while the hub is unreachable.
        progress: Called with downloaded and total bytes.
        should_stop: Checked between chunks; True stops the download.
        count: Called with the number of bytes of each received chunk.

    Raises:
        GymError: ``DISK_FULL`` before the download; ``HASH_MISMATCH``; ``TOO_LARGE``; ``INTERRUPTED``;
            ``MODEL_INVALID`` for JSON files that refer to code or to other files.
    """
    missing = [file for file in files if not _is_here(folder, file)]
    _delete_strangers(folder, files, missing)
    total = sum(file.size_bytes for file in files)
    done = total - sum(file.size_bytes for file in missing)
    _require_space(folder, missing)
    cache = ObjectCache(folder)
    progress(done, total)
    for file in missing:

        def bring(file: BaseFile = file, before: int = done) -> Path:
            def on_chunk(come: int, _: int) -> None:
                progress(before + come, total)
                failpoint("client-base-chunk")

            return download(client, cache, file.sha256, file.size_bytes, on_chunk, should_stop, count, "base")

        os.replace(retry(bring), folder / file.name)
        done += file.size_bytes
    fsync_folder(folder)
    check_settings(folder, [file.name for file in files])


def _is_here(folder: Path, file: BaseFile) -> bool:
    path = folder / file.name
    if not path.is_file() or path.is_symlink() or path.stat().st_size != file.size_bytes:
        return False
    return file_sha256(path) == file.sha256


def _delete_strangers(folder: Path, files: Sequence[BaseFile], missing: Sequence[BaseFile]) -> None:
    """Delete damaged files, and files that are not in the listing."""
    lacking = {file.name for file in missing}
    keep = {file.name for file in files if file.name not in lacking}
    keep |= {f"{file.sha256}.part" for file in missing}
    for path in folder.iterdir():
        if path.name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _require_space(folder: Path, missing: Sequence[BaseFile]) -> None:
    here = sum(path.stat().st_size for path in folder.glob("*.part"))
    needed = sum(file.size_bytes for file in missing) - here
    free = shutil.disk_usage(folder).free
    if needed > 0 and free < needed + SPARE_BYTES:
        raise GymError(
            ErrorCode.DISK_FULL,
            f"the base needs {readable_bytes(needed)} more in {folder}, but only {readable_bytes(free)} are free",
            "free some space, or use a home on another disk with --home",
        )


def require_own_weights(folder: Path, names: Sequence[str]) -> None:
    """Check that the model in ``config.json`` is no larger than the weight files in the folder.

    Loading allocates every tensor that the config describes, even if no file contains it. A config of a few bytes could
    therefore exhaust memory.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    from safetensors import SafetensorError, safe_open

    num_values = num_tensors = 0
    for name in names:
        if not name.endswith(".safetensors"):
            continue
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (it is not a dict)
                    num_values += math.prod(file.get_slice(key).get_shape())
                    num_tensors += 1
        except SafetensorError as error:
            raise _invalid(f"{name} is not a weight file: {error}") from error
    _require_bounded(read_object(folder / "config.json"), num_tensors)
    require_harmless(folder)
    num_described = _values_of(folder)
    if num_described > num_values + _SPARE_VALUES:
        raise _invalid(
            f"config.json describes {counted(num_described, 'value')}, but the weight files have {num_values}"
        )


def _require_bounded(config: object, num_tensors: int) -> None:
    """Reject layer and expert counts that do not match the number of tensors, since they could exhaust memory."""
    waiting = [config]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(node)
            continue
        for key, value in node.items() if isinstance(node, dict) else ():
            waiting.append(value)
            most = MAX_VALUE
            if _LAYERS.search(key):
                most = num_tensors
            elif _EXPERTS.search(key):
                most = MAX_EXPERTS
            if isinstance(value, int) and abs(value) > most:
                raise _invalid(f"{plain(key, 80)} in config.json is {value:.6g}; at most {most} is allowed")


def _values_of(folder: Path) -> int:
    """Return the number of values in the parameters and buffers of a folder's model, without allocating them."""
    import torch

    from gym_fed.base.models import quiet_loading
    from gym_fed.training.planning.sizes import model_of

    with quiet_loading():
        try:
            config = load_config(folder)
            with torch.device("meta"):
                model = model_of(config)
        except Exception as error:
            raise _invalid(f"config.json does not describe a model: {plain(error, 200)}") from error
    return sum(value.numel() for value in (*model.parameters(), *model.buffers()))


def _invalid(problem: str) -> GymError:
    hint = "report it to the coordinator"
    return GymError(ErrorCode.MODEL_INVALID, f"the base that the hub sent: {problem[:300]}", hint)
