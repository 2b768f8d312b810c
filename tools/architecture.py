"""Draw docs/architecture.svg, a diagram of the flows between the parts of the code, from the tables below.

A box is a package or module of the code. An arrow is a step of a flow. Its last field is the package that performs the
step, and therefore imports both ends, or the protocol between two processes.
`tests/unit/repository/test_architecture.py` checks both against the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
ROOTS = {"gym_server": "server", "gym_client": "client", "gym_quant": "quant"}

LANES = ("contributor: gym-client", "hub: gym-server", "serving: gym api")


@dataclass(frozen=True)
class Box:
    """A box of the diagram.

    Attributes:
        module: Dotted name.
        does: What it does in a flow, in a few words.
        lane: Column, an index of ``LANES``.
        row: Row, counted from the top.
    """

    module: str
    does: str
    lane: int
    row: int


@dataclass(frozen=True)
class Arrow:
    """An arrow of the diagram: a step from one box to the next.

    Attributes:
        start: Module of the first box.
        end: Module of the second.
        carries: What is passed on.
        by: The package whose code performs the step, or a protocol between two processes.
    """

    start: str
    end: str
    carries: str
    by: str


BOXES = (
    Box("gym_client.cli", "shows the terms, gets consent", 0, 0),
    Box("gym_client.agent", "takes tasks, checks the policy", 0, 1),
    Box("gym_fed.data", "reads and checks rows", 0, 2),
    Box("gym_fed.training", "trains", 0, 3),
    Box("gym_fed.delta", "encodes tuned minus base", 0, 4),
    Box("gym_client.identity", "signs the manifest", 0, 5),
    Box("gym_client.hub", "moves objects, keeps the lease", 0, 6),
    Box("gym_server.store", "rows and objects on disk", 1, 0),
    Box("gym_server.ledger", "entries, heads, proofs", 1, 1),
    Box("gym_server.rewards", "scores, credits, reputation", 1, 2),
    Box("gym_fed.soup", "pre-aggregators, aggregator", 1, 3),
    Box("gym_server.rounds", "admission, screens, gate, commit", 1, 4),
    Box("gym_server.strategy", "Flower's Grid and Strategy", 1, 5),
    Box("gym_server.rpc", "gRPC, sessions, limits", 1, 6),
    Box("gym_fed.personalization", "makes and carries variants", 2, 0),
    Box("gym_fed.serving.store", "verifies and keeps variants", 2, 1),
    Box("gym_fed.serving.forward", "one pass, many variants", 2, 2),
    Box("gym_fed.serving.engine", "batches, samples, queues", 2, 3),
    Box("gym_fed.serving.openai", "requests and answers", 2, 4),
    Box("gym_fed.serving.http", "keys, streams, metrics", 2, 5),
    Box("gym_fed.serving.chat", "a client; any OpenAI client", 2, 6),
)

GROUND = (
    Box("gym_quant", "codecs and kernels", 0, 7),
    Box("gym_fed.config", "schemas of every file", 1, 7),
    Box("gym_fed.trust.identity", "keys, signatures, digests", 2, 7),
)
"""The packages that all three lanes depend on."""

ARROWS = (
    Arrow("gym_client.cli", "gym_client.agent", "join", "gym_client.cli"),
    Arrow("gym_client.agent", "gym_fed.data", "own rows", "gym_client.agent"),
    Arrow("gym_fed.data", "gym_fed.training", "tokens", "gym_fed.training"),
    Arrow("gym_fed.training", "gym_fed.delta", "tuned weights", "gym_client.agent"),
    Arrow("gym_fed.delta", "gym_client.identity", ".gymdelta", "gym_client.agent"),
    Arrow("gym_client.identity", "gym_client.hub", "signed update", "gym_client.agent"),
    Arrow("gym_client.hub", "gym_server.rpc", "update", "proto/gym/fed/v1/hub.proto"),
    Arrow("gym_server.rpc", "gym_client.hub", "task, receipt", "proto/gym/fed/v1/hub.proto"),
    Arrow("gym_server.rpc", "gym_server.strategy", "replies", "gym_server.cli"),
    Arrow("gym_server.strategy", "gym_server.rounds", "a full round", "gym_server.strategy"),
    Arrow("gym_server.rounds", "gym_fed.soup", "kept updates", "gym_server.rounds"),
    Arrow("gym_fed.soup", "gym_server.rewards", "soup, products", "gym_server.rewards"),
    Arrow("gym_server.rewards", "gym_server.ledger", "verdicts, credits", "gym_server.rewards"),
    Arrow("gym_server.ledger", "gym_server.store", "one transaction", "gym_server.ledger"),
    Arrow("gym_server.store", "gym_fed.personalization", "version", "gym-server model FOLDER"),
    Arrow("gym_fed.personalization", "gym_fed.serving.store", "signed variant", "gym_fed.personalization"),
    Arrow("gym_fed.serving.store", "gym_fed.serving.forward", "packed delta", "gym_fed.serving.store"),
    Arrow("gym_fed.serving.engine", "gym_fed.serving.forward", "a step", "gym_fed.serving.engine"),
    Arrow("gym_fed.serving.openai", "gym_fed.serving.engine", "token ids", "gym_fed.serving.openai"),
    Arrow("gym_fed.serving.http", "gym_fed.serving.openai", "JSON body", "gym_fed.serving.http"),
    Arrow("gym_fed.serving.chat", "gym_fed.serving.http", "HTTP request", "OpenAI's HTTP API"),
)

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _LEFT, _TOP = 240, 48, 90, 34, 20, 64
_GROUND_GAP = 24
_LABEL = 'font-size="11" fill="#555"'


def path_of(module: str) -> Path:
    """Return the folder of a package or the file of a module; it may not exist."""
    path = ROOT / ROOTS.get(module.partition(".")[0], "") / module.replace(".", "/")
    return path if path.is_dir() else path.with_suffix(".py")


def picture() -> str:
    """Return the text of the SVG."""
    width = 2 * _LEFT + len(LANES) * _WIDTH + (len(LANES) - 1) * _GAP_X
    height = _y(7) + _GROUND_GAP + _HEIGHT + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif">',
        "<title>Flows between the parts of gym-fed</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#333"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for lane, name in enumerate(LANES):
        parts.append(
            f'<text x="{_x(lane) + _WIDTH // 2}" y="36" font-size="16" font-weight="bold" '
            f'text-anchor="middle">{escape(name)}</text>'
        )
    places = {box.module: box for box in BOXES}
    parts += [_arrow(arrow, places[arrow.start], places[arrow.end]) for arrow in ARROWS]
    parts += [_box(box, "#eef4fb", 0) for box in BOXES]
    parts += [_box(box, "#f1f1ec", _GROUND_GAP) for box in GROUND]
    return "\n".join([*parts, "</svg>", ""])


def _x(lane: int) -> int:
    return _LEFT + lane * (_WIDTH + _GAP_X)


def _y(row: int) -> int:
    return _TOP + row * (_HEIGHT + _GAP_Y)


def _box(box: Box, fill: str, lower: int) -> str:
    x, y, middle = _x(box.lane), _y(box.row) + lower, _x(box.lane) + _WIDTH // 2
    return (
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="{fill}" stroke="#456"/>'
        f'<text x="{middle}" y="{y + 20}" font-size="13" font-family="monospace" text-anchor="middle">'
        f"{escape(box.module)}</text>"
        f'<text x="{middle}" y="{y + 38}" font-size="12" fill="#333" text-anchor="middle">{escape(box.does)}</text>'
    )


def _arrow(arrow: Arrow, start: Box, end: Box) -> str:
    if start.lane == end.lane:
        x, down = _x(start.lane) + _WIDTH // 2, end.row > start.row
        y1 = _y(start.row) + (_HEIGHT if down else 0)
        y2 = _y(end.row) + (0 if down else _HEIGHT)
        line, label = (x, y1, x, y2), (x + 8, (y1 + y2) // 2 + 4, "start")
    else:
        right = end.lane > start.lane
        x1, x2 = _x(start.lane) + (_WIDTH if right else 0), _x(end.lane) + (0 if right else _WIDTH)
        y = _y(start.row) + (16 if right else 36)
        line, label = (x1, y, x2, y), ((x1 + x2) // 2, y - 4, "middle")
    numbers = 'x1="{}" y1="{}" x2="{}" y2="{}"'.format(*line)
    x, y, anchor = label
    return (
        f'<g><title>{escape(arrow.by)}</title><line {numbers} stroke="#333" marker-end="url(#tip)"/>'
        f'<text x="{x}" y="{y}" {_LABEL} text-anchor="{anchor}">{escape(arrow.carries)}</text></g>'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
