"""Write the dashboards and alert rules from their tables; ``--check`` fails if the files differ.

Writes ``deploy/grafana/dashboards/*.json``, ``deploy/prometheus/rules.yml``, and the table of alerts in
``docs/observe.md``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.dashboards import api, client, hub
from tools.dashboards.signals import Alert, Panel

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS: Mapping[str, tuple[str, tuple[Panel, ...]]] = {
    "hub": ("gym-fed hub", hub.PANELS),
    "api": ("gym-fed API", api.PANELS),
}
"""Title and panels of each dashboard, by file name."""
GROUPS: Mapping[str, tuple[Alert, ...]] = {
    "gym-hub": tuple(alert for panel in hub.PANELS for alert in panel.alerts),
    "gym-api": tuple(alert for panel in api.PANELS for alert in panel.alerts),
    "gym-client": client.ALERTS,
}
"""The alerts of each rule group."""
PAGE = "docs/observe.md"
BEGIN, END = "<!-- alerts, by tools/dashboards -->\n", "<!-- until here -->\n"
_HEADER = "# Written by `python -m tools.dashboards`; edit the tables there.\n"
_COLUMNS, _HEIGHT, _NUMBER_HEIGHT = 3, 8, 4
_GRID_WIDTH = 24
_SOURCE = {"type": "prometheus", "uid": "prometheus"}
_UNITS = {"reqps": "reqps", "ops": "ops", "nats": "short"}


def dashboard(name: str) -> dict[str, Any]:
    """Return a dashboard in Grafana's JSON model."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"gym-{name}",
        "title": title,
        "tags": ["gym-fed"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "panels": list(_placed(panels)),
    }


def _placed(panels: Iterable[Panel]) -> Iterable[dict[str, Any]]:
    """Yield the panels in rows: numbers first, four in a row, then graphs, three in a row."""
    x = y = height = 0
    for number, panel in enumerate(sorted(panels, key=lambda panel: not panel.is_number), 1):
        width = _GRID_WIDTH // (_COLUMNS + panel.is_number)
        if x + width > _GRID_WIDTH or (height and height != (_NUMBER_HEIGHT if panel.is_number else _HEIGHT)):
            x, y = 0, y + height
        height = _NUMBER_HEIGHT if panel.is_number else _HEIGHT
        yield {**_panel(number, panel), "gridPos": {"x": x, "y": y, "w": width, "h": height}}
        x += width


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    lines = [alert.threshold for alert in panel.alerts if alert.threshold is not None]
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [{"color": "red", "value": line} for line in lines]
    custom = {"thresholdsStyle": {"mode": "line" if lines else "off"}}
    return {
        "id": number,
        "type": "stat" if panel.is_number else "timeseries",
        "title": panel.title,
        "description": "; ".join(f"{alert.name}: {alert.when}" for alert in panel.alerts),
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {
                "unit": _UNITS.get(panel.unit, panel.unit),
                "thresholds": {"mode": "absolute", "steps": steps},
                **({} if panel.is_number else {"custom": custom}),
            },
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def rules() -> str:
    """Return the alert rules in Prometheus' YAML; JSON strings are YAML too."""
    lines = [_HEADER + "groups:"]
    for group, alerts in GROUPS.items():
        lines += [f"  - name: {group}", "    rules:"]
        for alert in alerts:
            severity = "critical" if alert.is_critical else "warning"
            lines += [
                f"      - alert: {alert.name}",
                f"        expr: {json.dumps(alert.expression)}",
                f"        for: {alert.wait}",
                f"        labels: {{severity: {severity}}}",
                "        annotations:",
                f"          summary: {json.dumps(_plain(alert.when))}",
                f"          description: {json.dumps(_plain(alert.remedy))}",
                f"          runbook: {PAGE}#alerts",
            ]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace("`", "")


def alert_table() -> str:
    """Return the table of alerts for the page."""
    rows = (
        f"| {alert.name} | {alert.when} | {alert.remedy} |\n"
        for alerts in GROUPS.values()
        for alert in alerts
    )
    return "\n| alert | when | remedy |\n|---|---|---|\n" + "".join(rows) + "\n"


def files() -> dict[Path, str]:
    """Return the text of every file that this module writes."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    written = {
        ROOT / "deploy/grafana/dashboards" / f"{name}.json": json.dumps(dashboard(name), indent=1) + "\n"
        for name in DASHBOARDS
    }
    return {
        **written,
        ROOT / "deploy/prometheus/rules.yml": rules(),
        ROOT / PAGE: head + BEGIN + alert_table() + END + rest.split(END)[1],
    }


def main(check: bool) -> int:
    """Write the files, or report those that differ; return the exit status."""
    differing = [
        path for path, text in files().items() if not path.exists() or path.read_text("utf-8") != text
    ]
    for path in differing:
        if check:
            print(f"{path.relative_to(ROOT)}: differs from its tables: run python -m tools.dashboards")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files()[path], encoding="utf-8")
    return int(check and bool(differing))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
