"""Three rounds of DeltaSoup, and the arrays that came out."""

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from gym_server.strategy import DeltaSoupStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = DeltaSoupStrategy(
        aggregator="trimmed_mean",
        num_malicious_nodes=1,
        min_train_nodes=3,
        min_available_nodes=3,
        fraction_evaluate=0.0,
    )
    start = ArrayRecord({"w": Array(np.zeros((2, 3), np.float32)), "b": Array(np.zeros(3, np.float32))})
    result = strategy.start(grid=grid, initial_arrays=start, num_rounds=3)
    report = {
        "w": result.arrays["w"].numpy().tolist(),
        "b": result.arrays["b"].numpy().tolist(),
        "rounds": len(result.train_metrics_clientapp),
    }
    part = Path(str(context.run_config["out"]) + ".part")
    part.write_text(json.dumps(report))
    part.rename(str(context.run_config["out"]))
