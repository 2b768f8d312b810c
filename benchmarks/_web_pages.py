"""The page that both sides show: a chart of 200 points and a table of 20 rows, new once a second.

python benchmarks/_web_pages.py ours PORT      the pages' own server, stream and charts
python benchmarks/_web_pages.py gradio PORT    gr.Timer, gr.LinePlot and gr.Dataframe; by a Python that has Gradio
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

POINTS, ROWS = 200, 20
COLUMNS = ("contributor", "verdict", "norm", "credit")
INDEX = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>page</title>
<link rel="stylesheet" href="/static/gym.css"><script type="module" src="/screens/main.js"></script></head>
<body><main id="main"></main></body></html>"""
MAIN = """import {start} from "/static/app.js";
start({links: [["/", "Page"]], screens: [["/", () => import("/screens/home.js")]]});"""
HOME = """import {el, on, replace, table} from "/static/app.js";
import {chart} from "/static/charts.js";
export const title = "Page";
export function show(root) {
  const plot = chart({title: "Loss", yLabel: "nats"}), rows = el("div");
  root.append(plot.node, rows);
  on("tick", (tick) => {
    plot.set([{name: "loss", points: tick.points}]);
    replace(rows, table(tick.columns.map((name, at) => ({name, of: (row) => row[at]})), tick.rows));
  });
}"""


def tick(now: float) -> dict[str, Any]:
    """What is shown at a moment."""
    start = int(now)
    return {
        "points": [
            [start + i, round(2 + math.sin((start + i) / 17) / (1 + i / 50), 4)] for i in range(POINTS)
        ],
        "columns": COLUMNS,
        "rows": [
            [f"node-{i}", "merged", f"{2.9 + math.sin(start + i):.3f}", str(300 + i)] for i in range(ROWS)
        ],
    }


def ours(port: int) -> None:
    """Serve by ``gym_fed.web``."""
    from fastapi import APIRouter

    from gym_fed.web.access import WebKeys
    from gym_fed.web.app import Face
    from gym_fed.web.events import Feed, PageEvent
    from gym_fed.web.server import WebServer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in (("index.html", INDEX), ("main.js", MAIN), ("home.js", HOME)):
            (folder / file).write_text(text)
        feed = Feed(lambda last: (PageEvent("tick", tick(time.time())),))

        def publish() -> None:
            while feed.has_readers.wait():
                feed.publish(PageEvent("tick", tick(time.time())))
                time.sleep(1)

        threading.Thread(target=publish, daemon=True).start()
        face = Face("page", "page", folder, APIRouter(), feed)
        keys = WebKeys(folder / "web_keys.json")
        WebServer(face, f"127.0.0.1:{port}", keys=keys, public=True, add_key="").run()


def theirs(port: int) -> None:
    """Serve by Gradio."""
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}
    import gradio as gr
    import pandas

    def shown() -> tuple[Any, Any]:
        now = tick(time.time())
        return pandas.DataFrame(now["points"], columns=["step", "loss"]), now["rows"]

    hues = {"primary_hue": "neutral", "secondary_hue": "neutral", "neutral_hue": "neutral"}
    theme = gr.themes.Monochrome(**hues, font=["sans-serif"], font_mono=["monospace"])
    with gr.Blocks(analytics_enabled=False) as page:
        plot = gr.LinePlot(x="step", y="loss", height=260)
        table = gr.Dataframe(headers=list(COLUMNS), interactive=False)
        gr.on([page.load, gr.Timer(1).tick], shown, outputs=[plot, table], show_progress="hidden")
    page.launch(server_name="127.0.0.1", server_port=port, theme=theme, ssr_mode=False, quiet=True)


if __name__ == "__main__":
    {"ours": ours, "gradio": theirs}[sys.argv[1]](int(sys.argv[2]))
