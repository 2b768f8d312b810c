"""What `gym train` prints at the end: the loss, what was gained, what was kept, and answers before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.text import counted, plain

if TYPE_CHECKING:
    from gym_fed.training.run.check import CheckResult
    from gym_fed.training.run.result import TrainResult

_PROMPT_CHARACTERS = 120
_ANSWER_CHARACTERS = 240


def outcome_lines(result: TrainResult) -> list[str]:
    """Steps and loss of a run and, if it was checked, what it gained and lost."""
    rows = f"{counted(result.steps, 'step')} on {counted(result.num_examples, 'example')}"
    lines = [f"{rows}, {result.num_tokens:,} tokens; {loss_trend(result.losses)}"]
    if result.privacy is not None:
        lines[0] += f"; privacy: epsilon {result.epsilon:.2f} at delta {result.privacy.target_delta:g}"
    return lines if result.check is None else [*lines, *check_lines(result.check)]


def loss_trend(losses: list[float]) -> str:
    """The loss of the last step, and how it got there: means of the first and last tenth of the steps."""
    count = max(1, len(losses) // 10)
    first, last = sum(losses[:count]) / count, sum(losses[-count:]) / count
    if len(losses) < 2:
        return f"loss {losses[-1]:.4f}"
    of = (
        "first and last step, of different rows"
        if count == 1
        else f"means of the first and last {count} steps"
    )
    return f"loss {first:.4f} -> {last:.4f} ({of})"


def check_lines(check: CheckResult) -> list[str]:
    """The check of a run, warnings apart."""
    lines = []
    if (held := check.held_out) is not None:
        of = f"{counted(held.num_rows, 'held-out row')}" if held.num_rows else "held-out rows"
        error = (
            "" if held.stderr is None else f" (change {held.after - held.before:+.4f} ± {held.stderr:.4f})"
        )
        lines.append(f"{of}: loss {held.before:.4f} -> {held.after:.4f}{error}")
    if (kept := check.retention) is not None:
        lines.append(kept.describe())
    shown = zip(check.prompts, check.expected, check.before, check.after, strict=True)
    for prompt, expected, before, after in shown:
        lines.append(f"> {_line(prompt, _PROMPT_CHARACTERS)}")
        lines.append(f"  row:    {_line(expected, _ANSWER_CHARACTERS)}")
        lines.append(f"  before: {_line(before, _ANSWER_CHARACTERS)}")
        lines.append(f"  after:  {_line(after, _ANSWER_CHARACTERS)}")
    return lines + [f"not checked: {what}" for what in check.skipped]


def _line(text: str, most: int) -> str:
    return plain(" ".join(text.split()), most) or "(nothing)"
