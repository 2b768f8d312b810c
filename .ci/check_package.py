"""Builds sdist and wheel and tries the wheel where only the wheel can answer.

The clean venv borrows the third-party packages of the environment this runs in (one line in a ``.pth``
file), so that nothing is downloaded twice; the gym packages must come from the wheel, and that is checked.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "package-check"
PACKAGES = {
    "gym_fed": "gym_fed",
    "gym_server": "server/gym_server",
    "gym_client": "client/gym_client",
    "gym_quant": "quant/gym_quant",
}
COMMANDS = {
    "gym": "gym_fed.cli.main",
    "gym-server": "gym_server.cli.main",
    "gym-client": "gym_client.cli.main",
}
HEAVY = ("torch", "transformers", "flwr", "datasets", "pandas")
HELP_SECONDS = 1.0
HELP_TRIES = 5


def main() -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    sdist, wheel = build()
    check_contents(sdist, wheel)
    # Write an SBOM and checksums next to the wheel.
    print(run([sys.executable, "-m", "tools.sbom", str(wheel), str(sdist)], cwd=ROOT).strip())
    python = clean_venv(wheel)
    check_origin(python)
    for command, module in COMMANDS.items():
        check_help(python, command, module)
    print("package: all checks passed")


def build() -> tuple[Path, Path]:
    """Sdist first, then the wheel from the sdist, with the pinned build tools."""
    # Relative, because pip splits these variables at white space; the second is their name since pip 25.3.
    env = os.environ | {"PIP_CONSTRAINT": "constraints.txt", "PIP_BUILD_CONSTRAINT": "constraints.txt"}
    run([sys.executable, "-m", "build", "--outdir", str(WORK), "."], env=env, cwd=ROOT)
    (sdist,) = WORK.glob("*.tar.gz")
    (wheel,) = WORK.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Every tracked file of the packages is in the wheel; the sdist has what a rebuild and a reader need."""
    inside = set(zipfile.ZipFile(wheel).namelist())
    # C++ and CUDA sources are built, not shipped: they belong to the sdist.
    wanted = {
        f for f in tracked_package_files() if not f.endswith((".cpp", ".cc", ".c", ".h", ".hpp", ".cu"))
    }
    wanted |= {f"{package}/py.typed" for package in PACKAGES}
    wanted |= {
        f"gym_fed/assets/gym-nano/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")
    }
    carried = run(["git", "-C", str(ROOT), "ls-files", "--", "configs", "docs"], quiet=True).split()
    wanted |= {f"gym_fed/assets/{name}" for name in carried if (ROOT / name).exists()}
    refuse("missing from the wheel", wanted - inside)
    tops = {name.split("/")[0] for name in inside if ".dist-info/" not in name and "/" in name}
    refuse("strange top-level folders in the wheel", tops - set(PACKAGES))
    refuse(
        "no licence in the wheel",
        set() if any(n.endswith("licenses/LICENSE") for n in inside) else {"LICENSE"},
    )
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = set(run(["git", "-C", str(ROOT), "ls-files", "--", "quant/csrc"], quiet=True).split())
    refuse(
        "missing from the sdist", ({"LICENSE", "README.md", "pyproject.toml", "setup.py"} | sources) - names
    )
    if shutil.which("c++"):
        built = any(name.startswith("gym_quant/kernels/_native.") for name in inside)
        refuse("no native kernels in the wheel, though there is a compiler", set() if built else {"_native"})
    print(f"package: {wheel.name}: {len(inside)} files, {wheel.stat().st_size / 1e6:.2f} MB")


def tracked_package_files() -> set[str]:
    """Names, as a wheel spells them, of every file that git tracks inside the four packages."""
    files: set[str] = set()
    for package, folder in PACKAGES.items():
        listing = run(["git", "-C", str(ROOT), "ls-files", "-z", "--", folder], quiet=True)
        for name in filter(None, listing.split("\0")):
            if (ROOT / name).exists():
                files.add(package + name.removeprefix(folder))
    return files


def clean_venv(wheel: Path) -> Path:
    """A venv that holds the wheel alone and sees this environment's other packages behind it."""
    folder = WORK / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)])
    site = run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], quiet=True
    ).strip()
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def check_origin(python: Path) -> None:
    """The four packages are imported from the clean venv, not from the checkout."""
    code = f"import {', '.join(PACKAGES)}; print({', '.join(f'{p}.__file__' for p in PACKAGES)}, sep='\\n')"
    for file in run([str(python), "-I", "-c", code], quiet=True).splitlines():
        refuse("imported from elsewhere than the wheel", set() if Path(file).is_relative_to(WORK) else {file})


def check_help(python: Path, command: str, module: str) -> None:
    """``--help`` answers within a second and imports nothing heavy."""
    script = python.parent / command
    best = min(processor_seconds([str(script), "--help"]) for _ in range(HELP_TRIES))
    probe = (
        f"import sys; sys.argv = [{command!r}, '--help']\n"
        f"from {module} import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"heavy = sorted(set({HEAVY}) & set(sys.modules))\n"
        "assert not heavy, f'--help imports {heavy}'\n"
    )
    run([str(python), "-I", "-c", probe], quiet=True)
    print(f"package: {command} --help: best of {HELP_TRIES} {best:.2f} s, nothing heavy imported")
    refuse(
        f"--help takes longer than {HELP_SECONDS} s",
        set() if best < HELP_SECONDS else {f"{command}: {best:.2f} s"},
    )


def processor_seconds(command: list[str]) -> float:
    """What a command costs in processor time: on a busy machine the wall clock measures the others."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(command, quiet=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(
    command: list[str], *, env: dict[str, str] | None = None, cwd: Path = WORK, quiet: bool = False
) -> str:
    """Run, by default from outside the checkout, so that nothing is imported from it by accident."""
    done = subprocess.run(command, cwd=cwd, env=env, text=True, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        sys.exit(
            f"package: {command} failed with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
    if not quiet and done.stderr.strip():
        print(done.stderr.strip()[-2000:])
    return done.stdout


def refuse(what: str, offenders: set[str]) -> None:
    if offenders:
        sys.exit(f"package: {what}: {', '.join(sorted(offenders))}")


if __name__ == "__main__":
    main()
