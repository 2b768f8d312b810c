"""Train with differential privacy (DP-SGD) and read what the run reveals about any one row, as epsilon.

pip install 'gym-fed[privacy]'
python examples/privacy.py [FOLDER]     # half a minute on one core
"""

import sys

from gym_fed import Trainer, TrainingConfig
from gym_fed.data import generate

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/examples/privacy"

config = TrainingConfig(
    model="gym-nano",
    output_dir=folder,
    finetuning="lora",
    max_steps=10,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    max_length=64,
    privacy={"target_epsilon": 8, "target_delta": 1e-4, "max_grad_norm": 1.0},
)
result = Trainer(config).train(generate("double", 400))
assert result.privacy is not None
print(f"{result.steps} steps, noise multiplier {result.privacy.noise_multiplier:.2f}")
print(f"epsilon {result.epsilon:.2f} at delta {config.privacy.target_delta}, for each of 400 rows")
print("fewer rows, more steps or less noise: a larger epsilon, and weaker privacy")
