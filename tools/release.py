"""Finish a release after `make package wheel`: try the wheel with every extra, build the images, and report.

    python -m tools.release [--extras NAME,NAME] [--no-images] [--base IMAGE] [--build-options WORDS]

Nothing is pushed; the commands that push are printed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

from tools import version
from tools.sbom import write_checksums

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
SDISTS = ROOT / "build" / "package-check"
WORK = ROOT / "build" / "release"
CONSTRAINTS = ROOT / "constraints.txt"
IMAGES = ("hub", "client", "api", "webui")
_PROBE = """
import importlib.metadata as metadata, sys
import gym_client, gym_fed, gym_quant, gym_server
from gym_quant import kernels
assert all(m.__file__.startswith(sys.prefix) for m in (gym_client, gym_fed, gym_quant, gym_server))
assert kernels.available() != ("torch",), "no native kernels"
assert metadata.version("gym-fed") == gym_fed.__version__ == sys.argv[1]
"""


def main(words: Sequence[str]) -> None:
    """Run the steps, cheapest first."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.release", description=(__doc__ or "").split("\n")[0]
    )
    extras = extras_of(ROOT)
    parser.add_argument("--extras", default=",".join(extras), help="extras to install; '' for none")
    parser.add_argument("--no-images", action="store_true", help="build no images")
    parser.add_argument("--base", help="base image; default: the Dockerfile's. Releases pin it by digest")
    parser.add_argument(
        "--build-options",
        default="",
        metavar="WORDS",
        help="additional options for the image build, such as --volume and --build-arg on a machine without a network",
    )
    options = parser.parse_args(words)
    chosen = [name for name in options.extras.split(",") if name]
    if unknown := sorted({*chosen} - {*extras}):
        parser.error(f"no such extra: {', '.join(unknown)}; there are {', '.join(extras)}")
    number = version.check(ROOT)
    wheel, sdist = _one(DIST, f"gym_fed-{number}-*.whl"), _one(SDISTS, f"gym_fed-{number}.tar.gz")
    builder = None if options.no_images else _builder()
    more = [
        *(["--build-arg", f"BASE={options.base}"] if options.base else []),
        *shlex.split(options.build_options),
    ]
    sdist = Path(shutil.copy(sdist, DIST))
    alone = try_wheel(wheel, number)
    for extra in chosen:
        try_extra(alone, wheel, extra, number)
    shutil.rmtree(alone)
    images = [] if builder is None else [build_image(builder, name, number, more) for name in IMAGES]
    sums = write_checksums([wheel, sdist, wheel.with_name(wheel.name + ".cdx.json")])
    print(f"release {number}: {wheel.name}, {sdist.name}, its SBOM and {sums.name} are in {DIST}")
    print("to publish it, after the commit and its tag are reviewed:")
    for line in push_commands(number, builder, images):
        print(f"    {line}")


def extras_of(root: Path) -> list[str]:
    """Return the extras of the package, except the one for developers."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [name for name in project["optional-dependencies"] if name != "dev"]


def try_wheel(wheel: Path, number: str) -> Path:
    """Install the wheel without extras into a new environment, import it there, and return the environment's folder.

    Raises:
        SystemExit: If a step fails.
    """
    folder = WORK / "alone"
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True, symlinks=os.name != "nt")
    _try(folder, str(wheel), number)
    return folder


def try_extra(alone: Path, wheel: Path, extra: str, number: str) -> None:
    """Install the wheel with an extra into a copy of the environment that has the wheel alone, and import it there.

    The copy shares its files with the original, since each environment holds torch; pip replaces files, and changes
    none.

    Raises:
        SystemExit: If a step fails.
    """
    folder = WORK / extra
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(alone, folder, symlinks=True, copy_function=os.link)
    _try(folder, f"{wheel}[{extra}]", number)
    shutil.rmtree(folder)


def _try(folder: Path, wanted: str, number: str) -> None:
    python = str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    # Compiling every module would take most of the time; those that are imported are compiled then.
    _run(python, "-m", "pip", "install", "-q", "--no-compile", "-c", str(CONSTRAINTS), wanted)
    _run(python, "-m", "pip", "check")
    _run(python, "-I", "-c", _PROBE, number)
    print(f"release: {wanted} installs and imports", flush=True)


def build_image(builder: str, target: str, number: str, options: Sequence[str]) -> str:
    """Build a target of deploy/docker/Dockerfile and return its name, with the version as the tag.

    Raises:
        SystemExit: If it cannot be built.
    """
    name = f"gym-fed-{target}:{number}"
    # OCI's format has no health checks; without layers, each target would compile the kernels again.
    as_docker = ["--format", "docker", "--layers"] if builder == "buildah" else []
    place = ["--target", target, "-f", "deploy/docker/Dockerfile", "-t", name]
    _run(builder, "build", *as_docker, *options, *place, ".")
    return name


def push_commands(number: str, builder: str | None, images: Sequence[str]) -> list[str]:
    """Return the commands that publish a release."""
    lines = [
        f"git tag -s v{number} && git push origin v{number}    # the workflow release.yml publishes to PyPI"
    ]
    for name in images:
        lines.append(f"{builder} tag {name} REGISTRY/{name} && {builder} push REGISTRY/{name}")
    return lines


def _builder() -> str:
    for name in ("docker", "buildah"):
        if shutil.which(name) and not subprocess.run([name, "info"], capture_output=True).returncode:
            return name
    sys.exit("release: neither docker nor buildah can build images here; install one, or pass --no-images")


def _one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(
            f"release: {folder} must have exactly one {pattern}, but has {len(found)}; run make package wheel"
        )
    return found[0]


def _run(*words: str) -> None:
    done = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"release: {' '.join(words)} failed with {done.returncode}")


if __name__ == "__main__":
    main(sys.argv[1:])
