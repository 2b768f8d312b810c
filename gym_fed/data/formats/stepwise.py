"""Stepwise supervision (TRL, Axolotl): a prompt, the steps of a solution, and whether each of them is right."""

from __future__ import annotations

from gym_fed.data.formats.base import BadRow, Format, Raw, string, without_context
from gym_fed.data.formats.kto import label_of


class Stepwise(Format):
    """``{"prompt": str, "completions": [str], "labels": [bool]}``."""

    order = 15
    kind = "stepwise"

    @classmethod
    def matches(cls, row: Raw) -> bool:
        return row.keys() >= {"prompt", "completions", "labels"}

    def read(self, row: Raw) -> Raw:
        steps, labels = row.get("completions"), row.get("labels")
        if not isinstance(steps, list) or not steps or not all(isinstance(step, str) for step in steps):
            raise BadRow("'completions' is not a list of texts", "use one text per step")
        judged = [label_of(label) for label in labels] if isinstance(labels, list) else []
        if len(judged) != len(steps) or None in judged:
            raise BadRow("'labels' does not have true or false for each step", "use one label per step")
        converted = {"prompt": string(row, "prompt"), "completions": steps, "labels": judged}
        return without_context(row, converted, "prompt", "completions", "labels")
