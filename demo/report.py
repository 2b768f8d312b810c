"""The demo's closing report: base against merged model, verdicts, bytes up and down, credits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gym_client.hub.traffic import total_of
from gym_client.identity.home import Home
from rich.text import Text

from demo.community import BASE_TASKS, CONTRIBUTORS, MALICIOUS
from gym_fed.base.models import LoadedModel, load_model
from gym_fed.core.console import TextTable, out
from gym_fed.core.text import counted
from gym_fed.data.generated import generate
from gym_fed.evaluation import answer, heldout_loss
from gym_fed.evaluation.generation import generate_batch
from gym_fed.local_federation import ask

TEST_EXAMPLES = 100
TEST_SEED = 11
"""Seed of the rows shown; recipe and rounds were chosen on other rows (docs/benchmarks.md)."""
ERRORS = 2
"""A task of the base is lost if it fell by more than this many standard errors: many are compared at once."""
WHY = (
    "Why: the base has {weights:,} weights, and its tasks use all of them: a new task overwrites part of the others.\n"
    "What helps: a larger base, or one variant per task (gym variant create), which leaves the base as it is."
)


def measure(folder: Path) -> dict[str, Any]:
    """Evaluate base and merged model on unseen examples, and collect the hub's record."""
    torch.set_num_threads(1)  # more threads only slow down so small a model
    models = {"base": load_model("gym-nano"), "merged": load_model(str(folder / "merged"))}
    tasks: dict[str, Any] = {}
    for task in (*CONTRIBUTORS.values(), *BASE_TASKS):
        rows = generate(task, TEST_EXAMPLES, seed=TEST_SEED, split="heldout")
        prompt = rows[0]["messages"][0]["content"]
        tasks[task] = {
            "taught_by": next((name for name, taught in CONTRIBUTORS.items() if taught == task), None),
            "prompt": prompt,
            "expected": rows[0]["messages"][1]["content"],
            "num_rows": len(rows),
        }
        right = {which: _right(loaded, rows) for which, loaded in models.items()}
        tasks[task]["error"] = paired_error(right["base"], right["merged"])
        for which, loaded in models.items():
            tasks[task][which] = {
                "accuracy": sum(right[which]) / len(rows),
                "loss": heldout_loss(loaded.model, loaded.tokenizer, rows, max_length=96),
                "answer": answer(loaded.model, loaded.tokenizer, prompt),
            }
    rounds, status = ask(folder, "rounds"), ask(folder, "status")
    weights = sum(p.numel() for p in models["base"].model.parameters())
    return {
        "tasks": tasks,
        "weights": weights,
        "rounds": rounds,
        "credits": {c["name"]: c["balance"] for c in status["contributors"]},
        "bytes": _traffic(folder, rounds, str(status["server"]), 2 * weights),
        "heldout_loss": {"before": rounds[0]["heldout_before"], "after": rounds[-1]["heldout_after"]},
        "ledger": ask(folder, "ledger", "verify"),
    }


def _right(loaded: LoadedModel, rows: list[Any]) -> list[bool]:
    """Return for each row whether greedy decoding gives exactly its answer."""
    prompts = [row["messages"][:-1] for row in rows]
    answers = generate_batch(loaded.model, loaded.tokenizer, prompts, max_new_tokens=48)
    return [
        text.strip() == row["messages"][-1]["content"].strip()
        for text, row in zip(answers, rows, strict=True)
    ]


def _traffic(
    folder: Path, rounds: list[dict[str, Any]], server: str, bytes_as_bf16: int
) -> dict[str, dict[str, float]]:
    """Bytes that the four homes counted while they sent updates and fetched soups, against whole bf16 deltas."""
    homes = [Home.open(folder / name) for name in (*CONTRIBUTORS, MALICIOUS)]
    totals = [total_of(home, server) for home in homes]
    ways = {
        "up": (sum(total.up for total in totals), sum(len(found["updates"]) for found in rounds)),
        "down": (
            sum(total.down for total in totals),
            len(homes) * (len(rounds) - 1),
        ),  # nobody trains on the last
    }
    return {
        way: {
            "deltas": deltas,
            "sent": sent,
            "as_bf16": bytes_as_bf16 * deltas,
            "times_smaller": bytes_as_bf16 * deltas / sent,
        }
        for way, (sent, deltas) in ways.items()
    }


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    out.print(_learned_table(result["tasks"]))
    out.print(kept_table(result["tasks"]))
    for line in kept_lines(result["tasks"], result["weights"]):
        out.print(line, markup=False)
    out.print(_verdicts_table(result["rounds"]))
    out.print(_bytes_table(result["bytes"]))
    loss = result["heldout_loss"]
    out.print(f"held-out loss {loss['before']:.3f} -> {loss['after']:.3f} nats")
    earned = ", ".join(f"{name} {amount}" for name, amount in result["credits"].items())
    out.print(f"credits: {earned};  ledger: {counted(result['ledger']['entries'], 'entry')}, valid")
    for task in CONTRIBUTORS.values():
        found = result["tasks"][task]
        out.print(f"\n{found['prompt']}", style="bold")
        out.print(f"  base    {found['base']['answer']}", markup=False)
        out.print(f"  merged  {found['merged']['answer']}", markup=False)


def _learned_table(tasks: dict[str, Any]) -> TextTable:
    table = TextTable(title="learned: accuracy on unseen examples, and loss in nats per token")
    for column in ("task", "taught by", "base -> merged", "loss"):
        table.add_column(column, justify="left" if column in ("task", "taught by") else "right")
    for task in CONTRIBUTORS.values():
        found = tasks[task]
        base, merged = found["base"], found["merged"]
        table.add_row(
            task,
            found["taught_by"],
            f"{base['accuracy']:.0%} -> {merged['accuracy']:.0%}",
            f"{base['loss']:.3f} -> {merged['loss']:.3f}",
        )
    return table


def _bytes_table(sent: dict[str, dict[str, float]]) -> TextTable:
    table = TextTable(title="bytes that the contributors counted")
    for column in ("way", "deltas", "bytes sent", "as bf16", "times smaller"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way, found in sent.items():
        table.add_row(
            {"up": "up: updates", "down": "down: soups"}[way],
            str(found["deltas"]),
            f"{found['sent']:,}",
            f"{found['as_bf16']:,}",
            f"{found['times_smaller']:.1f}",
        )
    return table


def _verdicts_table(rounds: list[dict[str, Any]]) -> TextTable:
    table = TextTable("round", "contributor", "verdict", "credit", "reason", title="verdicts")
    for found in rounds:
        for update in sorted(found["updates"], key=lambda u: u["name"]):
            colour = "green" if update["verdict"] == "merged" else "red"
            verdict = Text(update["verdict"], style=colour)
            row = (
                str(found["server_round"]),
                update["name"],
                verdict,
                str(update["credit"]),
                update["reason"],
            )
            table.add_row(*row)
        table.add_section()
    return table


def paired_error(base: Sequence[bool], merged: Sequence[bool]) -> float:
    """Standard error of the change in accuracy, where both models answered the same rows."""
    changes = [after - before for before, after in zip(base, merged, strict=True)]
    mean = sum(changes) / len(changes)
    return math.sqrt(
        sum((change - mean) ** 2 for change in changes) / len(changes) / max(1, len(changes) - 1)
    )


def lost_tasks(tasks: Mapping[str, Any]) -> list[str]:
    """Names of the base's tasks that fell by more than ``ERRORS`` standard errors, the largest fall first."""
    falls = {
        name: found["base"]["accuracy"] - found["merged"]["accuracy"]
        for name, found in tasks.items()
        if found["taught_by"] is None
        and found["base"]["accuracy"] - found["merged"]["accuracy"] > ERRORS * found["error"]
    }
    return sorted(falls, key=lambda name: -falls[name])


def kept_table(tasks: Mapping[str, Any]) -> TextTable:
    """Accuracy of every task of the base before and after, with the standard error of the change."""
    table = TextTable(title="kept: accuracy on unseen examples of the base's own tasks")
    for column in ("task", "base -> merged", "change", "standard error", "rows"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for name, found in tasks.items():
        if found["taught_by"] is None:
            base, merged = found["base"]["accuracy"], found["merged"]["accuracy"]
            table.add_row(
                name,
                f"{base:.0%} -> {merged:.0%}",
                f"{100 * (merged - base):+.0f}",
                f"{100 * found['error']:.1f}",
                str(found["num_rows"]),
            )
    return table


def kept_lines(tasks: Mapping[str, Any], weights: int) -> list[str]:
    """The result in words: the mean over the base's tasks, those that were lost, why, and what helps."""
    old = [found for found in tasks.values() if found["taught_by"] is None]
    base, merged = (sum(found[which]["accuracy"] for found in old) / len(old) for which in ("base", "merged"))
    lines = [f"mean of the base's {counted(len(old), 'task')}: {base:.1%} -> {merged:.1%}"]
    lost = lost_tasks(tasks)
    if not lost:
        return [*lines, f"lost: none fell by more than {ERRORS} standard errors"]
    falls = (
        f"{name} {100 * tasks[name]['base']['accuracy']:.0f} -> {100 * tasks[name]['merged']['accuracy']:.0f}"
        for name in lost
    )
    return [*lines, f"lost: {', '.join(falls)}", *WHY.format(weights=weights).split("\n")]
