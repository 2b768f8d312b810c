"""Make a run repeatable on one machine, and record its environment.

``environment.json`` holds versions, hardware, git commit and digests, but no environment variables, host or user names,
or paths. A resume in another environment warns of the differences, since results may differ too.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.files import write_atomically

if TYPE_CHECKING:
    from gym_fed.config.train.run import Reproducibility
    from gym_fed.config.train.training import TrainingConfig

_PACKAGES = (
    *("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "tokenizers", "numpy"),
    *("gym-fed", "bitsandbytes", "torchao", "deepspeed", "pytorch-optimizer", "liger-kernel", "triton"),
)

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.ASCII)
_REF = re.compile(r"refs/[^\x00-\x20\x7f~^:?*\[\\]{1,200}")
_MOST_READ, _MOST_PACKED = 4096, 1 << 20
"""Maximum bytes that are read from a file in a Git repository."""


class RunWarning(UserWarning):
    """A warning about a run that continues."""


@contextmanager
def deterministic(settings: Reproducibility) -> Iterator[None]:
    """Apply ``settings.deterministic`` to torch within a context; enter it before CUDA is first used.

    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    import torch

    if settings.deterministic is False:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", settings.cublas_workspace)
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
    )
    torch.use_deterministic_algorithms(True, warn_only=settings.deterministic == "warn")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[2:]


def record_environment(folder: Path, config: TrainingConfig, data_digest: str) -> None:
    """Write ``environment.json``; on a resume warn of differences from it and add them to it."""
    if not config.reproducibility.record:
        return
    file = folder / "environment.json"
    now = environment(config, data_digest)
    if file.exists():
        record = json.loads(file.read_text(encoding="utf-8"))
        last = {**record["environment"], **(record["resumed_with"][-1] if record["resumed_with"] else {})}
        # The run folder compares config and data itself.
        changed = {k: v for k, v in now.items() if last.get(k) != v and not k.endswith("_sha256")}
        if not changed:
            return
        differences = "; ".join(_difference(key, last.get(key), value) for key, value in changed.items())
        warnings.warn(
            f"{folder}: resumed in another environment, so results may differ: {differences}",
            RunWarning,
            stacklevel=2,
        )
        record["resumed_with"].append(changed)
    else:
        record = {"environment": now, "resumed_with": []}
    write_atomically(file, f"{json.dumps(record, indent=2)}\n".encode())


def environment(config: TrainingConfig, data_digest: str) -> dict[str, Any]:
    """Return the environment that may change a run's results, as plain values."""
    import torch

    cuda = torch.cuda.is_available()
    settings = config.model_dump(mode="json", exclude={"output_dir"})
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "cuda": torch.version.cuda if cuda else None,
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "git": _git(),
        "deterministic": config.reproducibility.deterministic,
        "seed": config.seed,
        "config_sha256": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        "data_sha256": data_digest,
    }


def _difference(key: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        return ", ".join(
            f"{name} was {old.get(name)} and is {new.get(name)}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        )
    return f"{key} was {old} and is {new}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    file = Path("/proc/cpuinfo")
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _git() -> dict[str, str] | None:
    """Return the commit of the working directory; None outside a repository.

    It is read from files: ``git`` executes programs that a repository's config names (``core.fsmonitor``, filters), and
    the working directory may be untrusted.
    """
    try:
        here = Path.cwd()
        folder = next((at / ".git" for at in (here, *here.parents) if (at / ".git").exists()), None)
        if folder is None:
            return None
        if folder.is_file():  # a work tree's file names the folder
            folder = folder.parent / _line(folder).removeprefix("gitdir: ")
        head = _line(folder / "HEAD")
        commit = head if not head.startswith("ref: ") else _commit_of(folder, head.removeprefix("ref: "))
    except OSError:
        return None
    return {"commit": commit} if commit is not None and _COMMIT.fullmatch(commit) else None


def _commit_of(folder: Path, ref: str) -> str | None:
    """Return the commit that a branch points to."""
    if not _REF.fullmatch(ref) or ".." in ref:
        return None
    common = folder / _line(folder / "commondir") if (folder / "commondir").is_file() else folder
    for place in (folder, common):
        if (place / ref).is_file():
            return _line(place / ref)
    packed = common / "packed-refs"
    if not packed.is_file():
        return None
    with packed.open("rb") as opened:
        lines = opened.read(_MOST_PACKED).decode("utf-8", "replace").splitlines()
    return next((line.split(" ")[0] for line in lines if line.endswith(f" {ref}")), None)


def _line(file: Path) -> str:
    if not file.is_file():  # opening a pipe would block
        raise FileNotFoundError(file)
    with file.open("rb") as opened:
        return opened.read(_MOST_READ).decode("utf-8", "replace").strip()
