"""A federation in one process: three contributors train, send one-bit deltas, and a robust rule merges them.

    python examples/federate.py [FOLDER]      # a minute on one core

The same with a hub and real processes: `python -c "from gym_fed import quickstart; quickstart.federate()"`.
"""

import sys
from pathlib import Path

from gym_fed import Trainer, TrainingConfig
from gym_fed.base.models import load_model
from gym_fed.data import generate, generate_mix
from gym_fed.evaluation import heldout_loss
from gym_fed.quantization import AggregationMethod, DeltaSoup, DeltaSoupConfig

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/federate")
TASKS = {"ada": "shout", "ben": "size", "cleo": "initial"}
heldout = generate_mix(list(TASKS.values()), 60, split="heldout")

current = load_model("gym-nano")
print(f"before: {heldout_loss(current.model, current.tokenizer, heldout):.2f} nats")
for number in (1, 2):
    soup = DeltaSoup(DeltaSoupConfig(method=AggregationMethod.MEAN), base=current.model)
    version = folder / f"version-{number - 1}"
    current.model.save_pretrained(version)
    current.tokenizer.save_pretrained(version)
    for name, task in TASKS.items():
        config = TrainingConfig(
            model=str(version),
            output_dir=folder / f"{name}-{number}",
            max_steps=15,
            per_device_train_batch_size=16,
            learning_rate=5e-4,
            max_length=64,
        )
        trained = Trainer(config).train(generate(task, 240, seed=number))
        soup.contribute(user_id=name, model=trained.model, num_examples=trained.num_examples)
    result = soup.aggregate(min_contributors=3)
    result.apply(current.model)
    loss = heldout_loss(current.model, current.tokenizer, heldout)
    size = result.path.stat().st_size
    print(f"round {number}: merged {', '.join(result.merged)}; {loss:.2f} nats; soup {size:,} bytes")
