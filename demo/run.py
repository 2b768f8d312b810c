"""Run the demo: `python -m demo.run [FOLDER]`. Prints tables, and writes the same figures to FOLDER/result.json."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import gym_server  # noqa: F401  (sets Flower's variables)

from demo.community import joiners, make_hub, write_data
from demo.processes import run_federation
from demo.report import measure, show
from gym_fed.core.console import err, out
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.local_federation import ask

MARKER = ".gym-demo"


def main(folder: Path) -> None:
    """One hub, three contributors with a task each, one malicious client; a few rounds; then the result."""
    began = time.monotonic()
    _fresh(folder)
    make_hub(folder / "hub")
    write_data(folder)
    err.print(
        f"three contributors and a malicious client join over gRPC with TLS; their logs are in {folder}"
    )

    def on_round(event: dict[str, Any]) -> None:
        err.print(event["text"], markup=False)
        if event["state"] != "committed":
            raise GymError(ErrorCode.ROUND_ABORTED, event["text"], f"the logs are in {folder}")

    trained = run_federation(folder, joiners(folder), on_round)
    ask(folder, "model", str(folder / "merged"))
    result = measure(folder)
    result["seconds"] = {"rounds": round(trained, 1), "total": round(time.monotonic() - began, 1)}
    write_atomically(folder / "result.json", (json.dumps(result, indent=2) + "\n").encode())
    show(result)
    out.print(f"\n{result['seconds']['total']} s; the same figures: {folder / 'result.json'}", style="dim")


def _fresh(folder: Path) -> None:
    """An empty folder; only a former demo is ever removed."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise GymError(
                ErrorCode.FILE_EXISTS, f"{folder} holds something else than a demo", "name another folder"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m demo.run", description=main.__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/demo"), help="default: runs/demo")
    try:
        main(parser.parse_args().folder)
    except GymError as error:
        from gym_fed.core.console import fail

        fail(error)
