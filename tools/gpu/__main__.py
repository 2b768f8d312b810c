"""Try on one CUDA GPU what the tests cannot: `make test-gpu`, or

    python -m tools.gpu [--only TEXT] [--check NAME --folder FOLDER]

Each check runs in its own process and may take five minutes. The results are printed and written to docs/support.md. A
check whose package is not installed is reported as not tried. If a check fails, the command exits with 1.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.gpu.check import Check
from tools.gpu.checks import CHECKS
from tools.gpu.page import write

SECONDS = 300


def main() -> None:
    """Run all checks, or one of them in this process."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="run only checks whose name contains TEXT")
    parser.add_argument("--check", help="run one check in this process")
    parser.add_argument("--folder", type=Path, help="working folder of that check")
    arguments = parser.parse_args()
    if arguments.check:
        found = next(check for check in CHECKS if check.name == arguments.check)
        print(found.run("cuda", arguments.folder))
        return
    machine = described()
    seen, failed = {}, 0
    for check in CHECKS:
        if arguments.only in check.name:
            text, good = tried(check)
            seen[check.name] = text
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} {check.name}: {text}", flush=True)
    if arguments.only:
        print("docs/support.md was not written, since not every check ran")
    else:
        write(machine, seen)
    sys.exit(1 if failed else 0)


def described() -> str:
    """Return the device, the versions and the date.

    Raises:
        SystemExit: If there is no CUDA GPU.
    """
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            f"no CUDA GPU (torch {torch.__version__}): run this where nvidia-smi lists one, with a CUDA build of "
            "torch; `make test` has the checks that need none"
        )
    name, version = torch.cuda.get_device_name(), torch.__version__
    return f"{name}, torch {version}, CUDA {torch.version.cuda}, {datetime.date.today().isoformat()}"


def tried(check: Check) -> tuple[str, bool]:
    """Return the check's last line, and False if it failed."""
    missing = [package for package in check.packages if importlib.util.find_spec(package) is None]
    if missing:
        return f"not tried: {', '.join(missing)} is not installed", True
    with tempfile.TemporaryDirectory(prefix="gym-gpu-") as folder:
        command = [sys.executable, "-m", "tools.gpu", "--check", check.name, "--folder", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return f"failed: not done in {SECONDS} s", False
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = (lines[-1] if lines else "nothing was printed").replace("|", "/")
    return (last, True) if done.returncode == 0 else (f"failed: {last}", False)


if __name__ == "__main__":
    main()
