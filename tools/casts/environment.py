"""A new virtual environment with the project's wheel in it, as a newcomer makes one."""

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
"""Extras that docs/quickstart.md names: `gym eval`, and openai's client."""


@dataclass(frozen=True)
class Environment:
    """A new environment.

    Attributes:
        folder: Of the environment.
        install_seconds: What the installation of the wheel and all that it needs took.
        packages: How many distributions it has.
    """

    folder: str
    install_seconds: float
    packages: int

    @property
    def bin(self) -> Path:
        """Folder of its commands."""
        return Path(self.folder, "bin")

    def variables(self, home: Path) -> dict[str, str]:
        """All that a shell of this environment knows, with an empty home: no variable of the caller."""
        return {
            "HOME": str(home),
            "PATH": f"{self.bin}{os.pathsep}{os.defpath}",
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
        }


def fresh(folder: Path) -> Environment:
    """Build the wheel of this checkout and install it; an environment that an earlier call made there is taken.

    Raises:
        subprocess.CalledProcessError: The wheel cannot be built or installed; what pip printed is shown.
    """
    record = folder / "environment.json"
    if record.exists():
        return Environment(**json.loads(record.read_text(encoding="utf-8")))
    folder.mkdir(parents=True, exist_ok=True)
    # By way of the sdist, so that nothing of an earlier build in this checkout gets into the wheel.
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
