"""Train gym-nano on rows of your own, from Python, and ask what it has learned.

python examples/train.py [FOLDER]      # half a minute on one core
"""

import sys

from gym_fed import Trainer, TrainingConfig
from gym_fed.data import generate
from gym_fed.evaluation import answer, exact_match

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/examples/train"

# A row is a conversation; yours may be prompt and completion, or text, or come from a file.
rows = generate("double", 800)
print(rows[0])

config = TrainingConfig(
    model="gym-nano",
    output_dir=folder,
    max_steps=60,
    per_device_train_batch_size=16,
    learning_rate=1e-3,
    max_length=64,
)
result = Trainer(config).train(rows)
print(f"{result.steps} steps, loss {result.losses[0]:.2f} > {result.final_loss:.2f}, saved in {folder}")

unseen = generate("double", 50, split="heldout")
print(f"right on unseen rows: {exact_match(result.model, result.tokenizer, unseen):.0%}")
print("double: stone ->", answer(result.model, result.tokenizer, "double: stone"))
