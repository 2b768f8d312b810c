"""The ServerApp: rounds with every node, whose updates are received and not merged."""

import json
import time
from pathlib import Path

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Wait for the nodes, create ``result.started``, run the rounds, and write what they took to ``result``."""
    config = context.run_config
    number, size = int(config["nodes"]), int(config["update-bytes"])
    result = Path(str(config["result"]))
    while len(nodes := list(grid.get_node_ids())) < number:
        time.sleep(0.5)
    result.with_suffix(".started").touch()
    rounds = [
        play(grid, nodes[:number], size, float(config["think-seconds"])) for _ in range(int(config["rounds"]))
    ]
    draft = result.with_suffix(".draft")
    draft.write_text(json.dumps(rounds))
    draft.rename(result)  # a reader of the result finds it whole


def play(grid: Grid, nodes: list[int], size: int, think: float) -> float:
    """Return the seconds of a round.

    Raises:
        RuntimeError: If a node fails, or an update has another size.
    """
    started = time.perf_counter()
    task = RecordDict({"task": MetricRecord({"bytes": size, "think": think})})
    waiting = set(
        grid.push_messages([Message(task, dst_node_id=node, message_type="train") for node in nodes])
    )
    while waiting:
        time.sleep(0.2)
        for reply in grid.pull_messages(waiting):
            if reply.has_error():
                raise RuntimeError(f"a ClientApp failed: {reply.error}")
            if len(reply.content.array_records["update"]["delta"].data) != size:
                raise RuntimeError("an update arrived with another size")
            waiting.discard(reply.metadata.reply_to_message_id)
    return time.perf_counter() - started
