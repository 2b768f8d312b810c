"""Measure whether `gym-server groups` finds two styles in one community, and none where there is one.

    python benchmarks/groups.py --shared FOLDER [--seeds N] [--rounds N] [--quick] [--json] [--plot FILE]

Eight contributors fine-tune stories260K in real processes, over TLS. In ``two styles``, four of them have speeches of
one Shakespeare character each, and four have solved exercises from GSM8K; in ``one style``, all eight have one
character each. Held-out rows are other rows of the same contributors. The figures are the mean cosines within and
between groups, the number of contributors in the group of their style, and the gain of each group's variant over the
common version on the rows that it fits better, in nats per token.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from _report import Report, options

from gym_fed.local_federation import ask, join_command, run_federation

CONTRIBUTORS = 8
ROWS, HELD_OUT = 48, 12
LENGTH = 160
"""Minimum length of a row in characters, which is about 64 tokens of stories260K."""


def main() -> None:
    parser = options(__doc__, seeds=3)
    parser.add_argument(
        "--shared", type=Path, required=True, metavar="FOLDER", help="data/ and models/stories260K"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each community; 6, with --quick 2")
    arguments: argparse.Namespace = parser.parse_args()
    report = Report("groups")
    rounds = arguments.rounds or (2 if arguments.quick else 6)
    for name, styles in (("two styles", 2), ("one style", 1)):
        for seed in range(1 if arguments.quick else arguments.seeds):
            with tempfile.TemporaryDirectory() as folder:
                found = community(Path(folder), arguments.shared, styles, seed, rounds)
            where = f"{name}, seed {seed}"
            for key, value in found.items():
                report.compare(f"{where}: {key}", value)
    report.finish(arguments)


def community(folder: Path, shared: Path, styles: int, seed: int, rounds: int) -> dict[str, float]:
    """Run a community and search for groups; return the figures."""
    texts = texts_of(shared, styles, seed)
    (folder / "heldout.jsonl").write_text(lines(text for own in texts for text in own[ROWS:]))
    names = [f"c{number}" for number in range(CONTRIBUTORS)]
    for name, own in zip(names, texts, strict=True):
        (folder / f"{name}.jsonl").write_text(lines(own[:ROWS]))
    base = shared / "models" / "stories260K"
    hub: dict[str, Any] = {
        "name": "groups",
        "base_model": str(base),
        "listen": "127.0.0.1:0",
        "enrolment": {"policy": "open"},
        "rounds": {"num_rounds": rounds, "min_contributors": CONTRIBUTORS, "quorum_share": 0.99},
        "recipe": {
            "finetuning": "full",
            "learning_rate": 2e-3,
            "max_steps": 30,
            "per_device_train_batch_size": 4,
            "max_length": 64,
        },
        "gate": {"heldout": str(folder / "heldout.jsonl"), "max_loss_increase": 5.0},
    }
    initialise(folder / "hub", base, hub)
    joiners = {
        name: lambda address, pin, name=name: join_command(folder, name, address, pin, "--base", base)
        for name in names
    }
    run_federation(folder, joiners, lambda event: None)
    found = ask(folder, "groups", "--rounds", str(rounds))
    accounts = {one["contributor"]: one["name"] for one in ask(folder, "accounts")}
    figures = {"cosine within": found["within"], "cosine between": found["between"]}
    figures["groups offered"] = float(sum(group["is_offered"] for group in found["groups"]))
    for number, group in enumerate(found["groups"], start=1):
        members = {accounts[one] for one in group["contributors"]}
        first = set(names[: CONTRIBUTORS // 2])
        if styles == 2:
            figures[f"group {number}, members of its style"] = float(
                max(len(members & first), len(members - first))
            )
        figures[f"group {number}, members"] = float(len(members))
        figures[f"group {number}, gain"] = group["gain"]
        figures[f"group {number}, standard error"] = group["stderr"]
    return figures


def initialise(folder: Path, base: Path, config: dict[str, Any]) -> None:
    """Create the hub, and change its default config."""
    import subprocess

    import yaml

    from gym_fed.local_federation import BIN

    subprocess.run(
        [BIN / "gym-server", "init", "--dir", folder, "--base", base, "--enrolment", "open", "--yes"],
        check=True,
        capture_output=True,
    )
    path = folder / "gym-server.yaml"
    values = yaml.safe_load(path.read_text())
    for key, value in config.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump(values))


def texts_of(shared: Path, styles: int, seed: int) -> list[list[str]]:
    """Return the texts of every contributor, followed by those for held-out rows."""
    draw = random.Random(seed)
    speakers = []
    for line in (shared / "data/shakespeare_by_speaker/speakers.jsonl").read_text().splitlines():
        rows = joined(json.loads(line)["speeches"])
        if len(rows) >= ROWS + HELD_OUT:
            speakers.append(rows)
    texts = []
    for rows in draw.sample(speakers, CONTRIBUTORS if styles == 1 else CONTRIBUTORS // 2):
        draw.shuffle(rows)
        texts.append(rows[: ROWS + HELD_OUT])
    if styles == 2:
        solved = [json.loads(line) for line in (shared / "data/gsm8k/train.jsonl").read_text().splitlines()]
        draw.shuffle(solved)
        size = ROWS + HELD_OUT
        for number in range(CONTRIBUTORS // 2):
            part = solved[number * size : (number + 1) * size]
            texts.append([f"{row['question']}\n{row['answer']}" for row in part])
    return texts


def joined(speeches: list[str]) -> list[str]:
    """Join speeches into rows of at least ``LENGTH`` characters."""
    rows, row = [], ""
    for speech in speeches:
        row = f"{row}\n{speech}" if row else speech
        if len(row) >= LENGTH:
            rows.append(row)
            row = ""
    return rows


def lines(texts: Any) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


if __name__ == "__main__":
    main()
