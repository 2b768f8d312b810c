"""Play the four scripts of tests/newcomer/ in a new environment, and record them for docs/quickstart.md.

    python -m tools.casts [--environment FOLDER] [--only PERSON]

Each script is typed into a terminal with 80 columns, in an empty home folder. The pictures are written to docs/casts/
and the times to the page. If a command fails, the recording stops and nothing is written.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from pathlib import Path

from tools.casts.drawing import drawn
from tools.casts.environment import ROOT, Environment, fresh
from tools.casts.page import FOLDER, PAGE, written
from tools.casts.people import (
    ALONE,
    CONTRIBUTOR,
    COORDINATOR,
    PEOPLE,
    VARIANT_OWNER,
    Played,
    play,
    play_round,
)


def main() -> None:
    """Play the scripts, draw the casts, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.casts", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--environment", type=Path, help="folder of the environment; created if it does not exist"
    )
    parser.add_argument(
        "--only", choices=[person.script for person in PEOPLE], help="play only this person's script"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gym-") as place:
        environment = fresh(arguments.environment or Path(place, "environment"))
        scenes = list(_scenes(environment, Path(place), arguments.only))
        never = (place, environment.folder, str(ROOT), str(Path.home()), platform.node())
        pictures = {
            scene.person.script: drawn(scene.person.script, scene.lines(), {str(scene.home): "~"}, never)
            for scene in scenes
        }
    FOLDER.mkdir(exist_ok=True)
    text = PAGE.read_text(encoding="utf-8")
    for scene in scenes:
        text = written(text, scene, environment)
        (FOLDER / f"{scene.person.script}.svg").write_text(pictures[scene.person.script], encoding="utf-8")
        print(f"{scene.person.script}: {scene.seconds:.0f} s")
        for typed in scene.typed:
            print(f"  {typed.seconds:6.1f} s, longest silence {typed.silence:4.1f} s  {typed.command}")
    PAGE.write_text(text, encoding="utf-8")


def _scenes(environment: Environment, place: Path, only: str | None) -> list[Played]:
    scenes: list[Played] = []
    for person in (ALONE, VARIANT_OWNER):
        if only in (None, person.script):
            scenes.append(play(person, environment, place))
    if only in (None, COORDINATOR.script, CONTRIBUTOR.script):
        scenes += play_round(environment, place)
    return scenes


if __name__ == "__main__":
    main()
