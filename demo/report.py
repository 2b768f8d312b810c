"""What the demo shows at the end: base against merged model, bytes, verdicts, credits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from demo.community import CONTRIBUTORS, KNOWN
from demo.processes import ask
from gym_fed.console import out
from gym_fed.data.generated import generate
from gym_fed.evaluation import answer, exact_match, heldout_loss
from gym_fed.models import load_model
from gym_fed.tables import TextTable

TEST_EXAMPLES = 100


def measure(folder: Path) -> dict[str, Any]:
    """Evaluate base and merged model on unseen examples, and collect the hub's record."""
    models = {"base": load_model("gym-nano"), "merged": load_model(str(folder / "merged"))}
    tasks: dict[str, Any] = {}
    for task in (*CONTRIBUTORS.values(), *KNOWN):
        rows = generate(task, TEST_EXAMPLES, seed=11, split="heldout")
        prompt = rows[0]["messages"][0]["content"]
        tasks[task] = {
            "taught_by": next((name for name, taught in CONTRIBUTORS.items() if taught == task), None),
            "prompt": prompt,
            "expected": rows[0]["messages"][1]["content"],
        }
        for which, loaded in models.items():
            tasks[task][which] = {
                "accuracy": exact_match(loaded.model, loaded.tokenizer, rows, max_new_tokens=48),
                "loss": heldout_loss(loaded.model, loaded.tokenizer, rows, max_length=96),
                "answer": answer(loaded.model, loaded.tokenizer, prompt),
            }
    rounds, status = ask(folder, "rounds"), ask(folder, "status")
    updates = [u for r in rounds for u in r["updates"]]
    weights = sum(p.numel() for p in models["base"].model.parameters())
    uploaded = sum(u["bytes"] for u in updates)
    return {
        "tasks": tasks,
        "rounds": rounds,
        "credits": {c["name"]: c["balance"] for c in status["contributors"]},
        "bytes": {
            "num_updates": len(updates),
            "uploaded": uploaded,
            "uploaded_as_bf16": 2 * weights * len(updates),
            "times_smaller": 2 * weights * len(updates) / uploaded,
        },
        "heldout_loss": {"before": rounds[0]["heldout_before"], "after": rounds[-1]["heldout_after"]},
        "ledger": ask(folder, "ledger", "verify"),
    }


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    out.print(_tasks_table(result["tasks"]))
    out.print(_verdicts_table(result["rounds"]))
    sent, loss = result["bytes"], result["heldout_loss"]
    out.print(
        f"held-out loss {loss['before']:.3f} > {loss['after']:.3f} nats;  "
        f"{sent['num_updates']} updates, {sent['uploaded']:,} bytes uploaded, "
        f"{sent['uploaded_as_bf16']:,} in bf16: {sent['times_smaller']:.1f} x smaller"
    )
    earned = ", ".join(f"{name} {amount}" for name, amount in result["credits"].items())
    out.print(f"credits: {earned};  ledger: {result['ledger']['entries']} entries, valid")
    for task in CONTRIBUTORS.values():
        found = result["tasks"][task]
        out.print(f"\n{found['prompt']}", style="bold")
        out.print(f"  base    {found['base']['answer']}", markup=False)
        out.print(f"  merged  {found['merged']['answer']}", markup=False)


def _tasks_table(tasks: dict[str, Any]) -> TextTable:
    table = TextTable(title="accuracy on unseen examples, and loss in nats a token")
    for column in ("task", "taught by", "base", "merged", "base loss", "merged loss"):
        table.add_column(column, justify="left" if column in ("task", "taught by") else "right")
    for name, found in tasks.items():
        base, merged = found["base"], found["merged"]
        table.add_row(
            name,
            found["taught_by"] or "(the base)",
            f"{base['accuracy']:.0%}",
            f"{merged['accuracy']:.0%}",
            f"{base['loss']:.3f}",
            f"{merged['loss']:.3f}",
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
