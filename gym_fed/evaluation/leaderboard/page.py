"""Write a leaderboard as an HTML page."""

from __future__ import annotations

import html
import time
from collections import Counter

from gym_fed.core.text import counted, plain
from gym_fed.evaluation.leaderboard.board import BoardRow, Leaderboard

MAX_TASKS = 200
"""Maximum number of task columns; with a cell for every task of every submission, the page would grow quadratically."""

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8882}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.35rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
th button{all:unset;cursor:pointer;font-weight:600}
th button:focus-visible{outline:2px solid}
th[aria-sort=ascending] button::after{content:" \\2191"}
th[aria-sort=descending] button::after{content:" \\2193"}
td.n{text-align:right;font-variant-numeric:tabular-nums}
tr:hover td{background:var(--soft)}
small,code{opacity:.75}
.wide{overflow-x:auto}
"""
_SCRIPT = """
document.querySelectorAll("th button").forEach((button, column) => button.addEventListener("click", () => {
  const head = button.parentElement, body = document.querySelector("tbody");
  const up = head.getAttribute("aria-sort") === "descending";
  document.querySelectorAll("th").forEach(one => one.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => row.children[column].dataset.value ?? row.children[column].textContent;
  const order = (a, b) => {
    const x = parseFloat(a), y = parseFloat(b);
    return isNaN(x) || isNaN(y) ? (isNaN(x) ? 0 : 1) - (isNaN(y) ? 0 : 1) || a.localeCompare(b) : x - y;
  };
  [...body.rows].sort((a, b) => (up ? 1 : -1) * order(key(a), key(b))).forEach(row => body.append(row));
}));
"""


def board_page(board: Leaderboard, title: str = "Leaderboard") -> str:
    """Render a leaderboard as an HTML page."""
    by_key = dict.fromkeys(
        (task.task, row.line.signer) for row in board.board_rows.values() for task in row.submission.tasks
    )
    # Count each key once, so that nobody displaces others with many submissions.
    counts = Counter(task for task, _ in by_key)
    shown = dict(counts.most_common(MAX_TASKS))
    tasks = [task for task in counts if task in shown]
    left_out = (
        f"; left out: {counted(len(counts) - len(tasks), 'more task')}" if len(tasks) < len(counts) else ""
    )
    heads = ["line", "model", "organization", "status", *tasks, "submitted", "weights"]
    columns = "".join(f'<th scope="col"><button>{_text(head)}</button></th>' for head in heads)
    rows = "\n".join(_row(row, tasks) for row in board.board_rows.values())
    # The policy allows only this page's own style and script, and no requests.
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title><style>{_STYLE}</style></head>
<body><h1>{_text(title)}</h1>
<p>A result is <em>self-reported</em> until the holder of a different key re-runs random samples and
gets the same results.
Each figure is followed by its standard error and its number of samples.</p>
<div class="wide"><table><thead><tr>{columns}</tr></thead>
<tbody>
{rows}
</tbody></table></div>
<p><small>{counted(len(board.board_rows), "submission")}{left_out}; \
head <code>{_text(board.head or "none", 64)}</code></small></p>
<script>{_SCRIPT}</script></body></html>
"""


def _row(row: BoardRow, tasks: list[str]) -> str:
    submission, entry = row.submission, row.line.entry
    cells = [
        f'<td class="n">{entry.sequence}</td>',
        f"<td>{_text(submission.model_name)}</td>",
        f"<td>{_text(submission.organization)}<br><small><code>{row.line.signer[:13]}</code></small></td>",
        f'<td data-value="{len(row.reproduced) - len(row.differs)}">{_text(row.status)}</td>',
    ]
    by_name = {task.task: task for task in submission.tasks}
    for name in tasks:
        task = by_name.get(name)
        if task is None:
            cells.append('<td class="n">&ndash;</td>')
            continue
        figure = task.figures[task.main_metric]
        error = "" if figure.stderr is None else f" &plusmn; {figure.stderr:.4f}"
        cells.append(
            f'<td class="n" data-value="{figure.value!r}">{figure.value:.4f}'
            f"<br><small>{_text(task.main_metric, 40)}{error}, n={task.num_samples}</small></td>"
        )
    cells.append(f'<td data-value="{submission.at}">{_day(submission.at)}</td>')
    weights = " ".join(submission.identity.get(part, "") for part in ("model", "delta")).strip()
    cells.append(f'<td><code title="{_text(weights, 200)}">{_text(weights, 24)}</code></td>')
    return f"<tr>{''.join(cells)}</tr>"


def _day(at: int) -> str:
    """Format a time as a date; a dash if it is out of range."""
    return time.strftime("%Y-%m-%d", time.gmtime(at)) if at < 253_402_300_800 else "&ndash;"


def _text(text: str, limit: int = 200) -> str:
    return html.escape(plain(text, limit), quote=True)
