"""Slow contributors' share of admitted updates: three fast accounts and five slow ones at one hub.

    python benchmarks/pace.py [--rounds N] [--quick] [--json] [--plot FILE] [--shared FOLDER] [--keep FOLDER]
        [--tree FOLDER]

A hub and eight contributors, all real processes over gRPC with TLS, train stories260K on Shakespeare speakers. The
policy of the five slow ones limits their upload to 1 kB per second, so that a task takes them about 40 s, and the fast
ones a few seconds. The slow ones join after three rounds of the fast ones. The table has a row per member with its
verdict in each later round.

``--tree`` runs the hub and contributors of another version, for a comparison.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from _community import Community
from _federated_learning import speaker_sets
from _processes import Processes
from _report import Report, load, options, show

FAST, SLOW, FAST_ROUNDS, UPLOAD_BYTES_PER_SECOND = 3, 5, 3, 1024
AIM_SHARE = 0.9
CONFIG: dict[str, Any] = {
    "rounds": {"num_rounds": 1000, "min_contributors": FAST, "grace_min_seconds": 5},
    "recipe": {"max_steps": 4, "per_device_train_batch_size": 4, "max_length": 64},
    "codec": {"codec": "bitdelta", "error_feedback": False},
    "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
}
_ROUND_SECONDS = 600.0
_AWAITED = re.compile(r"INFO round .*(?:still at work|waited for|continues without)")
"""Log lines of a hub about contributors that it waits for, in this version and in earlier ones."""
_ADMITTED = ("admitted", "merged", "duplicate", "rejected")
"""Verdicts of updates that arrived in time for their round."""


def main() -> None:
    parser = options(__doc__, "shared")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep hub, homes and logs there")
    parser.add_argument("--tree", type=Path, metavar="FOLDER", help="source tree of another version")
    arguments = parser.parse_args()
    members = [f"fast{n}" for n in range(FAST)] + [f"slow{n}" for n in range(SLOW)]
    with tempfile.TemporaryDirectory(prefix="gym-pace-") as made:
        folder = arguments.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        num_rounds = 2 if arguments.quick else arguments.rounds
        rounds = run(folder, members, num_rounds, arguments.shared, arguments.tree)
        lines = [line for line in (folder / "hub.log").read_text().splitlines() if _AWAITED.search(line)]
    show_rounds(members, rounds, lines)
    counts = {name: sum(one.get(name) in _ADMITTED for one in rounds) for name in members}
    fast, slow = (
        fmean(counts[name] for name in members if name.startswith(kind)) for kind in ("fast", "slow")
    )
    report = Report("pace")
    report.compare("admitted updates of a fast contributor", fast, unit="mean", better="higher")
    report.compare("admitted updates of a slow contributor", slow, unit="mean", better="higher")
    report.aim(
        "slow contributors' share of the fast ones'", slow / fast if fast else 0.0, AIM_SHARE, "higher"
    )
    report.finish(arguments)


def run(
    folder: Path, members: Sequence[str], num_rounds: int, shared: Path, tree: Path | None
) -> list[dict[str, str]]:
    """Run the rounds; return the verdicts by member, for each round after all have joined."""
    speakers = speaker_sets(shared / "data" / "shakespeare_by_speaker" / "speakers.jsonl")["first"]
    rows = dict(zip(members, speakers.contributors.values(), strict=False))
    slow = [name for name in members if name.startswith("slow")]
    with Processes(folder, lambda command: None) as processes:
        community = Community(processes, folder, shared / "models" / "stories260K", CONFIG, tree)

        def join(names: Sequence[str], policy: dict[str, Any]) -> None:
            for name in names:
                community.join(name, [{"text": text} for text in rows[name]], policy)

        def have_joined() -> bool:
            return all("joined " in (folder / f"{name}.log").read_text() for name in slow)

        join([name for name in members if name not in slow], {})
        community.wait_for_rounds(FAST_ROUNDS, FAST_ROUNDS * _ROUND_SECONDS)
        join(slow, {"max_upload_bytes_per_second": UPLOAD_BYTES_PER_SECOND})
        processes.wait_for("slow contributors", have_joined, _ROUND_SECONDS)
        first = community.num_rounds + 1  # all members get a task from the round after the current one on
        rounds = community.wait_for_rounds(first + num_rounds, num_rounds * _ROUND_SECONDS)[first:]
    return [{update["name"]: _outcome(update) for update in one["updates"]} for one in rounds]


def _outcome(update: Mapping[str, Any]) -> str:
    verdict = str(update["verdict"])
    return "late" if verdict == "refused" and "late" in update["reason"] else verdict


def show_rounds(members: Sequence[str], rounds: Sequence[Mapping[str, str]], lines: Sequence[str]) -> None:
    """Print a row for each member and a column for each round, and the hub's log lines about awaited members."""
    rows = []
    for name in members:
        marks = ["yes" if one.get(name) in _ADMITTED else one.get(name, "-") for one in rounds]
        rows.append([name, *marks, str(marks.count("yes"))])
    headers = ["admitted in round", *(str(n) for n in range(1, len(rounds) + 1)), "in all"]
    show("", headers, rows, load())
    print("\n".join(lines))


if __name__ == "__main__":
    main()
