"""The environment of a run: versions, hardware and git commit, without environment variables, host or user names."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import re
from pathlib import Path
from typing import Any

_PACKAGES = (
    *("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "tokenizers", "numpy"),
    *("gym-fed", "bitsandbytes", "torchao", "deepspeed", "pytorch-optimizer", "liger-kernel", "triton"),
)

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.ASCII)
_REF = re.compile(r"refs/[^\x00-\x20\x7f~^:?*\[\\]{1,200}")
_MOST_READ, _MOST_PACKED = 4096, 1 << 20
"""Maximum number of bytes read from a file in a Git repository."""


def machine_facts() -> dict[str, Any]:
    """Return the environment that may change a program's results, as plain values."""
    import torch

    cuda = torch.cuda.is_available()
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
    }


@functools.cache  # read from a file of the package, twice a run
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
