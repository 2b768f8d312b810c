"""An MCP server: an assistant that speaks the Model Context Protocol may train gym-nano, follow the run and ask it.

    pip install mcp
    python examples/mcp_server.py [FOLDER]     # speaks over standard input and output

In a client's configuration: {"command": "python", "args": ["examples/mcp_server.py", "runs/mcp"]}.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mcp.server import MCPServer

from gym_fed.base.models import load_model
from gym_fed.core.registries import TASKS
from gym_fed.data import generate
from gym_fed.evaluation import answer

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/mcp")
server = MCPServer("gym-fed", instructions="Train a tiny language model on a named task, and ask it.")
runs: dict[str, subprocess.Popen[bytes]] = {}
MAX_TEXT, MAX_AT_ONCE, TAIL_BYTES = 2000, 2, 1 << 16


@server.tool()
def train(task: str, max_steps: int = 60) -> str:
    """Begin to train gym-nano on a task, in a process of its own. `status` follows it."""
    if task not in TASKS.names():
        return f"no task {task!r}; one of {', '.join(TASKS.names())}"
    if task in runs and runs[task].poll() is None:
        return f"{task} is training already"
    if not 1 <= max_steps <= 500:
        return f"max_steps {max_steps}: 1 to 500"
    if sum(run.poll() is None for run in runs.values()) >= MAX_AT_ONCE:
        return f"{MAX_AT_ONCE} runs may train at once"
    rows = json.dumps([{"tasks": [task], "num_examples": 800}])
    words = ["--model", "gym-nano", "--set", f"data={rows}", "--max-steps", str(max_steps)]
    words += ["--per-device-train-batch-size", "16", "--output-dir", str(folder / task), "--overwrite"]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{task}.log", "wb") as log:  # standard output is the protocol's
        command = [sys.executable, "-m", "gym_fed.cli.main", "train", *words]
        runs[task] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    return f"{task}: training began; an example row: {json.dumps(generate(task, 1)[0])}"


@server.tool()
def status() -> dict[str, Any]:
    """Every run that was begun: whether it still trains, and its last figures."""
    return {task: {"running": run.poll() is None, "figures": _last(task)} for task, run in runs.items()}


@server.tool()
def ask(text: str, model: str = "gym-nano") -> str:
    """One answer, of `gym-nano` or of a task that was trained. Example: text `copy: abc`."""
    if len(text) > MAX_TEXT:
        return f"a text of {len(text)} characters; {MAX_TEXT} at most"
    own = model in TASKS.names() and (folder / model / "model.safetensors").exists()
    if model != "gym-nano" and not own:
        return f"{model!r} is not trained here; call train, then status"
    loaded = load_model(str(folder / model) if own else model)
    return str(answer(loaded.model, loaded.tokenizer, text))


def _last(task: str) -> Any:
    """The newest line of a run's figures, from the end of their file; the run may be writing another one."""
    with contextlib.suppress(FileNotFoundError), open(folder / task / "metrics.jsonl", "rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES))
        lines = stream.read(TAIL_BYTES).split(b"\n")[:-1]  # behind the last end of a line: half a line
        return json.loads(lines[-1]) if lines else {}
    return {}


if __name__ == "__main__":
    server.run()
