"""Make one model of two fine-tunes: write each as a one-bit delta, merge them by two methods, compare the losses.

python examples/soup.py [FOLDER]      # half a minute on one core
"""

import sys
from pathlib import Path

from gym_fed import Trainer, TrainingConfig
from gym_fed.base.models import load_model
from gym_fed.data import generate, generate_mix
from gym_fed.evaluation import heldout_loss
from gym_fed.quantization import (
    AggregationMethod,
    BitDeltaConfig,
    BitDeltaQuantizer,
    DeltaSoup,
    DeltaSoupConfig,
)

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/soup")
TASKS = ("shout", "size")
heldout = generate_mix(list(TASKS), 60, split="heldout")

for task in TASKS:
    config = TrainingConfig(
        model="gym-nano",
        output_dir=folder / task,
        max_steps=25,
        per_device_train_batch_size=16,
        learning_rate=5e-4,
        max_length=64,
    )
    tuned = Trainer(config).train(generate(task, 400))
    report = BitDeltaQuantizer(BitDeltaConfig(group_size="row", distill_steps=0)).quantize(
        base="gym-nano", tuned=tuned.model, out=folder / f"{task}.gymdelta"
    )
    print(f"{task}: {report.bits_per_weight:.2f} bits per weight")

for method in (AggregationMethod.MEAN, AggregationMethod.TIES):
    soup = DeltaSoup(DeltaSoupConfig(base_model="gym-nano", method=method))
    for task in TASKS:
        soup.contribute(user_id=task, model=folder / f"{task}.gymdelta")
    merged = load_model("gym-nano")
    soup.aggregate(min_contributors=2).apply(merged.model)
    print(f"{method.value}: {heldout_loss(merged.model, merged.tokenizer, heldout):.2f} nats on both tasks")
