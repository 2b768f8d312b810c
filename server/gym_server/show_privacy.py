"""What `gym-server privacy` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gym_fed.tables import TextTable


def privacy_lines(found: dict[str, Any]) -> Iterator[str | TextTable]:
    """The report of ``gym_server.privacy`` for people."""
    central = found["central"]
    if not central:
        yield "this hub promises no differential privacy (no privacy section in its config)"
        return
    yield (
        f"epsilon {central['epsilon_spent']:.4g} of {central['epsilon']:g} is spent at delta "
        f"{central['target_delta']:g} in {central['rounds']} rounds; after the next one it is "
        f"{central['epsilon_after_next_round']:.4g} "
        f"({central['accountant']} accountant)"
    )
    if central["epsilon_after_next_round"] > central["epsilon"]:
        yield "no further round is begun: it would exceed the budget"
    adaptive = ", adaptive" if central["adaptive_clipping"] else ""
    yield (
        f"mechanism {central['mechanism']}, noise multiplier {central['noise_multiplier']:g}, clipping norm "
        f"{central['clipping_norm']:.4g} ({central['clipping']}{adaptive})"
    )
    yield f"adjacency: {central['adjacency']}"
    yield f"sampling: {central['sampling']}"
    if found["rounds_without_noise"]:
        yield f"{found['rounds_without_noise']} committed rounds are not covered: they were merged without noise"
    table = TextTable("contributor", "epsilon", "rounds")
    for row in found["contributors"]:
        table.add_row(row["contributor"], f"{row['epsilon']:.4g}", str(row["rounds"]))
    yield table
