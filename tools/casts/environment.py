"""Create a new virtual environment with the project's wheel, as a new user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
EXTRA = "eval"
"""The extra that docs/quickstart.md installs, with `gym eval` and OpenAI's client."""


@dataclass(frozen=True)
class Environment:
    """A new virtual environment.

    Attributes:
        folder: Folder of the environment.
        install_seconds: Time to install the wheel and its dependencies.
        packages: Number of installed distributions.
    """

    folder: str
    install_seconds: float
    packages: int

    @property
    def bin(self) -> Path:
        """The folder with its commands."""
        return Path(self.folder, "bin")

    def variables(self, home: Path) -> dict[str, str]:
        """Return all variables of a shell in this environment with this home, without those of the caller."""
        return {
            "HOME": str(home),
            "PATH": f"{self.bin}{os.pathsep}{os.defpath}",
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
        }


def fresh(folder: Path) -> Environment:
    """Build the wheel of this checkout and install it; reuse the environment that an earlier call created there.

    Raises:
        subprocess.CalledProcessError: If the wheel cannot be built or installed; pip's output is printed.
    """
    record = folder / "environment.json"
    if record.exists():
        return Environment(**json.loads(record.read_text(encoding="utf-8")))
    folder.mkdir(parents=True, exist_ok=True)
    # The wheel is built from the sdist, so that it contains nothing of an earlier build in this checkout.
    pinned = {"PIP_CONSTRAINT": CONSTRAINTS.name, "PIP_BUILD_CONSTRAINT": CONSTRAINTS.name}
    _run([sys.executable, "-m", "build", "--outdir", str(folder / "dist"), "."], pinned)
    (wheel,) = (folder / "dist").glob("*.whl")
    venv.create(folder / "env", with_pip=True, symlinks=True)
    pip = [str(folder / "env/bin/python"), "-m", "pip", "--disable-pip-version-check"]
    begin = time.monotonic()
    _run([*pip, "install", "-q", "-c", str(CONSTRAINTS), f"{wheel}[{EXTRA}]"])
    seconds = time.monotonic() - begin
    packages = len(list((folder / "env").glob("lib/*/site-packages/*.dist-info")))
    made = Environment(str(folder / "env"), round(seconds, 1), packages)
    record.write_text(json.dumps(asdict(made)), encoding="utf-8")
    return made


def _run(command: list[str], more: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **(more or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.stderr.write(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n")
    done.check_returncode()
