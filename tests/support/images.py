"""Images of deploy/docker, built by buildah from Debian's packages, and containers of them with a read-only root.

No registry is asked: the base is made by mmdebstrap as Debian's slim image is, and pip's packages are downloaded first.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BASE = "localhost/gym-fed-base:bookworm"
_SLIM = [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "info", "locale", "man")]
_ENTER = """
set -eu
root=$1; shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
while [ "$1" != -- ]; do
    source=$1; target=$2; shift 2
    mount --bind "$source" "$root$target"
done
shift
mount -o remount,ro,bind "$root"
exec chroot --userspec=10001:10001 "$root" "$@"
"""
"""Enter a root that nobody can write to, as the image's user: ROOT [SOURCE TARGET]... -- COMMAND..."""


def missing() -> str:
    """Why images cannot be built here; empty if they can."""
    absent = [name for name in ("buildah", "mmdebstrap", "unshare") if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "only root can mount the images that it builds"


class Images:
    """A store of images in a folder.

    Args:
        folder: Everything that is downloaded and built.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buildah = ["buildah", "--storage-driver", "overlay"]
        self._buildah += ["--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        self._wheels = folder / "wheels"

    def prepare(self, extras: Sequence[str]) -> None:
        """Make the base and download the packages of the extras, unless the folder has them."""
        if BASE not in self.buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
            self._make_base()
        if not self._wheels.is_dir():
            self._download(extras)

    def _make_base(self) -> None:
        """Import Debian 12 as its slim image is: the essential packages and apt, without documentation."""
        archive = self._folder / "base.tar"
        merged = ["--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", "--include=usr-is-merged"]
        clean = "--customize-hook=rm -rf $1/var/lib/apt/lists/* $1/var/cache/apt/*"
        run("mmdebstrap", "--variant=minbase", *merged, *_SLIM, clean, "bookworm", str(archive))
        container = self.buildah("from", "scratch")
        self.buildah("add", container, str(archive), "/")
        self.buildah("commit", container, BASE)
        self.buildah("rm", container)

    def _download(self, extras: Sequence[str]) -> None:
        """Download what the images of these extras install, and what builds the wheel."""
        wanted = [f"{ROOT}[{','.join(extras)}]", "setuptools", "-r", str(ROOT / "requirements-hub.txt")]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        run(sys.executable, "-m", "pip", "download", "-q", "-d", str(self._wheels), *constraints, *wanted)

    def build(self, target: str) -> str:
        """Build a target of the Dockerfile and return the image's name."""
        packages = ["--build-arg", "PIP_ARGS=--no-index --find-links /wheels"]
        volume = ["--volume", f"{self._wheels}:/wheels:ro"]
        file = ROOT / "deploy" / "docker" / "Dockerfile"
        return self.build_file(file, ROOT, target, f"localhost/gym-fed-{target}:test", *packages, *volume)

    def build_file(self, file: Path, context: Path, target: str, name: str, *options: str) -> str:
        """Build a target of another Dockerfile on the same base, and return the image's name."""
        run(
            *self._buildah,
            *("build", "--isolation", "chroot", "--format", "docker", "--layers", "--target", target),
            *("--build-arg", f"BASE={BASE}", *options, "-f", str(file), "-t", name, "."),
            cwd=context,
        )
        return name

    def save(self, image: str, archive: Path, name: str) -> None:
        """Write an image for ``docker load``, which gives it ``name``."""
        self.buildah("push", image, f"docker-archive:{archive}:{name}")

    def facts(self, image: str) -> dict[str, Any]:
        """Return the image's config and size: ``Config`` as Docker spells it, and ``Size`` in bytes, uncompressed."""
        inspected = json.loads(self.buildah("inspect", "--type", "image", image))
        layers = json.loads(inspected["Manifest"])["layers"]
        return {"Config": inspected["Docker"]["config"], "Size": sum(layer["size"] for layer in layers)}

    @contextmanager
    def container(self, image: str) -> Iterator[Container]:
        """Mount a container of an image."""
        name = self.buildah("from", image)
        try:
            yield Container(Path(self.buildah("mount", name)), self.facts(image)["Config"])
        finally:
            self.buildah("umount", name)
            self.buildah("rm", name)

    def buildah(self, *words: str) -> str:
        return run(*self._buildah, *words).strip()

    def close(self) -> None:
        self.buildah("rm", "--all")
        self.buildah("rmi", "--all", "--force")


class Container:
    """A mounted image, whose commands see its variables, its user, a read-only root, and this machine's network."""

    def __init__(self, root: Path, config: Mapping[str, Any]) -> None:
        self.root, self.config = root, config

    def command(
        self, *words: str, volumes: Mapping[Path, str], environment: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return the command that runs ``words``, or the image's own, after its entrypoint.

        Args:
            words: The command; none for the image's.
            volumes: Where files and folders of this machine are in the container.
            environment: Variables besides the image's.
        """
        places: list[str] = []
        for source, target in volumes.items():
            place = self.root / target.lstrip("/")
            if source.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
            places += [str(source), target]
        variables = [*self.config["Env"], *(f"{name}={value}" for name, value in (environment or {}).items())]
        inside = [*self.config["Entrypoint"], *(words or self.config["Cmd"])]
        return [
            *("unshare", "--mount", "--pid", "--fork", "sh", "-c", _ENTER, "enter"),
            *(str(self.root), *places, "--", "env", "-i", "-C", "/data", *variables, *inside),
        ]


def run(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
