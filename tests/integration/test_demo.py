"""`make demo` end to end: three contributors, a malicious client, and a model that does what none was sent."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # three rounds of four contributors that train
def test_the_demo_teaches_three_tasks_and_keeps_the_malicious_client_out(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demo.run", str(tmp_path / "demo")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "demo" / "result.json").read_text())
    taught = [task for task in result["tasks"].values() if task["taught_by"]]
    assert len(taught) == 3
    for task in taught:
        assert task["base"]["accuracy"] <= 0.05
        assert task["merged"]["accuracy"] >= 0.9
    verdicts = {u["name"]: set() for r in result["rounds"] for u in r["updates"]}
    for update in (u for r in result["rounds"] for u in r["updates"]):
        verdicts[update["name"]].add(update["verdict"])
    assert verdicts.pop("mallory") == {"rejected"}
    assert all(found == {"merged"} for found in verdicts.values())
    assert result["credits"]["mallory"] == 0
    sent, sizes = result["bytes"], [[u["bytes"] for u in r["updates"]] for r in result["rounds"]]
    assert sent["up"]["sent"] >= sum(map(sum, sizes))
    assert sent["up"]["times_smaller"] > 12
    soups = [r["soup_bytes"] for r in result["rounds"][:-1]]
    assert sent["down"]["sent"] >= (len(verdicts) + 1) * sum(soups)
    assert sent["down"]["times_smaller"] > 3
    assert result["heldout_loss"]["after"] < 0.5 * result["heldout_loss"]["before"]
    assert "learned: " in done.stdout
    assert "kept: " in done.stdout
    assert "lost: none fell by more than 2 standard errors" in done.stdout


def task(base: float, merged: float, error: float, taught_by: str | None = None) -> dict[str, Any]:
    return {
        "taught_by": taught_by,
        "base": {"accuracy": base},
        "merged": {"accuracy": merged},
        "error": error,
        "num_rows": 100,
    }


def test_the_demo_names_the_old_tasks_that_fell_by_more_than_two_errors_and_says_why() -> None:
    from demo.report import kept_lines

    tasks = {
        "shout": task(0.0, 0.9, 0.03, "ada"),
        "sort": task(0.96, 0.76, 0.045),
        "copy": task(0.93, 0.9, 0.03),
        "ends": task(0.9, 0.6, 0.05),
    }
    lines = kept_lines(tasks, 1_083_520)
    assert lines[0] == "mean of the base's 3 tasks: 93.0% -> 75.3%"
    assert lines[1] == "lost: ends 90 -> 60, sort 96 -> 76"
    assert "1,083,520 weights" in lines[2]
    assert lines[3].startswith("What helps: ")


def test_the_demo_says_so_where_no_old_task_fell() -> None:
    from demo.report import kept_lines

    lines = kept_lines({"copy": task(0.93, 0.9, 0.03), "sort": task(0.9, 0.95, 0.03)}, 10)
    assert lines[1:] == ["lost: none fell by more than 2 standard errors"]


def test_the_error_of_a_change_is_that_of_pairs() -> None:
    from demo.report import paired_error

    base, merged = [True] * 9 + [False], [True] * 6 + [False] * 3 + [True]
    changes = [after - before for before, after in zip(base, merged, strict=True)]
    assert paired_error(base, merged) == pytest.approx(statistics.stdev(changes) / 10**0.5)
    assert paired_error(base, base) == 0


def test_the_parts_of_the_demo_fit_the_commands_of_today(tmp_path: Path) -> None:
    from gym_server.federation import read_config

    import demo.malicious
    from demo.community import CONTRIBUTORS, MALICIOUS, joiners, make_hub, write_data
    from gym_fed.core.registries import AGGREGATORS

    make_hub(tmp_path / "hub")
    write_data(tmp_path)
    config = read_config(tmp_path / "hub")
    assert config.rounds.min_contributors == len(CONTRIBUTORS) + 1
    assert (tmp_path / "hub" / config.gate.heldout).is_file()
    assert AGGREGATORS.type_of(config.soup.aggregator).robust
    assert config.soup.num_malicious_nodes == 1
    assert "dense" not in (config.codec.codec, config.soup.codec.codec)
    commands = joiners(tmp_path)
    assert commands.keys() == {*CONTRIBUTORS, MALICIOUS}
    for name, command in commands.items():
        assert str(tmp_path / f"{name}.jsonl") in map(str, command("127.0.0.1:1", "f"))
    module = list(map(str, commands[MALICIOUS]("127.0.0.1:1", "f")))[1:]
    assert module[:2] == ["-m", demo.malicious.__name__]
    assert len(module[2:]) == demo.malicious.main.__code__.co_argcount


def test_a_word_that_is_no_folder_starts_no_demo() -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "demo.run", "--folder"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 2
    assert "unrecognized arguments: --folder" in asked.stderr
